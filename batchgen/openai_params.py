"""The parameters that a row of an OpenAI batch file brings, on top of the job's `generate`."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from batchgen.errors import RowError
from batchgen.job.generate import CONSTRAINTS, Generate

_OPENAI = ("temperature", "top_p", "stop", "presence_penalty", "frequency_penalty", "seed", "n")
_COMMON = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "skip_special_tokens")
_SAME_NAME = (*_OPENAI, *_COMMON)  # the second are what open servers take besides
_RENAMED = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
}
_CHATS = ("functions", "function_call", "audio", "modalities", "prediction", "web_search_options")
_REFUSED = (*_CHATS, "echo", "suffix", "best_of")

COLUMNS = frozenset(
    {*_SAME_NAME, *_RENAMED, *_REFUSED, "response_format", "logit_bias", "logprobs", "top_logprobs", "custom_id"}
)
"""What a source must read of a batch file besides the prompt."""


def row_generate(generate: Generate, values: Mapping[str, Any]) -> Generate | RowError:
    """The job's `generate` with what the row says instead; a RowError for what the row may not say."""
    for name in _REFUSED:
        if values.get(name) not in (None, False):
            return RowError("bad_request", f"body.{name}: batchgen can't do that")
    changed = {name: values[name] for name in _SAME_NAME if values.get(name) is not None}
    changed |= {ours: values[name] for name, ours in _RENAMED.items() if values.get(name) is not None}
    if values.get("logit_bias"):
        changed["logit_bias"] = _by_token(values["logit_bias"])
    response_format = values.get("response_format")
    if response_format not in (None, {"type": "text"}):
        schema = _schema(response_format)
        if isinstance(schema, RowError):
            return schema
        if any(map(generate.asks_for, CONSTRAINTS)):
            return RowError("bad_request", "body.response_format: the job file says already what answers look like")
        changed["json_schema"] = schema
    if not changed and not values.get("logprobs"):
        return generate
    if values.get("logprobs") and generate.logprobs is None:
        return RowError(
            "bad_request", "body.logprobs: set generate.logprobs in the job file, so that there is a column for it"
        )
    if changed.get("n", generate.n) != generate.n:
        return RowError(
            "bad_request", f"body.n is {changed['n']}, but every row of a job has generate.n = {generate.n} answers"
        )
    try:
        return Generate.model_validate(generate.model_dump() | changed)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        return RowError("bad_request", f"body.{where}: {first['msg']}")


def _schema(response_format: Any) -> dict[str, Any] | RowError:
    """The JSON schema of a `response_format`."""
    match response_format:
        case {"type": "json_object"}:
            return {"type": "object"}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return schema
    return RowError(
        "bad_request", f"body.response_format: {response_format!r:.100} is none of text, json_object and json_schema"
    )


def _by_token(bias: Any) -> Any:
    """JSON writes token ids as text."""
    if not isinstance(bias, dict):
        return bias
    return {int(key) if isinstance(key, str) and key.isdecimal() else key: value for key, value in bias.items()}
