"""What pydantic found, as messages for people: what is wrong, and what to write instead."""

import json
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchgen.job.fields import choices_of, describe, field_at, fields_of, plain_types, type_at
from batchgen.job.places import FieldPath

_MISMATCHES = {"string_type", "list_type", "dict_type", "model_type", "literal_error", "int_type"}
_YAML11 = {"no": "false", "off": "false", "n": "false", "yes": "true", "on": "true", "y": "true"}


class Finding(NamedTuple):
    """A field and what is wrong with it."""

    path: FieldPath
    message: str


def explain(error: ValidationError, values: dict[str, Any]) -> Iterator[Finding]:
    """One finding for each thing wrong with `values`, the plain values that were checked."""
    unions: dict[FieldPath, list[tuple[FieldPath, ErrorDetails]]] = {}
    for details in error.errors(include_url=False):
        path, union = _locate(details, values)
        if union is None:
            yield _explain_one(path, details, values)
        else:
            unions.setdefault(union, []).append((path, details))
    for union, errors in unions.items():
        yield from _explain_union(union, errors, values)


def _locate(details: ErrorDetails, values: Any) -> tuple[FieldPath, FieldPath | None]:
    """The field path of an error, and where a choice between types was made on the way (its tags are left out)."""
    path: FieldPath = ()
    union = None
    for step in details["loc"]:
        if isinstance(values, dict) and step in values:
            values = values[str(step)]
        elif isinstance(values, list) and isinstance(step, int):
            values = values[step]
        elif step not in fields_of(path):
            union = path if union is None else union
            continue
        path = (*path, step)
    return path, union


def _explain_union(
    union: FieldPath, errors: list[tuple[FieldPath, ErrorDetails]], values: dict[str, Any]
) -> Iterator[Finding]:
    """Errors of the type that was meant, when the value's own kind tells which; else one error for all types."""
    meant = [(path, details) for path, details in errors if path != union or details["type"] not in _MISMATCHES]
    if meant:
        yield from (_explain_one(path, details, values) for path, details in meant)
    else:
        yield _explain_one(union, errors[0][1], values)


def _explain_one(path: FieldPath, details: ErrorDetails, values: dict[str, Any]) -> Finding:
    match details["type"]:
        case "extra_forbidden":
            return Finding(path, _unknown(path))
        case "missing":
            return Finding(path, _missing(path))
        case "value_error":
            return Finding(path, str(details["ctx"]["error"]))
        case "mistake":
            return Finding((*path, details["ctx"]["field"]), details["ctx"]["message"])
        case "string_too_short":
            return Finding(path, "an empty text; write something, or leave the field out")
        case "too_short":
            return Finding(
                path, f"a list of {details['ctx']['actual_length']}; write {details['ctx']['min_length']} or more"
            )
    return Finding(path, _wrong_value(path, details["input"]))


def _unknown(path: FieldPath) -> str:
    section, name = path[:-1], str(path[-1])
    known = fields_of(section)
    near = get_close_matches(name, known, n=1, cutoff=0.6)
    guess = f"did you mean {near[0]}? " if near else ""
    owner = f"{section[-1]} has" if section else "a job has"
    return f"unknown field; {guess}{owner} the fields {', '.join(known)}"


def _missing(path: FieldPath) -> str:
    field = field_at(path)
    meaning = (field.description or "") if field else ""
    return f"missing; write `{path[-1]}:` with {describe(path)}. {meaning}".rstrip()


def _wrong_value(path: FieldPath, value: Any) -> str:
    """What is there and what to write. The advice is exact where the slip is a known one."""
    kinds = plain_types(type_at(path))
    if isinstance(value, str):
        advice = _instead_of_text(path, value, kinds)
    elif isinstance(value, float) and value.is_integer() and int in kinds:
        advice = f"write {int(value)}"
    elif str in kinds and not (isinstance(value, list | dict) or (kinds & {int, float} and _is_figure(value))):
        advice = f'write it in quotes: "{json.dumps(value)}"' if value is not None else None
    else:
        advice = None
    return (
        f"{_show(value)} where {describe(path)} belongs; {advice}"
        if advice
        else f"{_show(value)}; write {describe(path)}"
    )


def _instead_of_text(path: FieldPath, text: str, kinds: set[type]) -> str | None:
    if bool in kinds and text.lower() in _YAML11:
        return f"write {_YAML11[text.lower()]}"
    numbers = [str(choice) for choice in choices_of(type_at(path)) if isinstance(choice, int)]
    if (kinds & {int, float} and _is_number(text)) or text in numbers:
        return f"write {text.strip()} without quotes"
    near = get_close_matches(text, [str(choice) for choice in choices_of(type_at(path))], n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else None


def _is_figure(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return f"the text {json.dumps(value[:60], ensure_ascii=False)}"
        case int() | float():
            return f"the number {value}"
        case list():
            return "a list"
    return "a mapping"
