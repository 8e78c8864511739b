"""Types of carried columns: one Arrow schema for the whole input, agreed before the first row.

The rule, for files of Parquet as for rows of JSON: equal types stay; integers of several widths become int64; integers
with floats become double; a column of nulls is text; anything else that differs becomes text, where text stays as it is
and other values are their JSON. Objects and lists in JSONL are carried as JSON text.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.types as pat

from batchgen.data.repeats import RepeatedIds

_TEXT = pa.string()


class _WideInteger(int):
    """Kind of an integer that a double can't hold exactly."""


class _HugeInteger(int):
    """Kind of an integer of more than 64 bits."""


class Survey:
    """Collects the kinds of values in each column of rows that carry no types, and repeats in `id_column`."""

    def __init__(self, columns: Iterable[str] | None, id_column: str | None = None) -> None:
        self._only = None if columns is None else frozenset(columns)
        self._id_column = id_column
        self._ids = RepeatedIds()
        self._kinds: dict[str, set[type]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Notes the kinds of one row's values."""
        if self._id_column is not None:
            self._ids.add(values.get(self._id_column))
        for name, value in values.items():
            if self._only is not None and name not in self._only:
                continue
            kind = type(value)
            if kind is int and not -(2**53) <= value <= 2**53:
                kind = _WideInteger if -(2**63) <= value < 2**63 else _HugeInteger
            self._kinds.setdefault(name, set()).add(kind)

    def fields(self) -> dict[str, pa.DataType]:
        """The type of every column seen, in order of first appearance."""
        return {name: _type_of_kinds(kinds) for name, kinds in self._kinds.items()}

    def warnings(self) -> list[str]:
        """One line for each column whose values are of several kinds and become text, and one for repeated ids."""
        repeats = self._ids.warning(self._id_column) if self._id_column is not None else None
        lines = [] if repeats is None else [repeats]
        for name, kinds in self._kinds.items():
            words = sorted({_kind_word(kind) for kind in kinds - {type(None)}})
            if len(words) > 1 and pat.is_string(_type_of_kinds(kinds)):
                lines.append(f"column {name!r} holds values of several types ({', '.join(words)}): carried as text")
        return lines


def _type_of_kinds(kinds: set[type]) -> pa.DataType:
    kinds = kinds - {type(None)}
    if kinds == {bool}:
        return pa.bool_()
    if kinds and kinds <= {int, _WideInteger}:
        return pa.int64()
    if kinds and kinds <= {int, float}:
        return pa.float64()
    return _TEXT


def _kind_word(kind: type) -> str:
    words = {str: "text", bool: "true/false", float: "number", dict: "object", list: "list"}
    return "integer" if issubclass(kind, int) and kind is not bool else words.get(kind, kind.__name__)


def normal_type(dtype: pa.DataType, null: pa.DataType = _TEXT) -> pa.DataType:
    """The plain form of an Arrow type, at any depth: no dictionaries, views or large offsets, and `null` for nulls."""
    if pat.is_dictionary(dtype):
        return normal_type(dtype.value_type, null)
    if isinstance(dtype, pa.BaseExtensionType):
        return normal_type(dtype.storage_type, null)
    if pat.is_null(dtype):
        return null
    if pat.is_string(dtype) or pat.is_large_string(dtype) or pat.is_string_view(dtype):
        return _TEXT
    if is_binary(dtype):
        return pa.binary()
    if pat.is_struct(dtype):
        return pa.struct([pa.field(field.name, normal_type(field.type, null)) for field in dtype])
    if pat.is_map(dtype):
        return pa.map_(normal_type(dtype.key_type, null), normal_type(dtype.item_type, null))
    if pat.is_list(dtype) or pat.is_large_list(dtype) or pat.is_list_view(dtype) or pat.is_large_list_view(dtype):
        return pa.list_(normal_type(dtype.value_type, null))
    if pat.is_fixed_size_list(dtype):
        return pa.list_(normal_type(dtype.value_type, null), dtype.list_size)
    return dtype


def is_binary(dtype: pa.DataType) -> bool:
    """Whether values of this type are bytes."""
    checks = (pat.is_binary, pat.is_large_binary, pat.is_binary_view, pat.is_fixed_size_binary)
    return any(check(dtype) for check in checks)


def unify(types: Iterable[pa.DataType]) -> pa.DataType:
    """The type that holds the values of all these types (the rule at the top of this module)."""
    plain = {normal_type(dtype, null=pa.null()): None for dtype in types if not pat.is_null(dtype)}
    if not plain or any(pat.is_string(dtype) for dtype in plain):
        return _TEXT
    if len(plain) == 1:
        return normal_type(next(iter(plain)))
    if all(pat.is_integer(dtype) for dtype in plain):
        return _TEXT if pa.uint64() in plain else pa.int64()
    if all(pat.is_integer(dtype) or pat.is_floating(dtype) for dtype in plain):
        return pa.float64()
    try:
        schemas = [pa.schema([("column", dtype)]) for dtype in plain]
        unified = pa.unify_schemas(schemas, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return _TEXT
    return normal_type(unified.field("column").type)


def fit(value: Any, dtype: pa.DataType) -> Any:
    """A row's value as its carried column holds it: text columns get text, double columns get floats."""
    if value is None:
        return None
    if pat.is_floating(dtype):
        return float(value)
    if not pat.is_string(dtype) or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float, list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
