"""Kills, signals and second runs: whatever happens, the job can be run again and ends with the same rows."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

STOPPED, LOCKED = 75, 4
FEW_SHOT = "Review: A warm and funny film.\nSentiment: positive\n\nReview: Dull and long.\nSentiment: negative\n\n"
NUM_ROWS, PART_ROWS = 60, 10


@pytest.fixture
def labels(job_folder):
    """A job like the quickstart's: a few-shot prompt, two choices, several parts."""
    job_folder.write("rows.jsonl", [{"id": row, "text": f"Film number {row}."} for row in range(NUM_ROWS)])
    job_folder.save(
        prompt={"text": FEW_SHOT + "Review: {{ text }}\nSentiment:"},
        generate={"choices": [" positive", " negative"]},
        output={"columns": ["id"], "part_rows": PART_ROWS},
        engine={"max_batch_rows": 8},
    )
    return job_folder


@pytest.fixture
def run(labels, forks, tmp_path):
    """Runs the job in a process of its own, into a folder of the given name."""
    job = labels.save()

    def go(name="out", *options, **arrangement):
        labels.job["output"]["path"] = name
        output = f"output.path={labels.folder / name}"
        return forks.run("run", str(job), "--set", output, *options, log=tmp_path / f"{name}.log", **arrangement)

    return go


def log_of(tmp_path, name="out"):
    return (tmp_path / f"{name}.log").read_text()


def rows_of(labels, name, *, about=False):
    """All rows but for what depends on who else was in the batch: what the cache spared.

    `about` leaves room for the last bits of sums, which depend on it too.
    """
    rows = [row for part in sorted((labels.folder / name).glob("part-*")) for row in pq.read_table(part).to_pylist()]
    for row in rows:
        row["cached_tokens"] = 0
        if about:
            row |= {field: pytest.approx(row[field], abs=1e-5) for field in ("label_probs", "margin")}
    return rows


def test_D01_kill_9_at_ten_points_and_run_again(labels, run):
    assert run("whole")["ended"] == 0
    whole = rows_of(labels, "whole", about=True)
    assert [row["row"] for row in whole] == list(range(NUM_ROWS))
    files = sorted(path.name for path in (labels.folder / "whole").iterdir())

    points = [("load", 1), ("row", 1), ("row", 27), ("row", 60), ("step", 4), ("fsync", 1), ("fsync", 3)]
    points += [("replace", 1), ("replace", 4), ("replace", 8)]  # the first is the manifest's, the last too
    for number, point in enumerate(points):
        name = f"killed-{number}"
        assert run(name, at=point, signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL, point
        assert run(name)["ended"] == 0, point
        assert rows_of(labels, name) == whole, point
        assert sorted(path.name for path in (labels.folder / name).iterdir()) == files, point


@pytest.mark.parametrize("calibrate", ["content_free", "batch"])
def test_D01_a_calibrated_job_goes_on_with_the_same_correction(labels, run, calibrate):
    """Killed while it calibrates, then among its rows, of which some are safe."""
    labels.save(generate={"calibrate": calibrate}, checkpoint={"every": "1s"})
    assert run("whole")["ended"] == 0
    assert run(at=("step", 1), signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL
    assert run(at=("replace", 3), signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL
    assert rows_of(labels, "out"), "a part is there"
    assert run()["ended"] == 0
    assert rows_of(labels, "out") == rows_of(labels, "whole", about=True)


def test_D01_killed_again_and_again(labels, run):
    for event in ("row", "replace", "fsync"):
        assert run(at=(event, 2 if event != "row" else 31), signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL
    assert run()["ended"] == 0
    assert [row["id"] for row in rows_of(labels, "out")] == list(range(NUM_ROWS))


def test_D07_a_second_run_is_refused_by_name(labels, run, forks, tmp_path):
    first = run(at=("row", 15), signals=[signal.SIGSTOP])
    assert first["stopped"] == signal.SIGSTOP
    second = run("out", at=("load", 1), signals=[signal.SIGKILL])  # a second one that got so far would die
    assert second["ended"] == LOCKED
    told = log_of(tmp_path).splitlines()[-1]
    assert f"process {first['pid']}" in told or f"pid {first['pid']}" in told
    assert socket.gethostname() in told
    assert forks.go_on(first["pid"])["ended"] == 0
    assert [row["id"] for row in rows_of(labels, "out")] == list(range(NUM_ROWS))


def test_D07_a_living_run_is_taken_over_when_asked_and_writes_nothing_more(labels, run, forks, tmp_path):
    first = run(at=("row", 25), signals=[signal.SIGSTOP])
    assert run("out", "--takeover")["ended"] == 0
    assert f"out was taken over from process {first['pid']} on {socket.gethostname()}" in log_of(tmp_path)
    assert [row["id"] for row in rows_of(labels, "out")] == list(range(NUM_ROWS))

    def there():
        return {path.name: path.stat().st_mtime_ns for path in labels.out.rglob("*")}

    before = there()
    assert forks.go_on(first["pid"])["ended"] == LOCKED
    assert "the lock of this run is gone, so this run writes nothing more" in log_of(tmp_path)
    assert there() == before


def test_D07_both_at_work_when_one_takes_over(labels, run, forks, tmp_path):
    first = run(at=("row", 25), signals=[signal.SIGSTOP])
    second = run("out", "--takeover", at=("row", 15), signals=[signal.SIGSTOP])
    assert forks.go_on(first["pid"])["ended"] == LOCKED
    assert f"was taken over by process {second['pid']} on" in log_of(tmp_path)
    assert forks.go_on(second["pid"])["ended"] == 0
    assert [row["id"] for row in rows_of(labels, "out")] == list(range(NUM_ROWS))


@pytest.mark.parametrize(
    ("at", "signals", "words"),
    [
        (("row", 25), [signal.SIGTERM], "stopped by SIGTERM; finished rows are kept"),
        (("row", 25), [signal.SIGINT], "stopped by SIGINT; finished rows are kept"),
        (("row", 25), [signal.SIGHUP], "stopped by SIGHUP; finished rows are kept"),
        (("step", 3), [signal.SIGINT, signal.SIGINT], "stopped; run the same command again"),
        (("load", 1), [signal.SIGTERM], "stopped; run the same command again"),
        (("load", 1), [signal.SIGHUP], "stopped; run the same command again"),
    ],
)
def test_D11_a_signal_stops_the_job_resumably(labels, run, tmp_path, at, signals, words):
    assert run(at=at, signals=signals)["ended"] == STOPPED
    assert words in log_of(tmp_path)
    assert "Traceback" not in log_of(tmp_path)
    names = {path.name for path in labels.out.iterdir()}
    assert not [name for name in names if name.endswith(".tmp")]
    assert "part-00005-of-00006.parquet" not in names
    assert run()["ended"] == 0
    assert [row["id"] for row in rows_of(labels, "out")] == list(range(NUM_ROWS))


@pytest.mark.parametrize("signals", [[signal.SIGTERM], [signal.SIGINT], [signal.SIGKILL]])
def test_D11_no_process_outlives_the_job(run, nobody_left, signals):
    """Signals go to the whole group, as a scheduler or a terminal sends them; SIGKILL to the job alone."""
    group = signal.SIGKILL not in signals
    done = run("out", "--set", "engine.prompt_workers=2", at=("row", 25), signals=signals, group=group)
    assert done["ended"] == (STOPPED if group else -signal.SIGKILL)
    nobody_left(done["pid"])


def test_D11_as_the_first_process_of_a_container(labels, tmp_path):
    """For the first process of its namespace the kernel drops every signal that has no handler."""
    jail = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*jail, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives no process namespace")
    labels.write("rows.jsonl", [{"id": row, "text": f"Film {row}. " * 20} for row in range(5000)])
    job = labels.save(checkpoint={"every": "0.05s"}, engine={"prompt_workers": 1})
    command = [*jail, sys.executable, "-P", "-m", "batchgen", "run", str(job)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log, cwd=tmp_path) as outside:
        while not (labels.out / "journal").exists():
            assert outside.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.02)
        [first] = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert outside.wait(60) == STOPPED
    assert "stopped by SIGTERM; finished rows are kept" in (tmp_path / "log").read_text()
    assert not (labels.out / ".batchgen.lock").exists()


def test_D11_under_a_shell(labels, tmp_path):
    """The code reaches whoever started the shell, and `kill` of the job ends it in good time."""
    job = labels.save(limits={"runtime": "1s"}, input={"path": "rows.jsonl"})
    command = f"{sys.executable} -P -m batchgen run {job} 2>&1 | tee {tmp_path}/log; exit ${{PIPESTATUS[0]}}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == STOPPED, done.stdout
    assert "stopped after limits.runtime (1s)" in (tmp_path / "log").read_text()
