"""Stopping on purpose: signals and the job's own time limit end a job between two steps, resumable."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

from batchgen.errors import EngineError, Stopped
from batchgen.job.units import parse_duration

GRACE_S = 25.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LAST_S = 5.0


def end_process(exit_code: int, *last_things: Callable[[], None]) -> NoReturn:
    """End this process where it stands, after some last things; one that is stuck is not waited for."""
    for do in last_things:
        doing = threading.Thread(target=do, daemon=True)
        doing.start()
        doing.join(_LAST_S)
    os._exit(exit_code)


def _say(text: str, exit_code: int) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class StopRequest:
    """A context in which SIGTERM, SIGINT and SIGHUP ask the job to stop, and a second signal ends it at once.

    A signal that is ignored already stays so (`nohup`, background jobs of a shell). The `runtime` (`6h`, `30s`) counts
    from when this is made. `grace` is how many seconds all of it may take, see `ends_in_time`; `tell` then shows the
    last words, given them and the exit code.
    """

    def __init__(
        self, runtime: str | None = None, grace: float = GRACE_S, tell: Callable[[str, int], None] = _say
    ) -> None:
        self._grace = grace
        self._tell = tell
        self._keep: Callable[[], None] = lambda: None
        self._out_of_time: threading.Timer | None = None
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

    @contextmanager
    def ends_in_time(self, keep: Callable[[], None] = lambda: None) -> Iterator[None]:
        """A context that is left within the grace time of a signal: after that, the process ends where it stands.

        `keep` then has a few seconds to save what it can.
        """
        self._keep = keep
        try:
            yield
        finally:
            if self._out_of_time is not None:
                self._out_of_time.cancel()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)
        self._out_of_time = threading.Timer(self._grace, self._end)
        self._out_of_time.daemon = True
        self._out_of_time.start()

    def _end(self) -> None:
        """A step or an upload takes too long: whoever sent the signal would send SIGKILL next."""
        name = "the signal" if self._signal is None else self._signal.name
        text = (
            f"batchgen: not done {self._grace:g} s after {name}, so it ends now. "
            "Run the same command again to go on; the rows of the last seconds are done again."
        )
        end_process(Stopped.exit_code, self._keep, lambda: self._tell(text, Stopped.exit_code))

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
