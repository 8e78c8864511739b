"""What travels between the layers of a job: Row in, OutputRow out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from batchgen.errors import RowError

Status = Literal["ok", "length", "invalid", "error", "skipped"]
FAILED: tuple[Status, ...] = ("error", "invalid")
"""The statuses of rows that count as failed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the input.

    `index` counts rows over the whole input (files sorted by path, rows in file order, blank JSONL lines left out).
    `place` is for messages: "reviews.jsonl line 17" or "part-0.parquet row 12". A row that can't be read has `error`
    and no values; its carried columns are then null.
    """

    index: int
    values: Mapping[str, Any]
    place: str
    error: RowError | None = None


@dataclass(frozen=True, slots=True)
class OutputRow:
    """One row of the output: the answer to (row, sample), or why there is none."""

    row: int
    sample: int
    status: Status
    output: str | None = None
    error: RowError | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    truncated_tokens: int = 0
    carried: Mapping[str, Any] = field(default_factory=dict)
    attempts: int = 0
    """How many times the model was asked; only the last answer is kept."""
    reasoning: str | None = None
    reasoning_tokens: int = 0
    logprobs: list[dict[str, Any]] | None = None
    parsed: Any = None
    label: str | None = None
    label_probs: Mapping[str, float] | None = None
    margin: float | None = None
    label_logprobs: Mapping[str, float] | None = None
    vote: str | None = None
    vote_share: float | None = None
    score: float | None = None
    score_mean: float | None = None
