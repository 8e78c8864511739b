"""The column `parsed`: types from schemas, and values that fit them."""

from typing import Any

import pyarrow as pa
import pytest

from batchgen.constrain.parsed import ValueTooLargeError, parsed_column

TEXT = pa.string()
POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "number"}}}
POINT_TYPE = pa.struct([("x", pa.int64()), ("y", pa.float64())])


@pytest.mark.parametrize(
    ("schema", "type_", "value", "stored"),
    [
        ({"type": "string"}, TEXT, "a", "a"),
        ({"type": "integer"}, pa.int64(), 3, 3),
        ({"type": "number"}, pa.float64(), 3, 3.0),
        ({"type": "boolean"}, pa.bool_(), True, True),
        ({"enum": ["a", "b"]}, TEXT, "b", "b"),
        ({"enum": ["a", None]}, TEXT, "a", "a"),
        ({"enum": [1, 2]}, pa.int64(), 2, 2),
        ({"enum": [1, 2.5]}, pa.float64(), 1, 1.0),
        ({"enum": [1, "a"]}, TEXT, "a", '"a"'),
        ({"const": True}, pa.bool_(), True, True),
        ({"type": ["integer", "null"]}, pa.int64(), 3, 3),
        ({"type": ["integer", "number"]}, pa.float64(), 3, 3.0),
        ({"type": ["integer", "string"]}, TEXT, 3, "3"),
        ({"anyOf": [{"type": "null"}, POINT]}, POINT_TYPE, {"x": 1, "y": 2}, {"x": 1, "y": 2.0}),
        ({"oneOf": [{"type": "string"}, POINT]}, TEXT, "a", '"a"'),
        ({"allOf": [POINT]}, POINT_TYPE, {"x": 1}, {"x": 1, "y": None}),
        ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 3}]}, pa.int64(), 2, 2),
        (POINT, POINT_TYPE, {"y": 1.5, "z": "left out"}, {"x": None, "y": 1.5}),
        ({"type": "object"}, TEXT, {"ü": [1]}, '{"ü": [1]}'),
        (POINT | {"additionalProperties": {"type": "string"}}, TEXT, {"x": 1}, '{"x": 1}'),
        (POINT | {"patternProperties": {"^a": {}}}, TEXT, {"x": 1}, '{"x": 1}'),
        (POINT | {"additionalProperties": False}, POINT_TYPE, {"x": 1, "y": 1}, {"x": 1, "y": 1.0}),
        ({"type": "array", "items": POINT}, pa.list_(POINT_TYPE), [{"x": 1}], [{"x": 1, "y": None}]),
        ({"type": "array", "items": {"type": ["string", "null"]}}, pa.list_(TEXT), ["a", None], ["a", None]),
        ({"type": "array"}, TEXT, [1, "a"], '[1, "a"]'),
        ({"type": "array", "prefixItems": [{"type": "integer"}]}, TEXT, [1], "[1]"),
        ({"type": "null"}, TEXT, 1, "1"),
        ({}, TEXT, {"a": 1}, '{"a": 1}'),
        ({"properties": {"a": {}}}, TEXT, {"a": 1}, '{"a": 1}'),
        ({"type": "object", "properties": {"a": {}, "n": {"type": "null"}}},
         pa.struct([("a", TEXT), ("n", TEXT)]), {"a": "x", "n": None}, {"a": '"x"', "n": None}),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": POINT}}, POINT_TYPE, {"x": 1}, {"x": 1, "y": None}),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "object", "properties": {
            "v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}}}}},
         pa.struct([("v", pa.int64()), ("next", TEXT)]), {"v": 1, "next": {"v": 2}}, {"v": 1, "next": '{"v": 2}'}),
        (None, TEXT, {"a": 1}, '{"a": 1}'),
    ],
)  # fmt: skip
def test_types_and_values(schema: Any, type_: pa.DataType, value: Any, stored: Any) -> None:
    column = parsed_column(schema)
    assert column.type == type_
    assert column.value_of(value) == stored
    assert pa.array([stored, None], type_).to_pylist() == [stored, None]


def test_half_a_character_is_replaced() -> None:
    assert parsed_column({"type": "string"}).value_of("a\ud83d") == "a\ufffd"
    assert parsed_column({"type": "object"}).value_of({"k": "\ud83d"}) == '{"k": "\ufffd"}'
    assert parsed_column({"type": "string"}).value_of("\ud83d\ude00") == "😀"


@pytest.mark.parametrize(("schema", "value"), [("integer", 2**63), ("integer", -(2**63) - 1), ("number", 10**400)])
def test_numbers_that_have_no_room_are_told(schema: str, value: int) -> None:
    with pytest.raises(ValueTooLargeError):
        parsed_column({"type": schema}).value_of(value)
