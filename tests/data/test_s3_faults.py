"""What goes wrong for a moment between here and S3, done by a proxy in front of a real server."""

from pathlib import Path

import pytest

from batchgen.data import lock, storage
from batchgen.data.lock import OutputLock
from batchgen.errors import StorageError


@pytest.mark.parametrize("kind", ["SlowDown", "InternalError", "reset", "lost"])
@pytest.mark.parametrize("method", ["PUT", "GET", "DELETE"])
def test_D06_trouble_that_passes_changes_nothing(s3_job, faulty_s3, kind: str, method: str) -> None:
    fault = faulty_s3.proxy.add(kind, times=4, method=method)
    with s3_job.open(faulty_s3("out")) as folder:
        s3_job.fill(folder, 7)
    with s3_job.open(faulty_s3("out")) as folder:
        assert folder.num_finished_rows == 7
        s3_job.fill(folder)
        folder.finish()
    assert fault.times == 0
    assert s3_job.outputs(faulty_s3("out")) == s3_job.right()


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


def test_D06_refusal_is_final_and_says_what_to_do(s3_job, faulty_s3) -> None:
    faulty_s3.proxy.add("AccessDenied", times=10**6, method="PUT")
    with pytest.raises(StorageError, match=r"no permission .*: check the credentials, and what they may do there"):
        s3_job.open(faulty_s3("out"))
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
