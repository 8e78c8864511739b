"""What the cases share."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def no_model(monkeypatch):
    """A model that must not be loaded."""
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))


class Forks:
    """Commands in processes of their own, which start fast; see forks.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "forks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        *arguments: str,
        log: Path,
        at: tuple[str, int] | None = None,
        signals: Sequence[int] = (),
        group: bool = False,
    ) -> dict[str, int]:
        """Run a command until it ends or stops; `at` event number so-and-so it gets `signals`, or its group does."""
        order: dict[str, Any] = {"arguments": arguments, "log": str(log)}
        if at is not None:
            order |= {"event": at[0], "count": at[1], "signals": list(signals), "group": group}
        return self._ask(order)

    def go_on(self, pid: int) -> dict[str, int]:
        """Let a stopped command go on until it ends."""
        return self._ask({"continue": pid})

    def close(self) -> None:
        """End the process that forks."""
        self._process.communicate()

    def _ask(self, order: dict[str, Any]) -> dict[str, int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer: dict[str, int] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="package")
def forks() -> Iterator[Forks]:
    """Commands in processes of their own."""
    made = Forks()
    yield made
    made.close()


def session_of(pid: int) -> list[int]:
    """Processes that belong to the session which `pid` began, zombies left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == pid and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def nobody_left():
    """Asserts that a session has no processes any more, within a few seconds."""

    def check(pid: int) -> None:
        for _ in range(100):
            if not session_of(pid):
                return
            time.sleep(0.1)
        left = session_of(pid)
        for process in left:
            os.kill(process, signal.SIGKILL)
        pytest.fail(f"{len(left)} processes outlived the job")

    return check
