"""What came out of a workload on an engine: one line of results.jsonl, one line of the table."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """One workload on one engine. Seconds leave start-up out; fields that an engine does not tell are None."""

    date: str
    hardware: str
    engine: str
    version: str
    model: str
    precision: str
    workload: str
    rows: int
    seconds: float
    rows_s: float
    out_tok_s: float
    settings: dict[str, Any]
    command: str
    order: str
    """`file`: as the workload has its rows; `planned`: as `batchgen run` would order them."""
    roofline_share: float | None = None
    host_ms_per_step: float | None = None
    step_ms: float | None = None
    """Seconds by number of steps."""
    cached_tokens: int | None = None
    forced_tokens: int | None = None
    """Output tokens that a grammar left no choice for."""
    mask_ms_per_step: float | None = None
    """What the host took for token masks, while the device computed."""
    memory_gib: float | None = None
    startup_s: float | None = None
    startup: dict[str, float] | None = None
    """Seconds of start-up by part."""

    def to_json(self) -> str:
        """One line of results.jsonl."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


def table(results: Iterable[Result]) -> Iterator[str]:
    """The results as lines of text, each as soon as its result is there."""
    yield (
        f"{'engine':<18}{'workload':<14}{'order':<9}{'rows':>7}{'s':>9}{'rows/s':>10}{'out tok/s':>11}{'roofline':>10}"
        f"{'step ms':>9}{'host ms':>9}"
    )
    for r in results:
        share = "" if r.roofline_share is None else f"{r.roofline_share:.0%}"
        step = "" if r.step_ms is None else f"{r.step_ms:.2f}"
        host = "" if r.host_ms_per_step is None else f"{r.host_ms_per_step:.2f}"
        engine = f"{r.engine} {r.version}"
        yield (
            f"{engine:<18}{r.workload:<14}{r.order:<9}{r.rows:>7,}{r.seconds:>9.1f}{r.rows_s:>10.1f}"
            f"{r.out_tok_s:>11,.0f}{share:>10}{step:>9}{host:>9}"
        )
