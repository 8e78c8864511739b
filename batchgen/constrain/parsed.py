"""The column `parsed`: an Arrow type for the answers of a JSON schema, and each answer as a value of it.

What has no Arrow type stays JSON text: objects whose keys are not known, lists of no one type, and values that may be
of several types.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pyarrow as pa

_INT64 = range(-(2**63), 2**63)


class ValueTooLargeError(ValueError):
    """A value that is right by the schema, and that its column can't hold."""


class Parsed(NamedTuple):
    """The column's type, and what makes its value of a JSON value. The function raises ValueTooLargeError."""

    type: pa.DataType
    value_of: Callable[[Any], Any]


def parsed_column(schema: Mapping[str, Any] | None) -> Parsed:
    """How answers that follow a schema are stored; JSON text where each row has its own (None)."""
    if schema is None:
        return JSON_TEXT
    return _Types(schema).of(schema, frozenset()) or JSON_TEXT


def _as_json(value: Any) -> str:
    return _valid_text(json.dumps(value, ensure_ascii=False))


def _as_integer(value: Any) -> int:
    if value != int(value) or int(value) not in _INT64:
        raise ValueTooLargeError(f"{value} is no integer of 64 bits")
    return int(value)


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ValueTooLargeError(f"an integer of {len(str(value))} digits is no double") from error


def _valid_text(text: str) -> str:
    """Half a character, which JSON can write and UTF-8 can't, becomes U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


JSON_TEXT = Parsed(pa.string(), _as_json)
_STRING = Parsed(pa.string(), _valid_text)
_BOOLEAN = Parsed(pa.bool_(), bool)
_INTEGER = Parsed(pa.int64(), _as_integer)
_NUMBER = Parsed(pa.float64(), _as_number)
_PLAIN = {"string": _STRING, "boolean": _BOOLEAN, "integer": _INTEGER, "number": _NUMBER}
_KINDS: dict[type, Parsed] = {str: _STRING, bool: _BOOLEAN, int: _INTEGER, float: _NUMBER}


class _Types:
    """Types of the schemas inside a root, to which references lead."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def of(self, schema: Any, within: frozenset[str]) -> Parsed | None:
        """The type of a schema; None for null alone. `within` are the references that led here."""
        if not isinstance(schema, Mapping):
            return JSON_TEXT
        if "$ref" in schema:
            return self._referred(schema["$ref"], within)
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            return _one_of([_KINDS.get(type(value), JSON_TEXT) for value in values if value is not None])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                parts = [self.of(part, within) for part in schema[keyword]]
                return _one_of([part for part in parts if part is not None])
        if "allOf" in schema:
            # Parts without a type narrow down what the others allow.
            parts = [self.of(part, within) for part in schema["allOf"]]
            return _one_of([part for part in parts if part not in (None, JSON_TEXT)]) or JSON_TEXT
        kinds = schema.get("type", ())
        kinds = [kinds] if isinstance(kinds, str) else list(kinds)
        return (
            _one_of([self._of_kind(kind, schema, within) for kind in kinds if kind != "null"]) if kinds else JSON_TEXT
        )

    def _referred(self, reference: str, within: frozenset[str]) -> Parsed | None:
        """The type of what `#/...` names; JSON text where it holds itself."""
        if reference in within or not reference.startswith("#"):
            return JSON_TEXT
        found: Any = self._root
        for step in reference.removeprefix("#").split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            found = found[int(name)] if isinstance(found, list) else found.get(name)
        return self.of(found, within | {reference})

    def _of_kind(self, kind: str, schema: Mapping[str, Any], within: frozenset[str]) -> Parsed:
        if kind == "object":
            return self._object(schema, within)
        if kind == "array":
            return self._array(schema, within)
        return _PLAIN[kind]

    def _object(self, schema: Mapping[str, Any], within: frozenset[str]) -> Parsed:
        fields = {name: self.of(inner, within) or JSON_TEXT for name, inner in schema.get("properties", {}).items()}
        others = schema.get("additionalProperties") not in (None, False) or schema.get("patternProperties")
        if not fields or others:
            return JSON_TEXT

        def value_of(value: Any) -> Any:
            return {name: _nullable(field, value.get(name)) for name, field in fields.items()}

        return Parsed(pa.struct([(name, field.type) for name, field in fields.items()]), value_of)

    def _array(self, schema: Mapping[str, Any], within: frozenset[str]) -> Parsed:
        if "prefixItems" in schema or not isinstance(schema.get("items"), Mapping):
            return JSON_TEXT
        items = self.of(schema["items"], within) or JSON_TEXT

        def value_of(value: Any) -> Any:
            return [_nullable(items, item) for item in value]

        return Parsed(pa.list_(items.type), value_of)


def _nullable(column: Parsed, value: Any) -> Any:
    return None if value is None else column.value_of(value)


def _one_of(parts: list[Parsed]) -> Parsed | None:
    """The type that holds the values of all of them; None of none."""
    if not parts:
        return None
    first = parts[0]
    if all(part.type == first.type and (part.value_of is first.value_of) for part in parts):
        return first
    if all(part in (_INTEGER, _NUMBER) for part in parts):
        return _NUMBER
    return JSON_TEXT
