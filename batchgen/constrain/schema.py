"""JSON schemas as they are supported: every keyword is enforced, or refused with its path. None is ignored."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Path = tuple[str | int, ...]

# fmt: off
_METADATA = frozenset({
    "$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment", "title", "description", "default",
    "examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema",
    "discriminator",
})
"""Keywords that say nothing about what is valid."""
_ENFORCED = frozenset({
    "$ref", "type", "enum", "const", "anyOf", "oneOf", "allOf", "properties", "additionalProperties",
    "patternProperties", "required", "minProperties", "maxProperties", "items", "prefixItems", "minItems", "maxItems",
    "minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
    "multipleOf",
})
# fmt: on
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""Values of `format` that are enforced."""
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_IN_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties")
_LOST_REFERENCES = ("Pointer", "Anchor", "Resource")
"""How errors about references begin."""
_ADVICE = {
    "nullable": "write `type: [..., 'null']` or an anyOf instead",
    "additionalItems": "write prefixItems and items instead",
    "dependencies": "leave it out",
}


class Problem(NamedTuple):
    """What is wrong with a schema, and where in it."""

    path: Path
    message: str


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas directly inside of one, with their paths."""
    for keyword in _BY_NAME:
        if isinstance(named := schema.get(keyword), dict):
            yield from (((keyword, name), inner) for name, inner in named.items())
    for keyword in _IN_LISTS:
        if isinstance(listed := schema.get(keyword), list):
            yield from (((keyword, index), inner) for index, inner in enumerate(listed))
    for keyword in _ALONE:
        if keyword in schema:
            yield (keyword,), schema[keyword]


def keyword_problems(schema: Any, path: Path = ()) -> Iterator[Problem]:
    """Keywords that are not supported, or that no draft of JSON schema has, anywhere in a schema."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield Problem(path, f"{schema!r:.60} is no schema; write a mapping")
        return
    for keyword in schema:
        if keyword not in _METADATA and keyword not in _ENFORCED:
            advice = _ADVICE.get(keyword, "leave it out, or check the answers yourself")
            yield Problem((*path, keyword), f"batchgen can't enforce {keyword!r}; {advice}")
    form = schema.get("format")
    if isinstance(form, str) and form not in FORMATS:
        yield Problem((*path, "format"), f"batchgen can't enforce the format {form!r}; there are {_list(FORMATS)}")
    for inner_path, inner in subschemas(schema):
        yield from keyword_problems(inner, (*path, *inner_path))


def locate(schema: dict[str, Any], compile_error: Callable[[Any], str | None]) -> Problem | None:
    """What `compile_error` finds in a schema, at the innermost place where it finds anything.

    A part that nothing can satisfy counts, although the whole may do without it.
    """
    shared = {keyword: schema[keyword] for keyword in ("$defs", "definitions") if keyword in schema}

    def innermost(inner: Any, path: Path, found: str | None) -> Problem | None:
        for deeper_path, deeper in subschemas(inner):
            if not isinstance(deeper, dict):
                continue
            error = compile_error(shared | deeper)
            # A reference to elsewhere in the root is lost on the way: that is no error of the schema.
            own = error is not None and (error == found or not error.startswith(_LOST_REFERENCES))
            problem = innermost(deeper, (*path, *deeper_path), error if own else None)
            if problem is not None:
                return problem
        return None if found is None else Problem(path, found)

    return innermost(schema, (), compile_error(schema))


def _list(words: frozenset[str]) -> str:
    return ", ".join(sorted(words))
