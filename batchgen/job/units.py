"""Durations, sizes, shares and multiples as people write them."""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_duration(text: str) -> float:
    """Seconds of `90`, `30s`, `90m`, `6h` or `2d`. Raises ValueError."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _SECONDS else (text, "s")
    seconds = _number(number) * _SECONDS[unit]
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text!r} is no duration; write 30s, 90m, 6h or 2d")
    return seconds


def parse_size(text: str) -> int:
    """Bytes of `4GiB`, `500MB` and the like. Raises ValueError."""
    unit = next((unit for unit in _BYTES if text.endswith(unit)), None)
    size = 0.0 if unit is None else _number(text.removesuffix(unit)) * _BYTES[unit]
    if not 1 <= size < float("inf"):
        raise ValueError(f"{text!r} is no size; write 4GiB or 500MB")
    return int(size)


def parse_share(text: str) -> float:
    """Share of `1%` as a number from 0 to 1. Raises ValueError."""
    share = _number(text.removesuffix("%")) / 100
    if not text.endswith("%") or not 0 <= share <= 1:
        raise ValueError(f"{text!r} is no share; write 1% or a number of rows")
    return share


def parse_tokens(text: str) -> int:
    """Tokens of `200M tokens`, `500k tokens` or `4096 tokens`. Raises ValueError."""
    number = text.removesuffix(" tokens")
    scale = {"k": 10**3, "M": 10**6, "G": 10**9}.get(number[-1:], 1)
    tokens = _number(number if scale == 1 else number[:-1]) * scale
    rows = text.removesuffix(" rows")
    if rows.isascii() and rows.isdigit():
        raise ValueError(f"{text!r} is a text, and a number of rows is none; write {int(rows)}")
    if number == text or not 1 <= tokens < float("inf"):
        raise ValueError(f"{text!r} is no number of tokens; write `200M tokens`, or a number of rows")
    return int(tokens)


def parse_multiple(text: str) -> float:
    """The number of `x2` or `x1.5`, above 1. Raises ValueError."""
    number = _number(text.removeprefix("x"))
    if not text.startswith("x") or not 1 < number < float("inf"):
        raise ValueError(f"{text!r} is no multiple; write x2 or x1.5, or a number of tokens")
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


def _readable_by(parse: Callable[[str], object]) -> AfterValidator:
    """Keep the text as it is, when `parse` can read it."""

    def check(text: str) -> str:
        parse(text)
        return text

    return AfterValidator(check)


Duration = Annotated[str, _readable_by(parse_duration)]
Size = Annotated[str, _readable_by(parse_size)]
Share = Annotated[str, _readable_by(parse_share)]
Multiple = Annotated[str, _readable_by(parse_multiple)]
Tokens = Annotated[str, _readable_by(parse_tokens)]
