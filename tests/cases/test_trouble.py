"""Full disks, dead engines and refused places: a clear line, its exit code, and nothing lost that was finished."""

import errno
import json
import os
import shutil

import pytest

OK, STORAGE, ENGINE, FAULT = 0, 4, 5, 70
NUM_ROWS = 30


@pytest.fixture
def job(job_folder):
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(NUM_ROWS)])
    job_folder.save(
        output={"part_rows": 10, "columns": ["id"]}, engine={"max_batch_rows": 4}, checkpoint={"every": "0.02s"}
    )
    return job_folder


def finishes(job):
    done = job.run()
    assert done.exit_code == OK, done.log
    assert done.column("id") == list(range(NUM_ROWS))
    assert not [name for name in done.files if "journal" in name or name.endswith(".tmp")]
    return done


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
@pytest.mark.parametrize("place", [1, 3, 5, 9])
def test_D05_a_disk_that_fails_at_any_sync_ends_the_job_resumably(job, monkeypatch, number, place):
    fsync, left = os.fsync, [place]

    def failing(handle):
        left[0] -= 1
        if left[0] <= 0:
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", failing)
    done = job.run()
    monkeypatch.undo()
    assert done.exit_code == STORAGE
    last = done.log.splitlines()[-1]
    assert last.startswith("batchgen: error: ")
    assert str(job.folder) in last
    assert ("bytes free" in last) == (number == errno.ENOSPC)
    assert "Traceback" not in done.log
    finishes(job)


def test_D05_a_place_where_nothing_can_be_written(job):
    done = job.run(output={"path": "/proc/batchgen/out"})
    assert done.exit_code == STORAGE
    assert "/proc/batchgen" in done.log


def test_D05_an_output_folder_that_is_removed_while_the_job_runs(job, monkeypatch):
    from batchgen.data.output import OutputFolder

    add, left = OutputFolder.add, [12]

    def removing(self, row):
        left[0] -= 1
        if left[0] == 0:
            shutil.rmtree(job.out)
        add(self, row)

    monkeypatch.setattr(OutputFolder, "add", removing)
    done = job.run()
    monkeypatch.undo()
    assert done.exit_code == STORAGE
    assert done.log.splitlines()[-1].startswith(f"batchgen: error: {job.out}")
    assert "Traceback" not in done.log
    finishes(job)


@pytest.mark.parametrize(("error", "code"), [("EngineError", ENGINE), ("RuntimeError", FAULT)])
def test_D10_when_the_engine_dies_what_is_finished_is_kept(job, monkeypatch, error, code):
    import batchgen.errors
    from batchgen.engine import Engine

    step, left = Engine.step, [12]

    def dying(self):
        left[0] -= 1
        if left[0] == 0:
            raise getattr(batchgen.errors, error, RuntimeError)("the device is gone")
        return step(self)

    monkeypatch.setattr(Engine, "step", dying)
    done = job.run(checkpoint={"every": "1h"})  # nothing is journalled but at the end
    monkeypatch.undo()
    assert done.exit_code == code
    assert "the device is gone" in done.log
    assert any(name.startswith("journal/") for name in done.files)
    asked = []
    from batchgen.answers import Answers

    ask = Answers.ask
    monkeypatch.setattr(Answers, "ask", lambda self, planned: asked.append(planned) or ask(self, planned))
    finishes(job)
    assert len(asked) < NUM_ROWS


def test_D12_the_log_of_a_long_job_stays_short(job, monkeypatch):
    """One line per interval, one per kind of warning, whatever the number of rows."""
    rows = [{"id": row, "prompt": None if row % 2 else "x"} for row in range(2000)]
    job.write("rows.jsonl", rows)
    done = job.run("--log-json", generate={"max_tokens": 1}, limits={"failed_rows": "60%"})
    assert done.exit_code == OK
    lines = [json.loads(line) for line in done.log.splitlines()]
    assert len(lines) < 10
    assert lines[-1]["report"]["rows"] == 2000
