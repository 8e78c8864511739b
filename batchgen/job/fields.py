"""The fields of the job file, walked: by messages, by the fingerprint and by the reference."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from batchgen.job.places import FieldPath
from batchgen.job.spec import Job

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", dict: "a mapping"}
_PLURALS = {str: "texts", int: "whole numbers", dict: "mappings"}


def walk(section: type[BaseModel] = Job, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field that holds a value rather than a section, with its path, in the order of the models."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from walk(inner, (*path, name))
        else:
            yield (*path, name), field


def field_at(path: FieldPath) -> FieldInfo | None:
    """The field at a path; None where the path leads into a free mapping or nowhere."""
    section: type[BaseModel] | None = Job
    field = None
    for step in path:
        if isinstance(step, int):
            continue
        if section is None or step not in section.model_fields:
            return None
        field = section.model_fields[step]
        section = section_of(field.annotation)
    return field


def type_at(path: FieldPath) -> Any:
    """The type at a path, which may lead into a list; None where field_at has nothing."""
    field = field_at(path)
    if field is None or not isinstance(path[-1], int):
        return None if field is None else field.annotation
    return next(get_args(part)[0] for part in map(_bare, _parts(field.annotation)) if get_origin(part) is list)


def fields_of(path: FieldPath) -> list[str]:
    """The names of the fields that the section at a path has."""
    section = Job if not path else section_of(getattr(field_at(path), "annotation", None))
    return [] if section is None else list(section.model_fields)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a type is or may be."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := section_of(part)) is not None), None)


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """The words that a type allows, when it allows some only."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in choices_of(part))


def plain_types(annotation: Any) -> set[type]:
    """The plain types (str, int, float, bool, list, dict, a section) that a type takes, not inside a list."""
    return {_plain_type(part) for part in _parts(annotation)}


def describe(path: FieldPath) -> str:
    """What to write at a path, in words: "a number from 0 to 1"."""
    field = field_at(path)
    if field is None:
        return "another value"
    return _describe(type_at(path), () if isinstance(path[-1], int) else field.metadata)


def _parts(annotation: Any) -> tuple[Any, ...]:
    """The types of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _bare(annotation: Any) -> Any:
    """A type without its annotations."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _plain_type(annotation: Any) -> type:
    bare = _bare(annotation)
    plain: type = get_origin(bare) or bare
    return plain


def _describe(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [bound for extra in parts[1:] for bound in getattr(extra, "metadata", [extra])]
        return _describe(parts[0], bounds)
    if origin in (Union, UnionType):
        return " or ".join(_describe(part, metadata) for part in parts if part is not NoneType)
    if origin is Literal:
        words = [str(word) for word in parts]
        return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    if origin is list:
        return f"a list of {_PLURALS.get(_plain_type(parts[0]), 'values')}"
    section = section_of(annotation)
    if section is not None:
        return f"a mapping with {', '.join(section.model_fields)}"
    return _WORDS.get(origin or annotation, "a value") + _range(metadata)


def _range(metadata: list[Any] | tuple[Any, ...]) -> str:
    low = next((bound for bound in metadata if isinstance(bound, Ge | Gt)), None)
    high = next((bound for bound in metadata if isinstance(bound, Le | Lt)), None)
    match low, high:
        case Ge(ge), Le(le):
            return f" from {ge} to {le}"
        case Ge(ge), Lt(lt):
            return f" of {ge} or more, below {lt}"
        case Gt(gt), Le(le):
            return f" above {gt} and at most {le}"
        case Ge(ge), None:
            return f" of {ge} or more"
        case Gt(gt), None:
            return f" above {gt}"
    return ""
