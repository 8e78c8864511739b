"""Which answer most samples of a row gave, or which value of a field of it."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import pyarrow as pa

from batchgen.data.rows import OutputRow
from batchgen.errors import JobFileError
from batchgen.job.attempts import Vote
from batchgen.job.spec import Job


def check_vote(job: Job, parsed: pa.DataType | None) -> None:
    """Raise JobFileError when a vote is about a field that answers of the job's schema don't have."""
    vote = job.generate.vote
    if not isinstance(vote, Vote) or parsed is None:
        return
    type_, path = parsed, "parsed"
    for name in vote.field.split(".")[1:]:
        fields = [field.name for field in type_] if pa.types.is_struct(type_) else []
        if name not in fields:
            known = f"its fields are {', '.join(fields)}" if fields else "it has no fields of its own"
            raise JobFileError(f"{job.where('generate.vote')}: {path} has no field {name!r}; {known}")
        type_, path = type_.field(name).type, f"{path}.{name}"


def voted(rows: Iterable[OutputRow], vote: Literal["majority"] | Vote = "majority") -> list[OutputRow]:
    """The samples of one or several rows, all of them, with the vote and its share among the row's valid samples."""
    by_row: defaultdict[int, list[OutputRow]] = defaultdict(list)
    for row in rows:
        by_row[row.row].append(row)
    path = vote.field.split(".")[1:] if isinstance(vote, Vote) else None
    return [row for samples in by_row.values() for row in _voted(sorted(samples, key=lambda row: row.sample), path)]


def _voted(samples: list[OutputRow], path: list[str] | None) -> Iterable[OutputRow]:
    answers = [answer for row in samples if (answer := _answer(row, path)) is not None]
    if not answers:
        return samples
    vote, count = Counter(answers).most_common(1)[0]  # of equal counts, the one that was met first
    return (replace(row, vote=vote, vote_share=count / len(answers)) for row in samples)


def _answer(row: OutputRow, path: list[str] | None) -> str | None:
    """What a sample votes for; None when it has no say. Numbers and the like vote as their JSON."""
    if row.status != "ok":
        return None
    if path is None:
        return None if row.output is None else row.output.strip()
    value: Any = row.parsed
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
