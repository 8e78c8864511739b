"""D10: when nothing moves any more, the run says where each thread stands and ends, and the next one goes on."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from batchgen import watchdog

ENGINE, STOPPED, HANG = 5, 75, 0
NUM_ROWS = 60

STOPPED_FOR_LONG = """
import os, signal, time
from batchgen.watchdog import Watchdog

class Output:
    num_moves = 0

with Watchdog("1s", 1, lambda text, code: None, Output()):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.4)
"""


@pytest.fixture
def job(job_folder):
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(NUM_ROWS)])
    job_folder.save(
        output={"columns": ["id"], "part_rows": 10}, engine={"max_batch_rows": 8}, checkpoint={"every": "0.05s"}
    )
    return job_folder


@pytest.fixture
def run(job, forks, tmp_path):
    path = job.save()
    return lambda *options, **arrangement: forks.run("run", str(path), *options, log=tmp_path / "log", **arrangement)


@pytest.mark.parametrize(
    ("at", "stuck_in"),
    [
        (("load", 1), "in run_job"),
        (("step", 20), "in generate"),
        (("append", 2), "_append"),
        (("fsync", 4), "in sync"),
    ],
)
def test_D10_a_hang_ends_with_the_stacks_and_is_gone_on_from(job, run, tmp_path, at, stuck_in):
    assert run("--set", "limits.stall=2s", "--grace", "0.5", at=at, signals=[HANG])["ended"] == ENGINE
    log = (tmp_path / "log").read_text()
    assert "batchgen: error: nothing moved for 2s (limits.stall)" in log.splitlines()[-1]
    assert "thread MainThread:\n" in log
    assert stuck_in in log
    assert run()["ended"] == 0
    assert [row["id"] for row in job.rows()] == list(range(NUM_ROWS))


def test_D10_what_was_finished_before_the_hang_is_kept(job, run, tmp_path):
    options = ("--set", "limits.stall=2s", "--set", "checkpoint.every=1h", "--log-json")
    assert run(*options, at=("row", 30), signals=[HANG])["ended"] == ENGINE
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"]) == ("error", ENGINE)
    assert last["text"].splitlines()[-1].startswith("batchgen: error: nothing moved for 2s")
    assert any(name.startswith("journal/") for name in job.files())
    assert not (job.out / ".batchgen.lock").exists()
    assert run()["ended"] == 0
    assert [row["id"] for row in job.rows()] == list(range(NUM_ROWS))


def test_D11_the_end_of_the_grace_time_is_told_in_json_too(run, tmp_path):
    done = run("--grace", "0.3", "--log-json", at=("step", 3), signals=[signal.SIGTERM, HANG])
    assert done["ended"] == STOPPED
    last = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert (last["event"], last["exit_code"]) == ("stopped", STOPPED)
    assert last["text"].startswith("batchgen: not done 0.3 s after SIGTERM, so it ends now.")


def test_a_run_in_which_something_moves_is_left_alone(monkeypatch):
    ended = []
    monkeypatch.setattr(watchdog, "end_process", lambda code, *_: ended.append(code))
    output = SimpleNamespace(num_moves=0, close=lambda: None)
    with watchdog.Watchdog("0.2s", 1, pytest.fail, output) as watch:
        watch.look_at(lambda: 1)
        watch.look_at(time.monotonic)
        time.sleep(1)
    assert not ended
    with watchdog.Watchdog("0.2s", 1, pytest.fail, output) as watch:
        watch.look_at(lambda: 1)
        time.sleep(1)
    assert set(ended) == {ENGINE}


def test_a_process_that_was_stopped_and_goes_on_has_not_stalled():
    process = subprocess.Popen([sys.executable, "-P", "-c", STOPPED_FOR_LONG])
    os.waitpid(process.pid, os.WUNTRACED)
    time.sleep(1.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0


def test_nothing_watches_a_job_that_has_ended(job_folder):
    """A thread that still holds the engine when the process ends lets it die of SIGABRT, with all rows written."""
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    assert job_folder.run().exit_code == 0
    assert not [thread for thread in threading.enumerate() if thread.name == "batchgen-watchdog"]
