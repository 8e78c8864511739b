"""A template of the job file: Jinja over one row's columns, in which nothing is ever put out by mistake."""

import datetime
import decimal
import difflib
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any

from jinja2 import Undefined, nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateSyntaxError, UndefinedError
from jinja2.runtime import Context

from batchgen.errors import JobFileError
from batchgen.prompts.budget import TemplateLimitError, TemplateLimits
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.sandbox import RENDER_ERRORS, BoundedEnvironment
from batchgen.prompts.template_columns import ROW, columns_of

_PLAIN = (int, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
_INTERNALS = re.compile(r"__\w+__")
_LOADS = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class _Missing(Undefined):
    """An absent or null value: false in a condition, and an error wherever it would be put out or walked through."""

    def __str__(self) -> str:
        raise self._undefined_exception(self._message)

    __iter__ = __len__ = __hash__ = __str__  # type: ignore[assignment]

    @property
    def _message(self) -> str:
        return self._undefined_hint or f"{self._undefined_name!r} is missing in this row"


class _NotTextError(TypeError):
    """A value that is no text would be put out."""


class _RowEnvironment(BoundedEnvironment):
    """The sandbox for templates over rows: null is as good as absent, and only texts, numbers and dates are put out."""

    def __init__(self, limits: TemplateLimits) -> None:
        super().__init__(limits, undefined=_Missing, keep_trailing_newline=True, extensions=["jinja2.ext.loopcontrols"])
        self.filters.pop("random")  # a row's prompt never varies
        plain_tojson = self.filters["tojson"]
        self.filters["tojson"] = lambda value, **options: plain_tojson(_there(value), **options)
        self.tests["none"] = lambda value: value is None or isinstance(value, Undefined)

    def null(self, name: Any) -> Undefined:
        """What stands for a null value called `name`."""
        return self.undefined(f"{name!r} is null in this row", name=str(name))

    def getattr(self, obj: Any, attribute: str) -> Any:
        value = super().getattr(obj, attribute)
        return self.null(attribute) if value is None else value

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        return self.null(argument) if value is None else value

    @pass_context
    def put(self, context: Context, value: Any) -> Any:
        kind = type(value)
        if kind is str:
            self.budget.put(len(value))
        elif isinstance(value, Undefined):
            str(value)
        elif value is None:
            raise UndefinedError("a null value would be put out")
        elif isinstance(value, str):
            self.budget.put(len(value))
        elif kind is bool or not (isinstance(value, _PLAIN) or (kind is float and math.isfinite(value))):
            shown = "NaN or infinity" if kind is float else f"a value of type {kind.__name__}"
            raise _NotTextError(f"{shown} is no text; give it a form with a filter such as `| tojson`")
        return value


def _there(value: Any) -> Any:
    return str(value) if isinstance(value, Undefined) else value


class RowTemplate:
    """A compiled template. `place` names its field in messages.

    Raises JobFileError when the template can't be compiled, reaches for Python's internals, or is over the limits
    whatever the row.
    """

    def __init__(self, source: str, place: str, limits: TemplateLimits) -> None:
        self._place = place
        self._env = _RowEnvironment(limits)
        try:
            tree = self._env.parse(source)
            check_tree(tree, place)
            _check_calls(tree, place)
            self._template = self._env.from_string(source)
        except TemplateSyntaxError as error:
            raise JobFileError(f"{place}: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise JobFileError(f"{place}: the template is nested too deeply") from error
        self._reads = columns_of(tree, frozenset(self._env.globals))
        self.columns = self._reads.all
        """The columns that the template reads."""
        self.optional = self._reads.optional
        """Those of `columns` that may be absent: each use has a default or asks whether it is there."""
        self.column = self._reads.only
        """The column, when the template is nothing but `{{ column }}`: then its value must be text."""
        self._constant: str | None = None  # the text of a template that reads no column
        self._try()

    def render(self, values: Mapping[str, Any]) -> str:
        """The text for one row. Raises RowFailure."""
        if self.column is not None:
            return column_text(values, self.column)
        if self._constant is not None:
            return self._constant
        try:
            text = self._env.render(self._template, self._variables(values))
        except UndefinedError as error:
            raise RowFailure("template_undefined", f"{self._place}: {error.message}") from error
        except _NotTextError as error:
            raise RowFailure("not_text", f"{self._place}: {error}") from error
        except RENDER_ERRORS as error:
            raise RowFailure("template_error", f"{self._place}: {error or type(error).__name__}") from error
        if not self.columns:
            self._constant = text
        return text

    def _variables(self, values: Mapping[str, Any]) -> dict[str, Any]:
        given = {
            name: self._env.null(name) if values[name] is None else values[name]
            for name in self.columns
            if name in values
        }
        variables = {name: value for name, value in given.items() if name in self._reads.by_name}
        if self._reads.by_row:
            variables[ROW] = {name: value for name, value in given.items() if name in self._reads.by_row}
        return variables

    def _try(self) -> None:
        """Render once with made-up texts: what is refused whatever the row is found before a model loads."""
        try:
            self._env.render(self._template, self._variables(dict.fromkeys(self.columns, "text")))
        except (SecurityError, TemplateLimitError) as error:
            raise JobFileError(f"{self._place}: {error.message}") from error
        except RENDER_ERRORS:
            pass  # made-up values fit no template's expectations


def column_text(values: Mapping[str, Any], column: str) -> str:
    """The text in a column that must hold one. Raises RowFailure."""
    if column not in values:
        raise RowFailure("missing_prompt", f"there is no {column!r} in this row")
    value = values[column]
    if value is None:
        raise RowFailure("null_prompt", f"{column!r} is null")
    if not isinstance(value, str):
        raise RowFailure("not_text", f"{column!r} holds a {type(value).__name__}, not text")
    return value


def check_tree(tree: nodes.Template, place: str) -> None:
    """Refuse what no template may do: load other files, or reach for Python's internals. Raises JobFileError."""
    for node in tree.find_all(_LOADS):
        tag = type(node).__name__.lower()
        raise JobFileError(f"{place}: line {node.lineno}: {tag!r} is not allowed; a template loads no other file")
    names = [(node.lineno, node.attr) for node in tree.find_all(nodes.Getattr)]
    names += [(node.lineno, node.value) for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    for line, name in names:
        found = _INTERNALS.search(name)
        if found and (hasattr(object, found[0]) or hasattr(type, found[0]) or found[0] in _MODULE_INTERNALS):
            raise JobFileError(f"{place}: line {line}: {found[0]} is not allowed in a template")


def _check_calls(tree: nodes.Template, place: str) -> None:
    for node in tree.find_all(nodes.Call):
        if isinstance(node.node, nodes.Getattr) and node.node.attr in _CHANGES:
            raise JobFileError(f"{place}: line {node.lineno}: {node.node.attr}() is not allowed; data can't be changed")


_CHANGES = {
    *("add", "append", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("remove", "reverse", "setdefault", "sort", "update"),
}
_MODULE_INTERNALS = ("__globals__", "__builtins__", "__import__", "__code__", "__func__", "__self__", "__closure__")


def unknown_column(name: str, columns: list[str]) -> str:
    """A message: the input has no such column, which ones it has, and which one may be meant."""
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"the input has no column {name!r}.{hint} It has: {', '.join(columns)}"
