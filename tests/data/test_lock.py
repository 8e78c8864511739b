"""One run at a time, whoever is paused, killed or on another machine."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import fsspec
import pytest

from batchgen.data import lock as lock_module
from batchgen.data import remote_claim
from batchgen.data.lock import LOCK_NAME, STALE_S, Claim, OutputLock
from batchgen.errors import LockedError

HOLDER = """
import sys
from batchgen.data.lock import OutputLock
from batchgen.errors import LockedError
print("ready", flush=True)
sys.stdin.readline()
try:
    lock = OutputLock.acquire(sys.argv[1])
except LockedError as error:
    print("refused", error, flush=True)
    sys.exit(error.exit_code)
print("held", flush=True)
for line in sys.stdin:
    try:
        lock.check()
        print("ours", flush=True)
    except LockedError as error:
        print("lost", error, flush=True)
lock.release()
"""


class Run:
    """Another process that takes the lock when told to, and says on each `ask` whether it holds it still."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.read() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def start(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ask(self) -> str:
        self.start()
        return self.read()

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self.process.communicate()


@pytest.fixture
def runs(tmp_path: Path) -> Iterator["list[Run]"]:
    """Processes that are ended after the test."""
    started: list[Run] = []
    yield started
    for run in started:
        with suppress(ProcessLookupError):
            run.process.send_signal(signal.SIGCONT)
            run.process.kill()
        run.end()


def start(runs: list[Run], folder: Path) -> Run:
    runs.append(Run(folder))
    return runs[-1]


def written(folder: Path) -> dict[str, object]:
    return json.loads((folder / LOCK_NAME).read_text())


def claim_of_other_host(**changes: object) -> Claim:
    return replace(Claim.new(), host="elsewhere", host_id="elsewhere 1", pid=1, **changes)


def put(folder: Path, claim: Claim) -> None:
    path = folder / LOCK_NAME
    path.write_text(json.dumps(asdict(claim)))
    os.utime(path, (claim.heartbeat, claim.heartbeat))


def test_D07_a_second_run_is_refused_naming_host_process_and_time(tmp_path: Path, runs: list[Run]) -> None:
    run = start(runs, tmp_path)
    assert run.ask() == "held"
    since = written(tmp_path)["started"]
    with pytest.raises(LockedError) as caught:
        OutputLock.acquire(str(tmp_path))
    assert f"process {run.pid} on {socket.gethostname()} has been writing to it since {since}" in str(caught.value)
    assert run.ask() == "ours"


def test_D07_of_runs_that_start_at_once_exactly_one_wins(tmp_path: Path, runs: list[Run]) -> None:
    put(tmp_path, claim_of_other_host(heartbeat=time.time() - 2 * STALE_S))  # so all of them want to take over
    for _ in range(3):
        rivals = [start(runs, tmp_path) for _ in range(4)]
        for run in rivals:
            run.start()
        answers = [run.read().split()[0] for run in rivals]
        assert sorted(answers) == ["held", "refused", "refused", "refused"]
        winner = rivals[answers.index("held")]
        assert written(tmp_path)["pid"] == winner.pid
        assert [run.process.wait() for run in rivals if run is not winner] == [4, 4, 4]
        winner.process.kill()  # the next rivals take over from the dead
        winner.process.wait()


def test_D07_never_two_hold_it_while_many_take_and_release_it(tmp_path: Path) -> None:
    held = threading.Lock()
    taken = 0

    def take_often() -> None:
        nonlocal taken
        until = time.monotonic() + 1
        while time.monotonic() < until:
            with suppress(LockedError):
                lock = OutputLock.acquire(str(tmp_path))
                assert held.acquire(blocking=False)
                taken += 1
                lock.check()
                held.release()
                lock.release()

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(take_often) for _ in range(4)]:
            future.result()
    assert taken > 4
    assert list(tmp_path.iterdir()) == []


def test_D07_a_killed_holder_is_taken_over_at_once(tmp_path: Path, runs: list[Run]) -> None:
    run = start(runs, tmp_path)
    assert run.ask() == "held"
    run.process.kill()  # not waited for: a zombie still has its process id
    while "Z" not in Path(f"/proc/{run.pid}/stat").read_text():
        time.sleep(0.01)
    OutputLock.acquire(str(tmp_path)).release()
    assert not (tmp_path / LOCK_NAME).exists()


def test_D07_a_process_that_got_the_dead_holders_id_is_not_the_holder(tmp_path: Path) -> None:
    own = Claim.new()
    assert own.process_start is not None
    put(tmp_path, replace(own, process_start=own.process_start - 1))
    OutputLock.acquire(str(tmp_path)).release()
    put(tmp_path, own)
    with pytest.raises(LockedError):
        OutputLock.acquire(str(tmp_path))


def test_D07_a_holder_on_another_host_is_taken_over_after_its_heart_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, claim_of_other_host(heartbeat=time.time() - STALE_S - 1))
    OutputLock.acquire(str(tmp_path)).release()
    assert not caplog.records
    monkeypatch.setattr(lock_module, "STALE_S", 1.0)
    monkeypatch.setattr(lock_module, "_LOOK_S", 0.05)
    put(tmp_path, claim_of_other_host(heartbeat=time.time()))  # its machine has just died: nobody waits in vain
    OutputLock.acquire(str(tmp_path)).release()
    assert "is held by process 1 on elsewhere: waiting for up to 1 s to see whether it is alive" in caplog.text


def test_D07_a_holder_on_another_host_whose_heart_beats_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, claim_of_other_host(heartbeat=time.time() - STALE_S / 2))
    sleep = time.sleep

    def beat(seconds: float) -> None:
        os.utime(tmp_path / LOCK_NAME)
        sleep(seconds)

    monkeypatch.setattr(lock_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(time, "sleep", beat)
    with pytest.raises(LockedError, match="process 1 on elsewhere"):
        OutputLock.acquire(str(tmp_path))


def test_D07_a_stopped_holder_that_returns_writes_nothing_more(tmp_path: Path, runs: list[Run]) -> None:
    run = start(runs, tmp_path)
    assert run.ask() == "held"
    run.process.send_signal(signal.SIGSTOP)
    os.waitpid(run.pid, os.WUNTRACED)
    with pytest.raises(LockedError):
        OutputLock.acquire(str(tmp_path))
    long_ago = time.time() - STALE_S - 1
    os.utime(tmp_path / LOCK_NAME, (long_ago, long_ago))
    lock = OutputLock.acquire(str(tmp_path))
    run.process.send_signal(signal.SIGCONT)
    answer = run.ask()
    assert answer.startswith(f"lost {tmp_path}: the lock of this run was taken over by process {os.getpid()} on")
    run.end()  # its release leaves the new holder's lock alone
    lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_the_heart_beats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_module, "HEARTBEAT_S", 0.01)
    lock = OutputLock.acquire(str(tmp_path))
    for _ in range(3):
        os.utime(tmp_path / LOCK_NAME, (0, 0))
        deadline = time.monotonic() + 20
        while (tmp_path / LOCK_NAME).stat().st_mtime == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    lock.release()


def test_a_lock_removed_by_hand_is_noticed(tmp_path: Path) -> None:
    lock = OutputLock.acquire(str(tmp_path))
    (tmp_path / LOCK_NAME).unlink()
    with pytest.raises(LockedError, match="the lock of this run is gone"):
        lock.check()
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_stopped_while_it_looks_at_the_lock_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = OutputLock.acquire(str(tmp_path))
    monkeypatch.setattr(lock_module, "_FLOCK_S", 0.02)
    with (tmp_path / LOCK_NAME).open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match=f"is held by process {os.getpid()} on .*, which seems to be stopped"):
            OutputLock.acquire(str(tmp_path))
        file.truncate(0)
        with pytest.raises(LockedError, match="is held by a process, which seems to be stopped"):
            OutputLock.acquire(str(tmp_path))
    holder.release()


@pytest.mark.parametrize("content", [b"", b'{"token": "a', b"\x00\x00", b"[]"])
def test_D01_a_torn_lock_file_is_free(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    lock = OutputLock.acquire(str(tmp_path))
    assert written(tmp_path)["pid"] == os.getpid()
    lock.release()


def test_D07_other_file_systems_have_a_lock_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_claim, "_SETTLE_S", 0.0)
    url = f"memory://{tmp_path.name}"
    lock = OutputLock.acquire(url)
    with pytest.raises(LockedError, match=f"process {os.getpid()} on"):
        OutputLock.acquire(url)
    lock.check()
    path = f"/{tmp_path.name}/{LOCK_NAME}"
    fs = fsspec.filesystem("memory")
    stale = replace(Claim(**json.loads(fs.cat_file(path))), heartbeat=0.0, token="other")
    fs.pipe_file(path, json.dumps(asdict(stale)).encode())
    with pytest.raises(LockedError, match="was taken over by process"):
        lock.check()
    lock.release()
    assert fs.exists(path)
    OutputLock.acquire(url).release()
    assert not fs.exists(path)
