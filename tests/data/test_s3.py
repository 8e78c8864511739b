"""S3 with a real server: names, claims, credentials and jobs."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from batchgen.data import lock, s3_claim, storage
from batchgen.data.lock import OutputLock
from batchgen.errors import LockedError, StorageError

ODD_NAMES = ["a b.bin", "50%.bin", "a+b.bin", "[x].bin", "é 日本.bin", "a&b=c.bin", "a#b.bin", "%20.bin"]


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
    with pytest.raises(LockedError, match="is in use"):
        OutputLock.acquire(s3("out"))
    monkeypatch.setattr(lock, "host_id", lambda: "another machine")
    monkeypatch.setattr(lock, "STALE_S", -1.0)
    second = OutputLock.acquire(s3("out"))
    with pytest.raises(LockedError, match="was taken over"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_D07_a_living_holder_is_taken_over_when_asked(s3, caplog: pytest.LogCaptureFixture) -> None:
    first = OutputLock.acquire(s3("out"))
    second = OutputLock.acquire(s3("out"), takeover=True)
    assert f"out was taken over from process {os.getpid()} on" in caplog.text
    with pytest.raises(LockedError, match="was taken over by process"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_job_in_pieces_leaves_parts_and_manifest_only(s3_job, s3) -> None:
    for _ in range(3):
        with s3_job.open(s3("out")) as folder:
            s3_job.fill(folder, 3)
    fs, path = storage.filesystem(s3("out"))
    assert [file.path for file in storage.list_files(fs, path) if "/journal/" in file.path]
    with s3_job.open(s3("out")) as folder:
        assert folder.num_finished_rows == 9
        s3_job.fill(folder)
        folder.finish()
    assert s3_job.outputs(s3("out")) == s3_job.right()
    names = [Path(file.path).name for file in storage.list_files(fs, path)]
    assert names == ["manifest.json", *(f"part-0000{i}-of-00003.parquet" for i in range(3))]
    assert not fs.call_s3("list_multipart_uploads", Bucket=path.split("/")[0]).get("Uploads")


def test_D06_options_hold_for_listing_reading_and_writing(
    s3_job, s3, seaweed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    storage.configure(endpoint=seaweed, region="eu-west-1", profile=None, anonymous=False)
    with s3_job.open(s3("out")) as folder:
        s3_job.fill(folder)
        folder.finish()
    assert s3_job.outputs(s3("out")) == s3_job.right()
    storage.configure(endpoint=seaweed, region=None, profile=None, anonymous=True)
    with pytest.raises(StorageError, match="no permission"):
        s3_job.open(s3("other"))
    storage.configure(endpoint=seaweed, region=None, profile="nobody", anonymous=False)
    with pytest.raises(StorageError, match=r"The config profile \(nobody\) could not be found"):
        s3_job.open(s3("other"))


def test_D06_without_credentials(s3_job, s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match=r"set AWS_ACCESS_KEY_ID .*, or storage\.anonymous: true"):
        s3_job.open(s3("out"))


def test_a_claim_is_given_up_when_others_change_it_all_the_time(s3, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = storage.filesystem(s3("claim"))
    claim = s3_claim.S3Claim(fs, path)
    monkeypatch.setattr(claim, "_try", lambda new, etag: False)
    with pytest.raises(StorageError, match="changed by somebody else 10 times in a row"):
        claim.change(lambda holder: lock.Claim.new(), create=True)
