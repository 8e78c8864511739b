"""How far the job is: a bar on a terminal, now and then a line elsewhere."""

import json
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, NamedTuple, Never, Self, TextIO

from tqdm import tqdm

from batchgen import env
from batchgen.errors import Stopped
from batchgen.observe.notices import Notices
from batchgen.observe.stream import QuietStream

FIRST_LINE_S = 5.0
LINE_S = 30.0
WINDOW_S = 60.0
"""Rates are those of the last minute."""
FEWEST_ROWS = 5
"""With fewer rows in that time, the time left is not guessed."""


_LOGGERS = ("batchgen", "py.warnings")


class _Mark(NamedTuple):
    time: float
    rows: int
    tokens: int


class Progress:
    """Shows rows done, rates and time left, and the warnings of the run, on standard error. Never ends the job.

    `total` and `done` count output rows, `done` those of earlier runs; `begin` sets them later. On a terminal it is a
    bar; elsewhere, and with TERM=dumb, at most one line in 30 seconds, the first after 5; `quiet` leaves only warnings.
    There are no colours. With `as_json` each line is a JSON object, also on a terminal.
    """

    def __init__(
        self,
        total: int = 0,
        done: int = 0,
        *,
        quiet: bool = False,
        as_json: bool = False,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total = total
        self._done = done
        self._tokens = 0
        self._clock = clock
        self._stream = QuietStream(stream or sys.stderr)
        self._marks = deque([_Mark(clock(), done, 0)])
        self._next_line = math.inf if quiet else clock() + FIRST_LINE_S
        self._as_json = as_json
        has_bar = self._stream.isatty() and not (env.dumb_terminal() or quiet or as_json)
        self._bar = self._make_bar() if has_bar else None
        self._notices = Notices(self.write)
        logging.captureWarnings(as_json)  # of Python and its libraries, which would be plain text
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._notices)

    def begin(self, total: int, done: int) -> None:
        """Count from here on, with that many output rows in all, of which earlier runs have done some."""
        self._total, self._done = total, done
        now = self._clock()
        self._marks = deque([_Mark(now, done, 0)])
        self._next_line = max(self._next_line, now + FIRST_LINE_S)
        if self._bar is not None:
            self._bar.close()
            self._bar = self._make_bar()

    def update(self, rows: int = 1, output_tokens: int = 0) -> None:
        """Count finished rows and the tokens generated for them."""
        self._done += rows
        self._tokens += output_tokens
        now = self._clock()
        if now - self._marks[-1].time >= 1.0:
            self._marks.append(_Mark(now, self._done, self._tokens))
            while len(self._marks) > 2 and now - self._marks[1].time >= WINDOW_S:
                self._marks.popleft()
            if self._bar is not None:
                self._bar.set_postfix_str(f"{self._rates(now)[1]:,.0f} tok/s", refresh=False)
        if self._bar is not None:
            self._bar.update(rows)
        elif now >= self._next_line:
            self._next_line = now + LINE_S
            self._show(self._line(now), "progress", self._figures(now))

    def write(self, line: str, **fields: Any) -> None:
        """Show a line, above the bar where there is one. `fields` are more of its JSON object."""
        self._show(line, "message", fields)

    def last_words(self, text: str, exit_code: int) -> None:
        """Show why the process ends now, from any thread, and past the bar: its lock may be what is stuck."""
        self._stream.write((ending_line(text, exit_code) if self._as_json else text) + "\n")

    def _show(self, line: str, event: str, fields: Mapping[str, Any]) -> None:
        if self._as_json:
            self._stream.write(json_line(event, text=line, **fields) + "\n")
        elif self._bar is None:
            self._stream.write(line + "\n")
        else:
            self._bar.clear()
            self._stream.write(line + "\n")
            self._bar.refresh()

    def close(self) -> None:
        """Take the bar away, and say how often warnings came again."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._notices.summarise()
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._notices)
        logging.captureWarnings(False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_bar(self) -> "tqdm[Never]":
        return tqdm(
            total=self._total,
            initial=self._done,
            unit=" rows",
            file=self._stream,
            mininterval=0.5,
            miniters=1,
            dynamic_ncols=True,
            leave=False,
        )

    def _rates(self, now: float) -> tuple[float, float]:
        """Rows and tokens a second, over the last minute."""
        oldest = self._marks[0]
        seconds = max(now - oldest.time, 1e-9)
        return (self._done - oldest.rows) / seconds, (self._tokens - oldest.tokens) / seconds

    def _seconds_left(self, rows_s: float) -> float | None:
        counted = self._done - self._marks[0].rows
        return (self._total - self._done) / rows_s if counted >= FEWEST_ROWS else None

    def _line(self, now: float) -> str:
        rows_s, tokens_s = self._rates(now)
        share = self._done / self._total if self._total else 1.0
        left = self._seconds_left(rows_s)
        return (
            f"{self._done:,} of {self._total:,} rows ({share:.1%}), {rows_s:,.1f} rows/s, "
            f"{tokens_s:,.0f} output tokens/s, {'unknown' if left is None else _duration(left)} left"
        )

    def _figures(self, now: float) -> dict[str, Any]:
        rows_s, tokens_s = self._rates(now)
        left = self._seconds_left(rows_s)
        return {
            "done": self._done,
            "total": self._total,
            "rows_per_second": round(rows_s, 3),
            "output_tokens_per_second": round(tokens_s, 3),
            "seconds_left": None if left is None else round(left),
        }


def json_line(event: str, **fields: Any) -> str:
    """One line of a log for machines: when, what kind of event, and its fields."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **fields}, ensure_ascii=False)


def ending_line(text: str, exit_code: int) -> str:
    """The last line of a log for machines: why a command ends."""
    return json_line("stopped" if exit_code == Stopped.exit_code else "error", text=text, exit_code=exit_code)


def _duration(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
