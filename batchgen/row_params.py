"""What a row says instead of the job's `generate`: by templates over its columns, or by its OpenAI request."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from batchgen import openai_params
from batchgen.errors import RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Job
from batchgen.prompts.builder import PromptResult

_OF_TEXT = frozenset({"stop", "regex", "grammar"})


def row_generate(job: Job, prompt: PromptResult) -> Generate | RowError:
    """The job's `generate` as it is for a row; the very same object where the row says nothing."""
    own = job.generate
    if prompt.parameters:
        checked = _with_parameters(own, prompt.parameters)
        if isinstance(checked, RowError):
            return checked
        own = checked
    return openai_params.row_generate(own, prompt.row.values) if job.input.format == "openai" else own


def brings_seed(job: Job, prompt: PromptResult) -> bool:
    """Whether the row's own seed is to be taken as it is."""
    from_request = job.input.format == "openai" and prompt.row.values.get("seed") is not None
    return from_request or "seed" in prompt.parameters


def _with_parameters(generate: Generate, parameters: Mapping[str, Any]) -> Generate | RowError:
    for name, value in parameters.items():
        if value is None:
            return RowError("bad_request", f"generate.{name}: null in this row; `| default(...)` stands in for it")
    typed = {name: value if name in _OF_TEXT else _typed(value) for name, value in parameters.items()}
    try:
        return Generate.model_validate(generate.model_dump() | typed | {"templates": {}})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or first.get("ctx", {}).get("field", "")
        has = "" if first["type"] == "mistake" else f"; this row has {first['input']!r:.100}"
        return RowError("bad_request", f"generate.{where}: {first['msg']}{has}")


def _typed(value: Any) -> Any:
    """Text of a number, of `true`, a list or a mapping becomes that; what it may be is checked later."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value
