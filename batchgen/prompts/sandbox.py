"""A Jinja sandbox that also bounds time and memory, so that anybody's template can be rendered in process."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import TemplateError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from batchgen.prompts.budget import Budget, TemplateLimits
from batchgen.prompts.guards import check_copy, check_operator, format_spec_size, guarded_arguments, guarded_filter

RENDER_ERRORS = (
    TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""All that a template can raise. Anything else is a fault of this program."""


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text of `value`, with no HTML escapes: the filter that chat templates expect."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _CountingCodeGenerator(CodeGenerator):
    """Compiles templates so that every pass through a block, and every text that is put together, is charged."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        body = list(nodes_)
        outputs = [child for node in body if isinstance(node, nodes.Output) for child in node.nodes]
        literal_chars = sum(len(child.data) for child in outputs if isinstance(child, nodes.TemplateData))
        self.writeline(f"environment.tick({literal_chars})")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802 - the name that Jinja looks for
        if node.test is not None:  # `for x in y if z` walks on without a pass through the block
            node.test = nodes.And(nodes.EnvironmentAttribute("ticked"), node.test)
        super().visit_For(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.to_slice(")
        self.visit(node.node, frame)
        self.write(")[")
        self.visit(node.arg, frame)
        self.write("]")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _BoundedFormatter(SandboxedFormatter):
    """`str.format` without private attributes, and with its fields charged."""

    def __init__(self, env: "BoundedEnvironment") -> None:
        super().__init__(env)
        self._budget = env.budget
        self._size = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._size += format_spec_size(format_spec) + self._budget.measure(value)
        self._budget.grow(self._size)
        return super().format_field(value, format_spec)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, plus a budget for each rendering. For one thread: a rendering's account lives here."""

    code_generator_class = _CountingCodeGenerator
    intercepted_binops = frozenset(["+", "*", "**", "%", "//", "/"])

    def __init__(self, limits: TemplateLimits, **options: Any) -> None:
        # Constant folding would run filters while compiling, where no rendering pays for them.
        super().__init__(optimized=False, cache_size=0, **options)
        self.limits = limits
        self.budget = Budget(limits)
        self.finalize = self.put
        self.globals.pop("lipsum")
        self.filters["tojson"] = tojson
        for name in ("urlize", "xmlattr"):  # HTML's, and costly
            self.filters.pop(name)
        self.filters.update({name: guarded_filter(name, f, lambda: self.budget) for name, f in self.filters.items()})

    def render(self, source: Any, variables: Mapping[str, Any]) -> str:
        """Render a compiled template on a fresh budget. Raises one of RENDER_ERRORS."""
        self.budget = Budget(self.limits)
        text: str = source.render(variables)
        return text

    def tick(self, literal_chars: int) -> None:
        """One pass through a block that puts out this much text of its own."""
        self.budget.step()
        self.budget.put(literal_chars)

    @property
    def ticked(self) -> bool:
        """True, for a step's price: a condition that compiled templates can read."""
        self.budget.step()
        return True

    @pass_context
    def put(self, context: Context, value: Any) -> Any:
        """What `{{ value }}` puts out; charged."""
        self.budget.put(len(value) if type(value) is str else self.budget.measure(value))
        return value

    def to_slice(self, value: Any) -> Any:
        """A value that is about to be sliced; charged as if all of it were taken."""
        check_copy(self.budget, value)
        return value

    def join_texts(self, values: tuple[Any, ...]) -> str:
        """The operator `~`."""
        self.budget.grow(sum(len(v) if type(v) is str else self.budget.measure(v) for v in values))
        return "".join(map(str, values))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of `intercepted_binops`."""
        check_operator(self.budget, operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Any call in a template."""
        args = guarded_arguments(self.budget, obj, args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """`str.format` and `str.format_map`, sandboxed and charged."""
        wrapper = super().wrap_str_format(value)
        if wrapper is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            form, formatter = value.__self__, _BoundedFormatter(self)
            self.budget.grow(len(form))
            is_map = value.__name__ == "format_map"
            text: str = (
                formatter.vformat(form, (), *args, **kwargs) if is_map else formatter.vformat(form, args, kwargs)
            )
            return text

        return bounded
