"""Stopping on purpose: SIGTERM, SIGINT and the job's own time limit end a job between two steps, resumable."""

import signal
import threading
import time
from types import FrameType, TracebackType

from batchgen.errors import Stopped


class StopRequest:
    """A context in which SIGTERM and SIGINT ask the job to stop, and a second signal ends it at once."""

    def __init__(self, seconds: float | None = None) -> None:
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._limit = seconds
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def check(self) -> None:
        """Raise Stopped when somebody asked for it or the time is up."""
        if self._signal is not None:
            raise Stopped(
                f"stopped by {self._signal.name}; finished parts are kept. Run the same command again to go on."
            )
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise Stopped(
                f"stopped after limits.runtime ({self._limit:g} s); finished parts are kept. Run it again to go on."
            )
