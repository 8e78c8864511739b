"""The output's columns: one fixed Arrow schema for all parts, and output rows as a table of it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from batchgen.data.rows import OutputRow
from batchgen.data.schema import is_binary
from batchgen.errors import JobFileError, RowError

_TOKEN = [("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())]
_LOGPROBS = pa.list_(pa.struct([*_TOKEN, ("top", pa.list_(pa.struct(_TOKEN)))]))
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "truncated_tokens")
_LABELS = ("label", "label_probs", "margin", "label_logprobs")
_SCORES = ("score", "score_mean")
_ERROR = pa.struct([("kind", pa.string()), ("message", pa.string())])
FOUND_BY = pa.schema([("row", pa.int64()), ("sample", pa.int32()), ("status", pa.string()), ("error", _ERROR)])
"""The columns by which an output row is found and judged."""


class Asked(NamedTuple):
    """What a job asks for besides the text. `labels` are its choices; none (`()`) where each row has its own.

    `parsed` is the type of answers that follow a JSON schema. `as_json`: the parts are lines of JSON.
    """

    attempts: bool = False
    reasoning: bool = False
    logprobs: bool = False
    parsed: pa.DataType | None = None
    labels: Sequence[str] | None = None
    label_logprobs: bool = False
    score: bool = False
    vote: bool = False
    as_json: bool = False


NOTHING_ASKED = Asked()


class Columns(NamedTuple):
    """The fixed columns of all parts. `carried` holds those taken over from the input, in their stored types."""

    schema: pa.Schema
    carried: pa.Schema


def output_columns(carried: pa.Schema, asked: Asked = NOTHING_ASKED) -> Columns:
    """Columns of the output. The job's choices are fields of `label_probs`; rows' own choices are a list of structs.

    Raises JobFileError when a carried column has the name of one of ours, or holds bytes that JSON can't.
    """
    stored_type = _json_type if asked.as_json else _stored_type
    stored = pa.schema([pa.field(field.name, stored_type(field.type)) for field in carried])
    before = [pa.field("row", pa.int64()), pa.field("sample", pa.int32())]
    after = [
        pa.field("output", pa.string()),
        pa.field("status", pa.string()),
        pa.field("error", _ERROR),
        pa.field("finish_reason", pa.string()),
        *(pa.field(name, pa.int32()) for name in _COUNTS),
    ]
    after += _asked_columns(asked)
    ours = {field.name for field in (*before, *after)}
    taken = [name for name in stored.names if name in ours]
    binary = [field.name for field in stored if asked.as_json and _has_binary(field.type)]
    if binary:
        raise JobFileError(
            f"output.columns: JSON can't hold the bytes in {', '.join(binary)}. "
            "Leave these columns out, read them as text with input.decode_binary, or write Parquet."
        )
    if taken:
        raise JobFileError(
            f"output.columns: the input has columns that the output has too: {', '.join(taken)}. "
            "Rename them in the input, or list the columns to carry over without them."
        )
    return Columns(pa.schema([*before, *stored, *after]), stored)


def to_table(columns: Columns, rows: Sequence[OutputRow]) -> pa.Table:
    """The rows as a table."""
    names = [name for name in columns.schema.names if name not in columns.carried.names]  # fields of OutputRow
    ours: dict[str, list[Any]] = {name: [] for name in names}
    ours |= zip(names, map(list, zip(*map(attrgetter(*names), rows), strict=True)), strict=False)  # none of no rows
    errors = list(ours["error"])
    carried = {
        field.name: _carried_array(field, [row.carried.get(field.name) for row in rows], errors)
        for field in columns.carried
    }
    # A value that can't be carried over makes its row an error, whatever its status was.
    both = zip(ours["status"], ours["error"], errors, strict=True)
    ours["status"] = [status if error is before else "error" for status, before, error in both]
    ours["error"] = list(map(_error_struct, errors))
    for name in ours.keys() & {"output", "reasoning", "label"}:
        ours[name] = list(map(_valid_text, ours[name]))
    arrays = [
        carried[field.name] if field.name in carried else pa.array(_by_label(field, ours[field.name]), field.type)
        for field in columns.schema
    ]
    return pa.Table.from_arrays(arrays, schema=columns.schema)


def _asked_columns(asked: Asked) -> Iterator[pa.Field]:
    if asked.attempts:
        yield pa.field("attempts", pa.int32())
    if asked.reasoning:
        yield pa.field("reasoning", pa.string())
        yield pa.field("reasoning_tokens", pa.int32())
    if asked.logprobs:
        yield pa.field("logprobs", _LOGPROBS)
    if asked.parsed is not None:
        yield pa.field("parsed", asked.parsed)
    if asked.labels is not None:
        yield pa.field("label", pa.string())
        yield pa.field("label_probs", _label_type(asked.labels, "prob"))
        yield pa.field("margin", pa.float64())
    if asked.label_logprobs:
        yield pa.field("label_logprobs", _label_type(asked.labels or (), "logprob"))
    if asked.score:
        yield from (pa.field(name, pa.float64()) for name in _SCORES)
    if asked.vote:
        yield pa.field("vote", pa.string())
        yield pa.field("vote_share", pa.float64())


def _label_type(labels: Sequence[str], value: str) -> pa.DataType:
    if labels:
        return pa.struct([(label, pa.float64()) for label in labels])
    return pa.list_(pa.struct([("label", pa.string()), (value, pa.float64())]))


def _by_label(field: pa.Field, values: list[Any]) -> list[Any]:
    """Mappings from label to number, as the column holds them: the lists of rows' own labels have a struct for each."""
    if field.name not in _LABELS or not pa.types.is_list(field.type):
        return values
    value = field.type.value_type.field(1).name
    return [
        found and [{"label": _valid_text(label), value: number} for label, number in found.items()] for found in values
    ]


def _stored_type(type_: pa.DataType) -> pa.DataType:
    """The type that a carried column has in every part: plain, never null, and one that Parquet can hold."""
    if isinstance(type_, pa.BaseExtensionType):
        return _stored_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return _stored_type(type_.value_type)
    if pa.types.is_null(type_) or pa.types.is_string_view(type_) or _has_empty_struct(type_):
        return pa.string()
    if pa.types.is_binary_view(type_):
        return pa.binary()
    if pa.types.is_struct(type_):
        return pa.struct([pa.field(field.name, _stored_type(field.type)) for field in _fields(type_)])
    if pa.types.is_list(type_):
        return pa.list_(_stored_type(type_.value_type))
    if pa.types.is_large_list(type_):
        return pa.large_list(_stored_type(type_.value_type))
    if pa.types.is_map(type_):
        return pa.map_(_stored_type(type_.key_type), _stored_type(type_.item_type))
    return type_


def _json_type(type_: pa.DataType) -> pa.DataType:
    """The type that a carried column has where JSON has to hold it: text for what JSON has no word for."""
    type_ = _stored_type(type_)
    return type_ if _has_binary(type_) or _is_json(type_) else pa.string()


def _is_json(type_: pa.DataType) -> bool:
    if pa.types.is_struct(type_):
        return all(_is_json(field.type) for field in _fields(type_))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _is_json(type_.value_type)
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_string)
    return any(check(type_) for check in (*checks, pa.types.is_large_string))


def _has_binary(type_: pa.DataType) -> bool:
    inner = [field.type for field in _fields(type_)] if pa.types.is_struct(type_) else []
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        inner = [type_.value_type]
    elif pa.types.is_map(type_):
        inner = [type_.key_type, type_.item_type]
    return is_binary(type_) or any(map(_has_binary, inner))


def _has_empty_struct(type_: pa.DataType) -> bool:
    """Parquet can't hold a struct without fields, at any depth: such a column is carried as JSON text."""
    if pa.types.is_struct(type_):
        return type_.num_fields == 0 or any(_has_empty_struct(field.type) for field in _fields(type_))
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _has_empty_struct(type_.value_type)
    return False


def _fields(type_: pa.StructType) -> Iterator[pa.Field]:
    return (type_.field(index) for index in range(type_.num_fields))


def _carried_array(field: pa.Field, values: list[Any], errors: list[RowError | None]) -> pa.Array:
    """The column of `values`. One that does not fit becomes null and the `errors` entry of its row."""
    if pa.types.is_string(field.type):
        values = [_as_text(value) for value in values]
    array = _array_or_none(values, field.type)
    if array is not None:
        return array
    for index, value in enumerate(values):
        if _array_or_none([value], field.type) is None:
            values[index] = None
            message = f"column {field.name!r}: {value!r:.100} is no {field.type}; it was left out of the output"
            errors[index] = _joined(errors[index], RowError("bad_value", message))
    # One by one: Arrow reads a list of structs as its first value is written, and refuses the ones written otherwise.
    return pa.concat_arrays([pa.array([value], field.type) for value in values])


def _array_or_none(values: list[Any], type_: pa.DataType) -> pa.Array | None:
    try:
        return pa.array(values, type_)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # UnicodeEncodeError is a ValueError
        return None


def _as_text(value: Any) -> Any:
    """What a text column holds of a value that another format has a type for."""
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False, default=str)
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    return str(value) if isinstance(value, Decimal | timedelta) else value


def _joined(first: RowError | None, second: RowError) -> RowError:
    """One error of two: the first one's kind, both messages."""
    return second if first is None else RowError(first.kind, f"{first.message}; {second.message}")


def _error_struct(error: RowError | None) -> Mapping[str, str | None] | None:
    return None if error is None else {"kind": error.kind, "message": _valid_text(error.message)}


def _valid_text(text: str | None) -> str | None:
    """The text with lone surrogates, which UTF-8 has no bytes for, replaced by U+FFFD."""
    if text is None or text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
