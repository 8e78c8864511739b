"""What of a job decides its output: compared when a run goes on where another stopped."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from batchgen.job.fields import walk
from batchgen.job.generate import Generate
from batchgen.job.places import dotted
from batchgen.job.spec import Job

# Fields that may differ between the runs of one output folder. Everything else is in the fingerprint.
EXCLUDED = frozenset(
    {
        "version",
        "name",
        "input.on_bad_row",
        "limits.failed_rows",
        "limits.runtime",
        "limits.stall",
        "plan.order",
        "plan.window",
        "output.path",
        "output.part_rows",  # the first run's stays in force
        "output.compression",
        "checkpoint.every",
        "storage.endpoint",
        "storage.region",
        "storage.profile",
        "storage.anonymous",
        "engine.device",
        "engine.page_size",
        "engine.kv_memory",
        "engine.max_batch_rows",
        "engine.max_batch_tokens",
        "engine.prefix_caching",
        "engine.threads",
        "engine.prompt_workers",
    }
)
_PATHS = frozenset({"model", "tokenizer", "input.path"})
_ORDERED = frozenset({"generate.json_schema"})
"""Mappings whose order counts: an answer has the properties of its schema in theirs."""
_BY_CONTENT = frozenset({"prompt.chat_template"})
Origin = Literal["job file", "--set", "default"]


class Difference(NamedTuple):
    """A field with another value than before."""

    field: str
    old: str
    new: str


def fingerprint(job: Job) -> dict[str, str]:
    """The fields that decide the output, as canonical JSON. Files inside the job's folder may move together with it.

    A chat template counts by its content. Raises OSError when its file can't be read.
    """
    fields = (dotted(path) for path, _ in walk())
    return {field: _canonical(job, field) for field in fields if field not in EXCLUDED}


def differences(old: dict[str, str], new: dict[str, str]) -> list[Difference]:
    """The fields that differ, in the job file's order. A field that one of the two lacks is "(none)" there."""
    fields = dict.fromkeys([*new, *old])
    pairs = (Difference(field, old.get(field, "(none)"), new.get(field, "(none)")) for field in fields)
    return [pair for pair in pairs if pair.old != pair.new]


def sources_of_values(job: Job) -> dict[str, Origin]:
    """Where the value of each `generate` field came from."""
    return {name: _origin(job, name) for name in Generate.model_fields}


def _origin(job: Job, name: str) -> Origin:
    if job.is_override(f"generate.{name}"):
        return "--set"
    is_given = name in job.generate.model_fields_set or name in job.generate.templates
    return "job file" if is_given else "default"


def _canonical(job: Job, field: str) -> str:
    value: Any = job
    for name in field.split("."):
        value = getattr(value, name)
    if isinstance(value, BaseModel):
        value = value.model_dump()
    if field in _PATHS:
        value = _portable(value, job.folder)
    if field in _BY_CONTENT and value is not None:
        value = "sha256:" + hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return json.dumps(value, sort_keys=field not in _ORDERED, ensure_ascii=False)


def _portable(value: Any, folder: Path) -> Any:
    """Paths inside the job's folder, written from there."""
    if isinstance(value, list):
        return [_portable(path, folder) for path in value]
    if isinstance(value, str) and os.path.isabs(value) and Path(value).is_relative_to(folder):
        return str(Path(value).relative_to(folder))
    return value
