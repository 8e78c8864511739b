"""Constant text of a template that stands behind what changes from row to row, where no two rows can share it."""

from typing import NamedTuple

from jinja2 import Environment, TemplateSyntaxError

_OPENING = frozenset({"for", "if", "filter", "call", "macro", "block", "autoescape", "with"})


class LateText(NamedTuple):
    """The longest such text, and the template with it at its beginning."""

    text: str
    moved: str


def late_text(source: str) -> LateText | None:
    """The longest constant text behind the first expression, outside of blocks; None when there is none."""
    pieces = _pieces(source)
    first = next((index for index, (is_constant, _) in enumerate(pieces) if not is_constant), len(pieces))
    late = [index for index, (is_constant, text) in enumerate(pieces) if is_constant and index > first and text.strip()]
    if not late:
        return None
    longest = max(late, key=lambda index: len(pieces[index][1]))
    text = pieces[longest][1]
    before = "".join(piece for _, piece in pieces[:longest])
    after = "".join(piece for _, piece in pieces[longest + 1 :])
    gap = text[: len(text) - len(text.lstrip())] if after else ""
    return LateText(text.strip(), f"{text.strip()}\n\n{before}{gap}{after}")


def _pieces(source: str) -> list[tuple[bool, str]]:
    """The template cut into constant text outside of blocks, and anything else. Joined, they make it again.

    But for white space that a `-` at a tag takes away.
    """
    pieces: list[tuple[bool, str]] = []
    depth = 0
    in_tag = False
    try:
        tokens = list(Environment(keep_trailing_newline=True).lex(source))
    except TemplateSyntaxError:
        return []
    for position, (_, kind, text) in enumerate(tokens):
        if kind == "block_begin":
            name = next((value for _, what, value in tokens[position:] if what == "name"), "")
            depth += (name in _OPENING) - name.startswith("end")
            in_tag = True
        depth += (kind == "raw_begin") - (kind == "raw_end")
        is_constant = kind == "data" and depth == 0 and not in_tag
        if kind == "block_end":
            in_tag = False
        if pieces and not is_constant and not pieces[-1][0]:
            pieces[-1] = (False, pieces[-1][1] + text)
        else:
            pieces.append((is_constant, text))
    return pieces
