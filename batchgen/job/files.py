"""Files that a job names and that count as written into it: JSON schemas and grammars."""

import json
import os
from collections.abc import Iterator
from typing import Any

from batchgen.job.document import Document
from batchgen.job.spec import Job

GRAMMAR_SUFFIX = ".lark"
_ADVICE = "name a file from the job file's folder on, or write out what it would hold"


def with_files(job: Job, document: Document) -> Job:
    """The job with what its files hold in place of their names. One that can't be read is a mistake in the document."""
    changed = dict(_contents(job, document))
    return job.model_copy(update={"generate": job.generate.model_copy(update=changed)}) if changed else job


def _contents(job: Job, document: Document) -> Iterator[tuple[str, Any]]:
    schema, grammar = job.generate.json_schema, job.generate.grammar
    if isinstance(schema, str):
        path = job.folder / os.path.expanduser(schema)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:  # bytes that are no UTF-8 are a ValueError too
            document.broken(("generate", "json_schema"), f"{path} can't be read as JSON ({error}); {_ADVICE}")
            return
        if isinstance(found, dict):
            yield "json_schema", found
        else:
            document.broken(("generate", "json_schema"), f"{path} holds no schema; write a JSON object into it")
    if grammar is not None and is_grammar_file(grammar):
        path = job.folder / os.path.expanduser(grammar)
        try:
            yield "grammar", path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            document.broken(("generate", "grammar"), f"{path} can't be read ({error}); {_ADVICE}")


def is_grammar_file(text: str) -> bool:
    """Whether `generate.grammar` is the name of a file and no grammar."""
    return text.endswith(GRAMMAR_SUFFIX) and len(text.splitlines()) == 1
