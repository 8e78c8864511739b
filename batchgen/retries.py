"""Whether the model has another go at an answer, and what it is asked for then."""

import struct
from collections.abc import Sequence
from typing import Any

import xxhash

from batchgen.data.rows import Status
from batchgen.job.generate import Generate


def next_attempt(first: Generate, endings: Sequence[Status], *, has_room: bool = True) -> Generate | None:
    """What to ask for after attempts that ended with these statuses; None when the last of them is kept.

    `first` is what the row asked for at first. `has_room`: the last one could have been longer.
    """
    retry, last = first.retry, endings[-1]
    if retry is None or last not in ("invalid", "length"):
        return None
    rule = retry.on_invalid if last == "invalid" else retry.on_length
    if endings.count(last) > rule.times or (last == "length" and not has_room):
        return None
    changed: dict[str, Any] = {}
    if "invalid" in endings and retry.on_invalid.temperature is not None:
        changed["temperature"] = retry.on_invalid.temperature
    if first.max_tokens is not None:
        longest = first.max_tokens
        for _ in range(endings.count("length")):
            longest = retry.on_length.longer(longest)
        changed["max_tokens"] = longest
    return first.model_copy(update=changed)


def attempt_seed(seed: int, sample: int, attempt: int, part: int = 0) -> int:
    """Seed of a later attempt's noise, or of a later part of an attempt: each has noise of its own."""
    return xxhash.xxh3_64_intdigest(struct.pack("<Qqqq", seed, sample, attempt, part)) >> 1
