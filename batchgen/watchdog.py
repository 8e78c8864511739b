"""A run in which nothing moves any more is ended, resumable: a hang costs more than a crash, since nobody is told."""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from batchgen.errors import BatchgenError, EngineError
from batchgen.interrupt import end_process
from batchgen.job.units import parse_duration

_MOST_LOOK_S = 5.0

Tell = Callable[[str, int], None]
"""Shows the last words of a process, with its exit code."""


class Kept(Protocol):
    """What is written while the run moves, and can be made safe from another thread."""

    @property
    def num_moves(self) -> int:
        """A count that grows when something comes or is written."""

    def close(self) -> None:
        """Make safe what came so far. Raises BatchgenError."""

    def keep_unsent(self) -> None:
        """Keep on this machine what could not be made safe where it belongs."""


class Watchdog:
    """A context in which a thread looks at counters, and ends the process when all stood still for `stall`.

    `stall` is a duration (`30m`), None for ever. Before the end the stacks of all threads are told, and `output` is
    closed, which makes finished rows safe; when that takes longer than `grace` seconds, the process ends without.
    """

    def __init__(self, stall: str | None, grace: float, tell: Tell, output: Kept) -> None:
        self._grace = grace
        self._stall = stall
        self._seconds = float("inf") if stall is None else parse_duration(stall)
        self._tell = tell
        self._output = output
        self._counters: list[Callable[[], object]] = [lambda: output.num_moves]
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True)

    def look_at(self, counter: Callable[[], object]) -> None:
        """Take what `counter` gives for movement whenever it differs from before."""
        self._counters.append(counter)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._left.set()
        self._thread.join()  # or what it looks at, the engine, would live on into the end of the process

    def _watch(self) -> None:
        look = min(_MOST_LOOK_S, self._seconds / 4)
        before, quiet, last = self._marks(), 0.0, time.monotonic()
        while not self._left.wait(look):
            now, marks = time.monotonic(), self._marks()
            # No more than twice the time between two looks: a process that was stopped and goes on has not stalled.
            quiet = 0.0 if marks != before else quiet + min(now - last, 2 * look)
            before, last = marks, now
            if quiet >= self._seconds:
                self._end()

    def _marks(self) -> list[object]:
        return [counter() for counter in self._counters]

    def _end(self) -> None:
        stacks = _stacks()
        saving = threading.Thread(target=self._save, daemon=True)
        saving.start()
        saving.join(self._grace)
        keep = [self._output.keep_unsent] if saving.is_alive() else []
        text = (
            f"{stacks}batchgen: error: nothing moved for {self._stall} (limits.stall): no prompt was built, no step of "
            "the engine ended, no row was written. Above is where each thread stands. Finished rows are kept. "
            "Run the same command again to go on."
        )
        end_process(EngineError.exit_code, *keep, lambda: self._tell(text, EngineError.exit_code))

    def _save(self) -> None:
        try:
            self._output.close()
        except BatchgenError as error:
            self._tell(f"batchgen: error: {error}", error.exit_code)


def _stacks() -> str:
    """Where each thread of this process stands, but for this one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
