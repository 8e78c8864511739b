"""An S3 store that stays away: what is finished is not lost."""

import time
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.data import s3 as s3_module
from batchgen.data.rows import OutputRow
from batchgen.errors import StorageError


def test_D06_trouble_that_stays_ends_resumably(s3_job, faulty_s3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 2)
    folder = s3_job.open(faulty_s3("out"))
    s3_job.fill(folder, 5)
    folder._open.checkpoints.drain()
    faulty_s3.proxy.add("SlowDown", times=10**6, method="PUT")
    with pytest.raises(StorageError, match="as arranged"):
        s3_job.fill(folder), folder.finish()
    faulty_s3.proxy.faults.clear()
    folder.close()
    with s3_job.open(faulty_s3("out")) as folder:
        assert 5 <= folder.num_finished_rows < 12
        s3_job.fill(folder)
        folder.finish()
    assert s3_job.outputs(faulty_s3("out")) == s3_job.right()


def test_D06_a_slow_store_does_not_stop_the_engine(s3_job, faulty_s3, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are taken while an upload waits; the wait is over when the store is well again."""
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 50)
    with s3_job.open(faulty_s3("out"), 400) as folder:
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
    assert s3_job.outputs(faulty_s3("out")) == s3_job.right(400)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this machine keeps what a store did not take."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "unsent"


def kept(cache: Path) -> int:
    return sum(pq.read_metadata(path).num_rows for path in cache.rglob("*.parquet"))


@pytest.mark.parametrize("rows", [2, 4, 7])
def test_D06_what_a_store_did_not_take_is_kept_here_and_sent_by_the_next_run(
    s3_job, faulty_s3, monkeypatch: pytest.MonkeyPatch, cache: Path, rows: int
) -> None:
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 1)
    with suppress(StorageError), s3_job.open(faulty_s3("out")) as folder:
        s3_job.fill(folder, 3)
        folder._open.checkpoints.drain()
        faulty_s3.proxy.add("SlowDown", times=10**6, method="PUT")
        for row in range(3, 3 + rows):
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        folder.checkpoint()
        folder._open.checkpoints.drain()
        pytest.fail("the store took them")
    assert kept(cache) == rows
    faulty_s3.proxy.faults.clear()
    with s3_job.open(faulty_s3("out")) as folder:
        assert kept(cache) == 0
        assert folder.num_finished_rows == 3 + rows
        s3_job.fill(folder)
        folder.finish()
    assert s3_job.outputs(faulty_s3("out")) == s3_job.right()
    assert list(cache.rglob("*")) == []


def test_D06_rows_are_kept_while_a_request_hangs(s3_job, faulty_s3, monkeypatch, cache: Path) -> None:
    """A signal's grace time is over, and the writer still waits for the store."""
    monkeypatch.setattr(s3_module.S3FileSystem, "retries", 50)
    with s3_job.open(faulty_s3("out")) as folder:
        faulty_s3.proxy.add("SlowDown", times=10**6, method="PUT")
        for row in range(3):
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row}"))
        folder.checkpoint()
        folder.add(OutputRow(5, 0, "ok", output="answer 5"))
        folder.keep_unsent()
        assert kept(cache) == 4
        faulty_s3.proxy.faults.clear()


def test_D06_rows_kept_by_another_job_or_damaged_are_left_out(
    s3_job, s3, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with s3_job.open(s3("out")) as folder:
        s3_job.fill(folder, 3)
        job_id = folder.manifest.job_id
    (cache / job_id).mkdir(parents=True)
    (cache / job_id / "0.parquet").write_bytes(b"PAR1 and no more")
    (cache / "another").mkdir()
    (cache / "another" / "0.parquet").write_bytes(b"")
    with s3_job.open(s3("out")) as folder:
        assert folder.num_finished_rows == 3
        s3_job.fill(folder)
        folder.finish()
    assert "0.parquet can't be read, its rows are done again" in caplog.text
    assert [path.name for path in cache.iterdir()] == ["another"]
