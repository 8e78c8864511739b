"""Chat messages and tools as they come in a column: checked, and brought into the form that chat templates expect."""

import json
from collections.abc import Mapping
from typing import Any

from batchgen.prompts.failure import RowFailure

Message = dict[str, Any]


def column_messages(values: Mapping[str, Any], column: str) -> list[Message]:
    """The conversation in a column: a list of messages, or JSON text of one. Raises RowFailure."""
    if column not in values:
        raise RowFailure("missing_prompt", f"there is no {column!r} in this row")
    found = values[column]
    if found is None:
        raise RowFailure("null_prompt", f"{column!r} is null")
    found = _from_json(found, column)
    if not isinstance(found, list):
        raise RowFailure("not_text", f"{column!r} holds a {type(found).__name__}, not a list of messages")
    return [_checked(message, f"{column}[{place}]") for place, message in enumerate(found)]


def column_tools(values: Mapping[str, Any], column: str) -> list[Any] | None:
    """The tool definitions in a column; None when there are none. Raises RowFailure."""
    found = _from_json(values.get(column), column)
    if found is None or found == []:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise RowFailure("not_text", f"{column!r} holds no list of tool definitions")
    return found


def with_parsed_arguments(messages: list[Message]) -> list[Message]:
    """OpenAI writes the arguments of tool calls as JSON text; chat templates expect them as objects."""
    return [
        {**message, "tool_calls": [_parsed_call(call) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def with_flat_content(messages: list[Message]) -> list[Message]:
    """Contents that are lists of text parts as one text, a line break between parts."""
    return [
        {**message, "content": "\n".join(part["text"] for part in message["content"])}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _from_json(found: Any, column: str) -> Any:
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except ValueError as error:
        raise RowFailure("not_text", f"{column!r} holds text that is no JSON: {error}") from error


def _checked(message: Any, place: str) -> Message:
    if not isinstance(message, Mapping):
        raise RowFailure("not_text", f"{place} is a {type(message).__name__}, not a message with role and content")
    if not isinstance(message.get("role"), str):
        raise RowFailure("template_error", f"{place} has no role")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": [_checked_part(part, f"{place}.content[{i}]") for i, part in enumerate(content)]}
    if content is not None and not isinstance(content, str):
        raise RowFailure("not_text", f"{place}.content is a {type(content).__name__}, not text")
    if content is None and not any(value for key, value in message.items() if key not in ("role", "name")):
        kind = "null_prompt" if "content" in message else "missing_prompt"
        raise RowFailure(kind, f"{place} has no content")
    return dict(message)


def _checked_part(part: Any, place: str) -> Message:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or part.get("type", "text") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        raise RowFailure("not_text", f"{place} is a part of type {kind!r}; only text can be read")
    if not isinstance(part.get("text"), str):
        raise RowFailure("not_text", f"{place}.text is a {type(part.get('text')).__name__}, not text")
    return {"type": "text", "text": part["text"]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
