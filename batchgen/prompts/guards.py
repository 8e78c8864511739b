"""How large the results of Jinja's filters, methods and operators get, said before the work is done."""

import re
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import wraps
from typing import Any

from batchgen.prompts.budget import CHARS_PER_ITEM, CHARS_PER_STEP, Budget, TemplateLimitError

_DIGITS = re.compile(r"\d+")

# Filters that walk through what they are given. What has a length is charged at once, a generator item by item.
_WALKS = {
    *("batch", "dictsort", "groupby", "items", "join", "list", "map", "max", "min", "random"),
    *("reject", "rejectattr", "select", "selectattr", "slice", "sort", "sum", "unique"),
}
_PADS = {"center", "ljust", "rjust", "to_bytes", "zfill"}
_SPLITS = {"rsplit", "split", "splitlines"}
_FORBIDDEN = {"striptags", "translate"}  # methods whose cost nothing bounds
_PRINTS = {"forceescape", "pprint", "string", "urlencode"}
_TEXTS = {"center", "format", "indent", "replace", "striptags", "wordwrap"}
_COMPARES = {"dictsort", "groupby", "max", "min", "sort", "unique"}


def _int(value: Any) -> int:
    return abs(int(value)) if isinstance(value, int | float) else 0


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def walked(budget: Budget, items: Any) -> Any:
    """`items`, each of them charged as a step."""
    if isinstance(items, Sized):
        budget.step(len(items))
        return items
    return _charged(budget, items) if isinstance(items, Iterable) else items


def _charged(budget: Budget, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        budget.step()
        yield item


def _joined_size(budget: Budget, items: Any, separator: Any) -> int:
    return budget.measure(items) + len(items) * len(str(separator))


def _replaced_size(text: str, old: Any, new: Any) -> int:
    old, new = str(old), str(new)
    return len(text) + text.count(old) * max(0, len(new) - len(old))


def percent_size(budget: Budget, form: str, values: Any) -> int:
    """Most characters that `form % values` can have."""
    parts = values if isinstance(values, tuple) else (values,)
    widths = sum(int(digits[:12]) for digits in _DIGITS.findall(form))
    if "*" in form:
        widths += form.count("%") * sum(_int(part) for part in parts)
    return len(form) + widths + form.count("%") * max((budget.measure(part) for part in parts), default=0)


def format_spec_size(spec: str) -> int:
    """Most characters that a width or precision in a `str.format` field asks for."""
    return sum(int(digits[:12]) for digits in _DIGITS.findall(spec))


def _filter_size(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Characters that a filter builds."""
    if isinstance(value, str):
        return _text_filter_size(budget, name, value, args, kwargs)
    if name in _TEXTS:  # they make a text of any value first
        budget.grow(budget.measure(value))
        return _text_filter_size(budget, name, str(value), args, kwargs)
    match name:
        case "batch":
            return CHARS_PER_ITEM * _int(_argument(args, kwargs, 0, "linecount", 0))
        case "slice":
            return CHARS_PER_ITEM * _int(_argument(args, kwargs, 0, "slices", 0))
        case "join":
            return _joined_size(budget, value, _argument(args, kwargs, 0, "d", ""))
        case "sum":
            return budget.measure(value) * (1 if isinstance(_argument(args, kwargs, 1, "start", 0), int | float) else 8)
        case "tojson":
            indent = _argument(args, kwargs, 0, "indent", None)
            return budget.measure(value) * (1 + (len(indent) if isinstance(indent, str) else _int(indent)))
        case _ if name in _COMPARES or name in _PRINTS:
            return budget.measure(value)
    return 0


def _text_filter_size(budget: Budget, name: str, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    match name:
        case "center":
            return len(text) + _int(_argument(args, kwargs, 0, "width", 80))
        case "indent":
            width = _argument(args, kwargs, 0, "width", 4)
            return len(text) + (text.count("\n") + 1) * (len(width) if isinstance(width, str) else _int(width))
        case "wordwrap":
            # textwrap copies the rest of a long word for each line that it fills.
            longest, width = max(map(len, text.split()), default=0), _int(_argument(args, kwargs, 0, "width", 79)) or 1
            budget.step(longest * longest // width // CHARS_PER_STEP)
            return len(text) * (1 + len(str(_argument(args, kwargs, 2, "wrapstring", None) or "\n")))
        case "replace":
            return _replaced_size(text, _argument(args, kwargs, 0, "old", ""), _argument(args, kwargs, 1, "new", ""))
        case "format":
            return percent_size(budget, text, (*args, *kwargs.values()))
        case "striptags":
            budget.step(text.count("<") * len(text) // CHARS_PER_STEP)  # markupsafe copies the text for each tag
        case "batch" | "slice":
            return CHARS_PER_ITEM * (len(text) + _int(args[0] if args else next(iter(kwargs.values()), 0)))
    return len(text)


def guarded_filter(name: str, function: Callable[..., Any], budget: Callable[[], Budget]) -> Callable[..., Any]:
    """The same filter, which first asks the budget for its work."""
    place = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        account = budget()
        account.step()
        if len(args) <= place:
            return function(*args, **kwargs)
        first, value, rest = args[:place], args[place], args[place + 1 :]
        if name in _WALKS:
            value = walked(account, value)
        if name in ("join", "sum") or (name in _COMPARES and not isinstance(value, Sized)):
            value = list(value)
        if name == "int" and isinstance(value, str) and len(value) > 4300:
            raise TemplateLimitError("the template would read a number of more than 4,300 digits")
        if name == "round":
            account.check_int(4 * _int(_argument(rest, kwargs, 0, "precision", 0)))
        account.grow(_filter_size(account, name, value, rest, kwargs))
        return function(*first, value, *rest, **kwargs)

    return guarded


def guarded_arguments(budget: Budget, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Ask the budget for a call, of a built-in type's method above all; the arguments to call it with."""
    budget.step(1 + len(kwargs) + sum(len(arg) for arg in args if isinstance(arg, list | tuple | dict | set)))
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if name == "copy" and isinstance(owner, Sized):
        budget.step(len(owner))
    if not isinstance(owner, str | bytes | int):
        return args
    if name in _FORBIDDEN:
        raise TemplateLimitError(f"the template may not call {name}()")
    if name == "join" and args and not isinstance(owner, int):
        items = list(walked(budget, args[0]))
        budget.grow(_joined_size(budget, items, owner))
        return (items, *args[1:])
    budget.grow(_method_size(owner, name, args, kwargs))
    return args


def _method_size(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    if name in _PADS:
        return _int(_argument(args, kwargs, 0, "length", 0))
    if isinstance(owner, int):
        return 0
    if name == "expandtabs":
        return int(len(owner) * (1 + _int(_argument(args, kwargs, 0, "tabsize", 8))))
    if name == "replace" and len(args) > 1 and isinstance(args[0], type(owner)):
        return int(len(owner) + owner.count(args[0]) * max(0, len(args[1]) - len(args[0])))
    if name in _SPLITS:
        separator = _argument(args, kwargs, 0, "sep", None)
        pieces = owner.count(separator) if isinstance(separator, str) and separator else len(owner) // 2
        return int(len(owner) + CHARS_PER_ITEM * pieces)
    return len(owner)


def check_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Ask the budget for the result of a binary operator."""
    if operator == "+" and type(left) is str and type(right) is str:
        budget.grow(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        budget.check_int(bits)
    elif operator == "%" and isinstance(left, str | bytes):
        left = left if isinstance(left, str) else left.decode("latin-1")
        budget.grow(percent_size(budget, left, tuple(right.values()) if isinstance(right, dict) else right))
    elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
        budget.grow((len(left) + len(right)) * _unit(left))
    elif operator == "*":
        for items, times in ((left, right), (right, left)):
            if isinstance(items, Sized) and isinstance(times, int):
                budget.grow(len(items) * max(0, times) * _unit(items))


def check_copy(budget: Budget, value: Any) -> None:
    """Ask the budget for a copy of all of `value`."""
    if isinstance(value, Sized):
        budget.grow(len(value) * _unit(value))


def _unit(items: Sized) -> int:
    return 1 if isinstance(items, str | bytes) else CHARS_PER_ITEM
