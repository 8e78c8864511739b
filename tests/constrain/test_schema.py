"""The table of docs/structured_output.md: each keyword of JSON schema is enforced, or refused with its path."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from batchgen.constrain.grammar import Grammar
from batchgen.constrain.schema import FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured_output.md"

A = {"a": {"type": "integer"}}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
KINDS = [
    {"type": "object", "properties": {"kind": {"const": "x"}}, "required": ["kind"]},
    {"type": "object", "properties": {"kind": {"const": "y"}}, "required": ["kind"]},
]

ENFORCED: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("type", {"type": "string"}, ["", "ü \" \\ \n"], [1, None, ["a"]]),
    ("type", {"type": "integer"}, [0, -17, 10**20], [1.5, "1", True]),
    ("type", {"type": "number"}, [0, -1.5, 1e30], ["1", None]),
    ("type", {"type": "boolean"}, [True, False], [0, "true"]),
    ("type", {"type": "null"}, [None], [0, "", False]),
    ("type", {"type": "array"}, [[], [1, "a", None]], [{}, 1]),
    ("type", {"type": "object"}, [{}, {"a": {"b": [1]}}], [[], 1]),
    ("type", {"type": ["integer", "null"]}, [3, None], ["3", 3.5]),
    ("enum", {"enum": ["a", 1, None, {"b": [2]}]}, ["a", 1, None, {"b": [2]}], ["b", 2, {"b": [3]}]),
    ("const", {"const": {"a": ["x", 1]}}, [{"a": ["x", 1]}], [{"a": ["x"]}, "x"]),
    ("properties", {"type": "object", "properties": A}, [{}, {"a": 1}, {"b": "x"}], [{"a": "1"}]),
    ("required", {"type": "object", "properties": A, "required": ["a"]}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"b": 2}]),
    ("additionalProperties", {"type": "object", "properties": A, "additionalProperties": False},
     [{}, {"a": 1}], [{"b": 1}, {"a": 1, "b": 1}]),
    ("additionalProperties", {"type": "object", "additionalProperties": {"type": "boolean"}},
     [{"x": True}], [{"x": 1}]),
    ("patternProperties", {"type": "object", "patternProperties": {"^n_": {"type": "integer"}},
     "additionalProperties": False}, [{}, {"n_a": 1}], [{"n_a": "1"}, {"a": 1}]),
    ("minProperties", {"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
     [{"a": 1}, {"a": 1, "b": 2}], [{}]),
    ("maxProperties", {"type": "object", "maxProperties": 1, "additionalProperties": {"type": "integer"}},
     [{}, {"a": 1}], [{"a": 1, "b": 2}]),
    ("items", {"type": "array", "items": {"type": "integer"}}, [[], [1, 2]], [["1"], [1, None]]),
    ("prefixItems", {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
     [[1, "a"], [1]], [["a"], [1, "a", 2]]),
    ("minItems", {"type": "array", "items": {"type": "integer"}, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    ("maxItems", {"type": "array", "items": {"type": "integer"}, "maxItems": 2}, [[], [1, 2]], [[1, 2, 3]]),
    ("minLength", {"type": "string", "minLength": 2}, ["ab", "üü"], ["", "ü"]),
    ("maxLength", {"type": "string", "maxLength": 2}, ["", "üü"], ["abc"]),
    ("pattern", {"type": "string", "pattern": "b+"}, ["b", "abba"], ["", "aca"]),
    ("pattern", {"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ["AB-12"], ["AB-", "xAB-12", "AB-12x"]),
    ("minimum", {"type": "integer", "minimum": 3}, [3, 400], [2, -5]),
    ("maximum", {"type": "integer", "maximum": 3}, [3, -400], [4, 30]),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": 3}, [4], [3]),
    ("exclusiveMaximum", {"type": "integer", "exclusiveMaximum": 3}, [2], [3]),
    ("minimum", {"type": "number", "minimum": 0.5, "maximum": 1.5}, [0.5, 1, 1.25], [0.4, 1.6, -1]),
    ("multipleOf", {"type": "integer", "multipleOf": 5}, [0, 15, 100], [3, 101]),
    ("anyOf", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, [1, None], ["a"]),
    ("allOf", {"allOf": [{"type": "integer", "minimum": 2}, {"maximum": 4}]}, [2, 4], [1, 5]),
    ("allOf", {"allOf": [{"type": "object", "properties": A}, {"required": ["a"]}]}, [{"a": 1}], [{}]),
    ("oneOf", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, 1.5]),
    ("oneOf", {"oneOf": KINDS}, [{"kind": "x"}, {"kind": "y"}], [{"kind": "z"}, {}]),
    ("$ref", {"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}, [1], ["a"]),
    ("$ref", {"$ref": "#/definitions/n", "definitions": {"n": {"type": "integer"}}}, [1], ["a"]),
    ("$ref", {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, [{}, {"next": {"next": {}}}], [{"next": 1}, []]),
    ("$anchor", {"$ref": "#n", "$defs": {"x": {"$anchor": "n", "type": "integer"}}}, [1], ["a"]),
]  # fmt: skip

TEXTS = {
    "date-time": (["2026-12-01T13:14:15Z", "2026-12-01T13:14:15.5+01:00"], ["2026-12-01", "2026-13-01T13:14:15Z"]),
    "time": (["13:14:15Z"], ["25:00:00Z", "noon"]),
    "date": (["2026-02-28"], ["2026-02-30", "26-2-3"]),
    "duration": (["P1DT12H", "PT5M"], ["5 minutes", "P"]),
    "email": (["a.b@example.org"], ["a.example.org", "@b"]),
    "hostname": (["a-b.example.org"], ["-a.example", "a b"]),
    "ipv4": (["127.0.0.1"], ["127.0.0", "256.1.1.1"]),
    "ipv6": (["::1", "2001:db8::1"], ["127.0.0.1", ":::"]),
    "uri": (["https://example.org/a?b=c#d"], ["example", "no uri"]),
    "uuid": (["123e4567-e89b-12d3-a456-426614174000"], ["123e4567", "xyz"]),
}

METADATA = {
    "title": "t", "description": "d", "default": 1, "examples": [1], "$comment": "c", "deprecated": True,
    "$schema": "https://json-schema.org/draft/2020-12/schema", "$id": "https://example.org/s", "readOnly": True,
    "writeOnly": True, "contentEncoding": "base64", "contentMediaType": "text/html", "contentSchema": {},
    "discriminator": {"propertyName": "kind"},
}  # fmt: skip

REFUSED: dict[str, Any] = {
    "not": {"type": "string"}, "if": {}, "then": {}, "else": {}, "dependentRequired": {}, "dependentSchemas": {},
    "dependencies": {}, "uniqueItems": True, "contains": {}, "minContains": 1, "maxContains": 1,
    "additionalItems": False, "propertyNames": {}, "unevaluatedProperties": False, "unevaluatedItems": False,
    "$dynamicRef": "#a",
    "$dynamicAnchor": "a", "$recursiveRef": "#", "$recursiveAnchor": True, "nullable": True, "x-guidance": {},
    "maxlength": 3,
}  # fmt: skip


def problems(schema: Any) -> list[Any]:
    return list(Grammar("json_schema", json.dumps(schema)).problems())


@pytest.mark.parametrize(("keyword", "schema", "valid", "invalid"), ENFORCED, ids=lambda value: str(value)[:40])
def test_enforced(follows: Any, keyword: str, schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    assert problems(schema) == []
    assert keyword in json.dumps(schema)
    for value in valid:
        jsonschema.validate(value, schema)
        assert follows.value(schema, value), value
    for value in invalid:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(value, schema)
        assert not follows.value(schema, value), value


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats(follows: Any, name: str) -> None:
    valid, invalid = TEXTS[name]
    schema = {"type": "string", "format": name}
    assert [text for text in valid if not follows.value(schema, text)] == []
    assert [text for text in invalid if follows.value(schema, text)] == []


@pytest.mark.parametrize("keyword", METADATA)
def test_metadata_changes_nothing(follows: Any, keyword: str) -> None:
    schema = {"type": "integer", keyword: METADATA[keyword]}
    assert problems(schema) == []
    assert follows.value(schema, 3)
    assert not follows.value(schema, "a")


@pytest.mark.parametrize("keyword", REFUSED)
def test_refused_with_its_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"list": {"type": "array", "items": {keyword: REFUSED[keyword]}}}}
    (found,) = problems(schema)
    assert found.path == ("properties", "list", "items", keyword)
    assert repr(keyword) in found.message
    assert "; " in found.message


@pytest.mark.parametrize(
    ("inner", "path", "words"),
    [
        ({"type": "string", "format": "regex"}, ("format",), "the format 'regex'"),
        ({"type": "array", "items": [{"type": "string"}]}, ("items",), "is no schema"),
        ({"oneOf": [{"type": "integer", "minimum": 1}, {"type": "integer", "maximum": 3}]}, (), "oneOf"),
        ({"$ref": "https://example.org/other.json"}, (), "example.org/other.json"),
        ({"$ref": "other.json#/a"}, (), "other.json"),
        ({"$ref": "#/$defs/none"}, (), "/$defs/none"),
        ({"type": "strng"}, (), "Invalid type: strng"),
        ({"type": "string", "pattern": "(?=a)"}, (), "look-around"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, (), "minLength (3) is greater"),
        ({"enum": []}, (), "Unsatisfiable"),
        ({"anyOf": [{"type": "string"}, {"type": "string", "pattern": "["}]}, ("anyOf", 1), "regex parse error"),
        ({"type": "object", "required": ["b"], "additionalProperties": False}, (), "'b' is unsatisfiable"),
        ("text", (), "is no schema"),
    ],
)
def test_mistakes_are_told_where_they_are(inner: Any, path: tuple[Any, ...], words: str) -> None:
    found = problems({"type": "object", "properties": {"deep": {"type": "array", "prefixItems": [inner]}}})
    assert len(found) == 1
    assert found[0].path == ("properties", "deep", "prefixItems", 0, *path)
    assert words in found[0].message


def test_several_are_told_at_once() -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"uniqueItems": True}}, "if": {}}
    assert [problem.path for problem in problems(schema)] == [
        ("if",), ("properties", "a", "not"), ("properties", "b", "uniqueItems"),
    ]  # fmt: skip


def test_the_table_is_what_is_tested() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    enforced, refused = set(), set()
    for keywords, meaning in rows:
        names = set(re.findall(r"`([$\w-]+)`", keywords))
        if meaning.startswith("refused"):
            refused |= names
        elif meaning.startswith("enforced"):
            enforced |= names
    tested = {keyword for keyword, *_ in ENFORCED} | {"format", "$defs", "definitions"} | FORMATS
    assert enforced - {"null"} == tested
    assert refused - {"$ref", "items", "format", "oneOf"} == set(REFUSED) - {"x-guidance", "maxlength"}
