"""S3 with a real server: names, claims and jobs; and through a proxy all that goes wrong between here and there."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data import lock, s3_claim, storage
from batchgen.data import s3 as s3_module
from batchgen.data.lock import OutputLock
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow
from batchgen.errors import LockedError, StorageError

ODD_NAMES = ["a b.bin", "50%.bin", "a+b.bin", "[x].bin", "é 日本.bin", "a&b=c.bin", "a#b.bin", "%20.bin"]
MODEL = SourceRecord(name="model", fingerprint="f0")


def open_folder(url: str, num_rows: int = 12) -> OutputFolder:
    manifest = Manifest(
        batchgen_version="0.1.0",
        spec={},
        fingerprint={},
        inputs=(),
        model=MODEL,
        tokenizer=MODEL,
        num_rows=num_rows,
        n=1,
        part_rows=4,
    )
    return OutputFolder.open(url, manifest=manifest, carried=pa.schema([]), checkpoint_s=1000)


def fill(folder: OutputFolder, stop: int | None = None) -> None:
    """Add pending rows, with a checkpoint after each."""
    for row in [row for rows in folder.pending() for row in rows][:stop]:
        folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        folder.checkpoint()


def outputs(url: str) -> list[str]:
    fs, path = storage.filesystem(url)
    parts = sorted(file.path for file in storage.list_files(fs, path) if file.path.endswith(".parquet"))
    return [text for part in parts for text in pq.read_table(part, filesystem=fs)["output"].to_pylist()]


def right(num_rows: int = 12) -> list[str]:
    return [f"answer {row}" for row in range(num_rows)]


def code_of(error: BaseException) -> str:
    return s3_module.error_code(error.__cause__ or error)


def test_D06_names_with_every_kind_of_character(s3) -> None:
    for name in ODD_NAMES:
        fs, path = storage.filesystem(s3("in [1] + ü", name))
        storage.write_bytes(fs, path, name.encode())
        assert storage.exists(fs, path)
        assert storage.read_bytes(fs, path) == name.encode()
    fs, folder = storage.filesystem(s3("in [1] + ü"))
    assert [Path(file.path).name for file in storage.list_files(fs, folder)] == sorted(ODD_NAMES)
    for file in storage.list_files(fs, folder):
        storage.remove(fs, file.path)
    assert storage.list_files(fs, folder) == []


def test_D07_what_another_client_writes_is_seen_at_once(s3) -> None:
    """Listing caches hid another run's lock."""
    fs, path = storage.filesystem(s3("a.bin"))
    assert not storage.exists(fs, path)
    assert storage.list_files(fs, path.rpartition("/")[0]) == []
    other = fsspec.filesystem("s3", skip_instance_cache=True)
    other.pipe_file(path, b"1")
    assert storage.exists(fs, path)
    assert [file.size for file in storage.list_files(fs, path.rpartition("/")[0])] == [1]
    other.pipe_file(path, b"22")
    assert storage.read_bytes(fs, path) == b"22"


def test_D07_of_claims_at_the_same_moment_exactly_one_wins(s3) -> None:
    barrier = threading.Barrier(8)

    def acquire(_: int) -> OutputLock | None:
        barrier.wait()
        try:
            return OutputLock.acquire(s3("out"))
        except LockedError:
            return None

    with ThreadPoolExecutor(8) as pool:
        locks = [held for held in pool.map(acquire, range(8)) if held is not None]
    assert len(locks) == 1
    locks[0].check()
    locks[0].release()
    OutputLock.acquire(s3("out")).release()


def test_D07_a_silent_holder_is_taken_over_and_notices(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    first = OutputLock.acquire(s3("out"))
    first._released.set()  # its heart stops
    monkeypatch.setattr(lock, "host_id", lambda: "another machine")
    with pytest.raises(LockedError, match="is in use"):
        OutputLock.acquire(s3("out"))
    monkeypatch.setattr(lock, "STALE_S", -1.0)
    second = OutputLock.acquire(s3("out"))
    with pytest.raises(LockedError, match="was taken over"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_job_in_pieces_leaves_parts_and_manifest_only(s3) -> None:
    for _ in range(3):
        with open_folder(s3("out")) as folder:
            fill(folder, 3)
    fs, path = storage.filesystem(s3("out"))
    assert [file.path for file in storage.list_files(fs, path) if "/journal/" in file.path]
    with open_folder(s3("out")) as folder:
        assert folder.num_finished_rows == 9
        fill(folder)
        folder.finish()
    assert outputs(s3("out")) == right()
    names = [Path(file.path).name for file in storage.list_files(fs, path)]
    assert names == ["manifest.json", *(f"part-0000{i}-of-00003.parquet" for i in range(3))]
    assert not fs.call_s3("list_multipart_uploads", Bucket=path.split("/")[0]).get("Uploads")


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "reset", "lost"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_D06_trouble_that_passes_changes_nothing(faulty_s3, kind: str, method: str) -> None:
    fault = faulty_s3.proxy.add(kind, times=4, method=method)
    with open_folder(faulty_s3("out")) as folder:
        fill(folder, 7)
    with open_folder(faulty_s3("out")) as folder:
        assert folder.num_finished_rows == 7
        fill(folder)
        folder.finish()
    assert fault.times == 0
    assert outputs(faulty_s3("out")) == right()


def test_D06_a_cut_answer_never_gives_less(faulty_s3) -> None:
    fs, path = storage.filesystem(faulty_s3("big.bin"))
    content = bytes(range(256)) * 4000
    storage.write_bytes(fs, path, content)
    fault = faulty_s3.proxy.add("truncated", times=3, method="GET", path="big.bin")
    assert storage.read_bytes(fs, path) == content
    with fs.open(path, "rb") as file:
        assert file.read() == content
    assert fault.times == 0


def test_D07_a_claim_whose_answer_was_lost_is_ours(faulty_s3) -> None:
    """It is sent again, and refused since it succeeded: the token tells."""
    fault = faulty_s3.proxy.add("lost", method="PUT", path=lock.LOCK_NAME)
    held = OutputLock.acquire(faulty_s3("out"))
    assert fault.times == 0
    assert len([line for line in faulty_s3.proxy.seen if line.startswith("PUT")]) == 2
    held.check()
    fault = faulty_s3.proxy.add("lost", method="DELETE", path=lock.LOCK_NAME)
    held.release()
    assert fault.times == 0
    fs, path = storage.filesystem(faulty_s3("out"))
    assert storage.list_files(fs, path) == []


def test_D06_trouble_that_stays_ends_resumably(faulty_s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 2)
    folder = open_folder(faulty_s3("out"))
    fill(folder, 5)
    folder._open.checkpoints.drain()
    faulty_s3.proxy.add("SlowDown", times=10**6, method="PUT")
    with pytest.raises(StorageError, match="as arranged"):
        fill(folder), folder.finish()
    faulty_s3.proxy.faults.clear()
    folder.close()
    with open_folder(faulty_s3("out")) as folder:
        assert 5 <= folder.num_finished_rows < 12
        fill(folder)
        folder.finish()
    assert outputs(faulty_s3("out")) == right()


def test_D06_refusal_is_final_and_says_what_to_do(faulty_s3) -> None:
    faulty_s3.proxy.add("AccessDenied", times=10**6, method="PUT")
    with pytest.raises(StorageError, match=r"no permission .*: check the credentials, and what they may do there"):
        open_folder(faulty_s3("out"))
    assert len([line for line in faulty_s3.proxy.seen if line.startswith("PUT")]) == 1


def test_D06_expired_credentials_are_read_again(faulty_s3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script_key, script_secret = "testkey", "testsecret"
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    credentials = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    credentials.write_text(f"[work]\naws_access_key_id = {script_key}\naws_secret_access_key = {script_secret}\n")
    storage.configure(endpoint=None, region=None, profile="work", anonymous=False)
    fs, path = storage.filesystem(faulty_s3("a.bin"))
    storage.write_bytes(fs, path, b"1")
    session = fs.session
    fault = faulty_s3.proxy.add("ExpiredToken")
    storage.write_bytes(fs, path, b"2")
    assert fault.times == 0
    assert fs.session is not session
    assert storage.read_bytes(fs, path) == b"2"


def test_D06_options_hold_for_listing_reading_and_writing(s3, seaweed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    storage.configure(endpoint=seaweed, region="eu-west-1", profile=None, anonymous=False)
    with open_folder(s3("out")) as folder:
        fill(folder)
        folder.finish()
    assert outputs(s3("out")) == right()
    storage.configure(endpoint=seaweed, region=None, profile=None, anonymous=True)
    with pytest.raises(StorageError, match="no permission"):
        open_folder(s3("other"))
    storage.configure(endpoint=seaweed, region=None, profile="nobody", anonymous=False)
    with pytest.raises(StorageError, match=r"The config profile \(nobody\) could not be found"):
        open_folder(s3("other"))


def test_D06_without_credentials(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"set AWS_ACCESS_KEY_ID .*, or storage\.anonymous: true"):
        open_folder(s3("out"))


def test_a_claim_is_given_up_when_others_change_it_all_the_time(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = storage.filesystem(s3("claim"))
    claim = s3_claim.S3Claim(fs, path)
    monkeypatch.setattr(claim, "_try", lambda new, etag: False)
    with pytest.raises(StorageError, match="changed by somebody else 10 times in a row"):
        claim.change(lambda holder: lock.Claim.new(), create=True)


def test_a_whole_job_on_s3_leaks_no_credentials(s3, job_folder) -> None:
    fs, base = storage.filesystem(s3("in").removesuffix("/in"))
    for place, name in enumerate(["a b.jsonl", "50%.jsonl", "[c]+é.jsonl"]):
        rows = [json.dumps({"id": row, "prompt": f"row {row}"}) for row in range(4 * place, 4 * place + 4)]
        storage.write_bytes(fs, f"{base}/in/{name}", "\n".join(rows).encode())
    model = Path(job_folder.job["model"])
    for file in model.iterdir():
        storage.write_bytes(fs, f"{base}/model/{file.name}", file.read_bytes())
    job_folder.save(
        model=s3("model"), input={"path": s3("in")}, output={"path": s3("out"), "columns": ["id"], "part_rows": 5}
    )
    done = job_folder.run()
    assert done.exit_code == 0, done.log
    with fs.open(f"{base}/out/manifest.json") as file:
        manifest = json.load(file)
    assert (manifest["state"], manifest["num_rows"]) == ("finished", 12)
    parts = sorted(name for name in fs.find(f"{base}/out") if name.endswith(".parquet"))
    assert sorted(pq.read_table(parts, filesystem=fs)["id"].to_pylist()) == list(range(12))
    assert "nothing to do" in job_folder.run().log
    for name in fs.find(f"{base}/out"):
        assert b"testsecret" not in fs.cat_file(name)
    assert "testsecret" not in done.log + done.stdout


def test_D06_a_slow_store_does_not_stop_the_engine(faulty_s3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken while an upload waits; the wait is over when the store is well again."""
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 50)
    with open_folder(faulty_s3("out"), 400) as folder:
        fault = faulty_s3.proxy.add("SlowDown", times=10**6, method="PUT")
        fill_began = time.monotonic()
        for row in range(3):
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        folder.checkpoint()
        for row in range(4, 400, 5):  # no part becomes whole
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        assert time.monotonic() - fill_began < 5
        assert fault.times > 0
        faulty_s3.proxy.faults.clear()
        for row in {row for rows in folder.pending() for row in rows}:
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        folder.finish()
    assert outputs(faulty_s3("out")) == right(400)
