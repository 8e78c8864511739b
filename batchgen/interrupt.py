"""Stopping on purpose: signals and the job's own time limit end a job between two steps, resumable."""

import signal
import threading
import time
from types import FrameType, TracebackType

from batchgen.errors import EngineError, Stopped
from batchgen.job.units import parse_duration

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopRequest:
    """A context in which SIGTERM, SIGINT and SIGHUP ask the job to stop, and a second signal ends it at once.

    A signal that is ignored already stays so (`nohup`, background jobs of a shell). The `runtime` (`6h`, `30s`) counts
    from when this is made.
    """

    def __init__(self, runtime: str | None = None) -> None:
        self._deadline = None if runtime is None else time.monotonic() + parse_duration(runtime)
        self._runtime = runtime
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._signal is not None and isinstance(error, EngineError):
            self.check()  # a signal to the whole process group has ended the prompt workers too

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def check(self) -> None:
        """Raise Stopped when somebody asked for it or the time is up."""
        if self._signal is not None:
            raise Stopped(
                f"stopped by {self._signal.name}; finished rows are kept. Run the same command again to go on."
            )
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise Stopped(
                f"stopped after limits.runtime ({self._runtime}); finished rows are kept. Run it again to go on."
            )
