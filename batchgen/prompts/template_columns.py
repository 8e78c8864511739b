"""Which columns a template reads, told from its syntax alone."""

from typing import NamedTuple

from jinja2 import nodes
from jinja2.meta import find_undeclared_variables

ROW = "row"  # `row['Review text']` reaches columns whose names are no names in Jinja

_ASKS = ("default", "d", "defined", "undefined", "none")


class TemplateColumns(NamedTuple):
    """Columns by how they are read. `by_name`: as `{{ name }}`; `by_row`: as `{{ row['name'] }}` or `{{ row.name }}`.

    `optional` ones may be absent: each use has a default or asks whether the column is there. `only` is the column of a
    template that is nothing else.
    """

    by_name: frozenset[str]
    by_row: frozenset[str]
    optional: frozenset[str]
    only: str | None

    @property
    def all(self) -> frozenset[str]:
        """Every column that is read."""
        return self.by_name | self.by_row


def columns_of(tree: nodes.Template, functions: frozenset[str]) -> TemplateColumns:
    """The columns of a parsed template; `functions` are the names that Jinja itself knows."""
    names = list(tree.find_all(nodes.Name))
    own = {node.name for node in names if node.ctx != "load"}
    called = {id(node.node) for node in tree.find_all(nodes.Call)}
    undeclared = find_undeclared_variables(tree)  # leaves out what Jinja knows, though a column may be called so
    undeclared |= {node.name for node in names if node.name in functions - own and id(node) not in called}
    uses: list[tuple[nodes.Expr, str, bool]] = []  # node, column, whether it is reached through `row`
    hidden: set[int] = set()
    if ROW in undeclared:
        items: list[nodes.Getitem | nodes.Getattr] = [*tree.find_all(nodes.Getitem), *tree.find_all(nodes.Getattr)]
        for item in items:
            name = _row_item(item)
            if name is not None:
                uses.append((item, name, True))
                hidden.add(id(item.node))
    for node in names:
        is_read = node.ctx == "load" and id(node) not in hidden and not (node.name in functions and id(node) in called)
        if node.name in undeclared and is_read:
            uses.append((node, node.name, False))
    asked = {id(node.node) for node in tree.find_all((nodes.Filter, nodes.Test)) if node.name in _ASKS}
    needed = {name for node, name, _ in uses if id(node) not in asked}
    only = next((name for node, name, _ in uses if tree.body == [nodes.Output([node])]), None)
    return TemplateColumns(
        frozenset(name for _, name, by_row in uses if not by_row),
        frozenset(name for _, name, by_row in uses if by_row),
        frozenset({name for _, name, _ in uses} - needed),
        only,
    )


def _row_item(node: nodes.Getitem | nodes.Getattr) -> str | None:
    """The column of `row['name']` and `row.name`."""
    if not isinstance(node.node, nodes.Name) or node.node.name != ROW:
        return None
    if isinstance(node, nodes.Getattr):
        return node.attr
    return node.arg.value if isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str) else None
