"""From a file on disk to a checked Job, with every mistake of the file told at once."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from batchgen.errors import JobFileError
from batchgen.job.document import Document
from batchgen.job.explain import Finding, explain
from batchgen.job.files import with_files
from batchgen.job.overrides import override
from batchgen.job.places import FieldPath
from batchgen.job.spec import Job


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """The job in a YAML file, with `field.path=value` overrides on top.

    Relative local paths in it are made absolute from the file's folder. Raises JobFileError that lists every mistake as
    `file:line: field: what is wrong; what to write instead`.
    """
    job, mistakes = read_job(path, overrides)
    if mistakes or job is None:
        raise mistakes_error(path, mistakes)
    return job


def read_job(path: str | Path, overrides: Iterable[str] = ()) -> tuple[Job | None, list[str]]:
    """What load_job loads, and the mistakes. The job is then without its wrong values; None when it can't be without.

    Raises JobFileError only when the file can't be read as YAML.
    """
    document = Document(Path(path))
    for setting in overrides:
        override(document, setting)
    job = _check(document)
    if job is not None:
        job._places = document.places
        job = with_files(_with_absolute_paths(job), document)
    return job, document.mistakes


def mistakes_error(path: str | Path, mistakes: Sequence[str]) -> JobFileError:
    """One error that tells all mistakes of a job file."""
    heading = [f"{len(mistakes)} mistakes in {path}"] if len(mistakes) > 1 else []
    return JobFileError("\n".join([*heading, *mistakes]))


def _check(document: Document) -> Job | None:
    """The job, or None with the mistakes noted in the document.

    pydantic compares the fields of a section with one another only when each is right by itself. So wrong fields are
    taken out and the rest is checked again, until nothing new comes up.
    """
    values = document.values
    while True:
        for path in document.broken_fields:
            values = _without(values, path)
        try:
            return Job.model_validate(values)
        except ValidationError as error:
            new = list(_new_findings(document, explain(error, values)))
        if not new:
            return None
        for path, message in new:
            document.broken(path, message)


def _new_findings(document: Document, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that do not follow from a mistake already noted at the field, in it or around it."""
    for finding in findings:
        if not any(_one_holds_other(finding.path, known) for known in document.broken_fields):
            yield finding


def _one_holds_other(one: FieldPath, other: FieldPath) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _without(values: Any, path: FieldPath) -> Any:
    """A copy of nested values without the one at a path. Items of a list go with their whole list."""
    if not isinstance(values, dict) or not path or path[0] not in values:
        return values
    rest = {key: value for key, value in values.items() if key != path[0]}
    inner = values[str(path[0])]
    if len(path) > 1 and isinstance(inner, dict):
        rest[str(path[0])] = _without(inner, path[1:])
    return rest


def _with_absolute_paths(job: Job) -> Job:
    """The job with its local paths made absolute. URLs, hub ids and names of datasets stay as they are."""
    folder = job.folder
    paths = [job.input.path] if isinstance(job.input.path, str) else job.input.path
    if job.input.format == "datasets":
        absolute = [_local_or_hub(path, folder) for path in paths]
    else:
        absolute = [_local(path, folder) for path in paths]
    prompt: dict[str, Any] = {}
    if job.prompt.chat_template is not None:
        prompt["chat_template"] = _local(job.prompt.chat_template, folder)
    changed: dict[str, Any] = {
        "model": _local_or_hub(job.model, folder),
        "input": job.input.model_copy(update={"path": absolute if isinstance(job.input.path, list) else absolute[0]}),
        "prompt": job.prompt.model_copy(update=prompt),
        "output": job.output.model_copy(update={"path": _local(job.output.path, folder)}),
    }
    if job.tokenizer is not None:
        changed["tokenizer"] = _local_or_hub(job.tokenizer, folder)
    return job.model_copy(update=changed)


def _local(path: str, folder: Path) -> str:
    return path if "://" in path else str(folder / os.path.expanduser(path))


def _local_or_hub(name: str, folder: Path) -> str:
    """A hub id is `name` or `owner/name`. It is a local path when something lies there, or when written like one."""
    written_as_path = name.startswith((".", "/", "~")) or name.endswith((".gguf", "/")) or name.count("/") > 1
    return _local(name, folder) if written_as_path or os.path.exists(folder / name) else name
