"""What a run did and how long it took, for people and for the manifest; and whether too many rows failed."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from batchgen.data.rows import FAILED
from batchgen.errors import TooManyBadRows
from batchgen.job.units import parse_share

PHASES = ("open", "load", "calibrate", "tokenize wait", "prefill", "decode", "write", "other")
_STATUSES = ("ok", "length", "invalid", "error", "skipped")


class PhaseClock:
    """Seconds by phase since it was made. Phases must not overlap; what none of them covers is `other`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = clock()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block."""
        start = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count time that was measured elsewhere."""
        if name not in PHASES:
            raise ValueError(f"{name!r} is no phase")
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @property
    def total(self) -> float:
        """Seconds since the clock was made."""
        return self._clock() - self._start

    def seconds(self) -> dict[str, float]:
        """Seconds by phase, in the order of PHASES; their sum is the total unless phases overlapped."""
        known = {name: self._seconds.get(name, 0.0) for name in PHASES}
        known["other"] += max(0.0, self.total - sum(known.values()))
        return known


@dataclass(frozen=True, slots=True)
class Report:
    """What one run did. Rows are output rows; prompt tokens count once per input row and further attempt at an answer.

    `retried_rows` are output rows that the model was asked for more than once. `merged_rows` are input rows that took
    the answer of an equal prompt: their tokens count as cached. `planned_tokens` are the prompt tokens that the plan
    said would be computed; None without a plan.
    """

    rows: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    phases: Mapping[str, float]
    merged_rows: int = 0
    retried_rows: int = 0
    forced_tokens: int = 0
    """Output tokens that a grammar left no choice for, and that took no decode step."""
    planned_tokens: int | None = None
    startup: Mapping[str, float] = field(default_factory=dict)
    """Seconds of loading the engine by part, and of what it made ready later on."""

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that the engine computed."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def rows_per_second(self) -> float:
        """Over the whole run, start-up included."""
        return self.rows / self.seconds if self.seconds else 0.0

    @property
    def output_tokens_per_second(self) -> float:
        """Over the whole run, start-up included."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """What the manifest keeps."""
        return {
            "rows": self.rows,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "computed_tokens": self.computed_tokens,
            "planned_tokens": self.planned_tokens,
            "merged_rows": self.merged_rows,
            "retried_rows": self.retried_rows,
            "output_tokens": self.output_tokens,
            "forced_tokens": self.forced_tokens,
            "seconds": round(self.seconds, 3),
            "rows_per_second": round(self.rows_per_second, 3),
            "output_tokens_per_second": round(self.output_tokens_per_second, 3),
            "seconds_by_phase": {name: round(seconds, 3) for name, seconds in self.phases.items()},
            "startup_seconds": {name: round(seconds, 3) for name, seconds in self.startup.items()},
        }

    def summary(self, rows_by_status: Mapping[str, int], output: str) -> str:
        """A few lines for people. `rows_by_status` counts the whole job, earlier runs included."""
        cached = f" ({self.cached_tokens / self.prompt_tokens:.0%} cached)" if self.prompt_tokens else ""
        startup = _longest_first(self.startup)
        return "\n".join(
            [
                f"rows    {sum(rows_by_status.values()):,}: {describe_counts(rows_by_status)}",
                f"tokens  {self.prompt_tokens:,} prompt{cached}, {self.output_tokens:,} output",
                *self._planned(),
                *([f"grammar {self.forced_tokens:,} output tokens had no choice"] if self.forced_tokens else []),
                *([f"retries {self.retried_rows:,} rows had more than one attempt"] if self.retried_rows else []),
                f"speed   {self.rows:,} rows in {format_seconds(self.seconds)}: {self.rows_per_second:,.1f} rows/s, "
                f"{self.output_tokens_per_second:,.0f} output tokens/s",
                f"time    {_longest_first(self.phases) or 'under 0.1 s'}",
                *([f"start   {startup}"] if startup else []),
                f"output  {output}",
            ]
        )

    def _planned(self) -> Iterator[str]:
        """How the plan was kept."""
        if self.planned_tokens is not None:
            as_planned = self.planned_tokens == self.computed_tokens
            plan = "as planned" if as_planned else f"{self.planned_tokens:,} planned"
            merged = f"; {self.merged_rows:,} rows took the answer of an equal prompt" if self.merged_rows else ""
            yield f"plan    {self.computed_tokens:,} prompt tokens computed, {plan}{merged}"


def _longest_first(seconds: Mapping[str, float]) -> str:
    """`decode 12.5 s, load 3.1 s`: what takes long enough to be told."""
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_seconds(value)}" for name, value in parts if value >= 0.05)


def describe_counts(rows_by_status: Mapping[str, int]) -> str:
    """Rows by status in words: `9,990 ok, 10 error`."""
    return ", ".join(f"{rows_by_status[name]:,} {name}" for name in _STATUSES if rows_by_status.get(name)) or "none"


def check_failed_rows(rows_by_status: Mapping[str, int], limit: str | int, output: str) -> None:
    """Raise TooManyBadRows when more rows than `limits.failed_rows` (a count, or a share like `1%`) failed.

    Rows with status `error` or `invalid` failed. `length` is an answer, and `skipped` was asked for: neither counts.
    """
    total = sum(rows_by_status.values())
    failed = sum(rows_by_status.get(name, 0) for name in FAILED)
    allowed = limit if isinstance(limit, int) else int(parse_share(limit) * total + 1e-9)
    if failed > allowed:
        counts = describe_counts({name: rows_by_status.get(name, 0) for name in FAILED})
        share = "" if isinstance(limit, int) else f" ({limit})"
        raise TooManyBadRows(
            f"{failed:,} of {total:,} rows failed ({counts}), and limits.failed_rows allows {allowed:,}{share}. "
            f"All rows are written; the columns `status` and `error` in {output} say which failed and why."
        )


def format_seconds(seconds: float) -> str:
    """A duration in words: `12.5 s`, `3 min 20 s`, `2 h 10 min`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute} min" if hours else f"{minute} min {second} s"
