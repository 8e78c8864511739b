"""Constant text of a template that stands behind what changes from row to row, where no two rows can share it."""

from typing import NamedTuple

from jinja2 import Environment, TemplateSyntaxError

_OPENING = frozenset({"for", "if", "filter", "call", "macro", "block", "autoescape", "with"})


class LateText(NamedTuple):
    """The longest such text, which of the templates has it, and the templates with it where it could be shared."""

    text: str
    source: int
    moved: tuple[str, ...]


def late_text(*sources: str) -> LateText | None:
    """The longest constant text behind the first expression, outside of blocks; None when there is none.

    `sources` are templates that are put out one after the other: the text may stand in a later one than the expression.
    Moved, it is at the beginning of the one that has the expression.
    """
    pieces = [(index, *piece) for index, source in enumerate(sources) for piece in _pieces(source)]
    first = next((place for place, (_, is_constant, _) in enumerate(pieces) if not is_constant), len(pieces))
    late = [place for place in range(first + 1, len(pieces)) if _can_move(pieces, place, first)]
    if not late:
        return None
    longest = max(late, key=lambda place: len(pieces[place][2]))
    index, _, text = pieces[longest]
    parts = [""] * len(sources)
    for place, (which, _, part) in enumerate(pieces):
        if place != longest:
            parts[which] += part
        elif any(other == index for other, _, _ in pieces[place + 1 :]):
            parts[which] += text[: len(text) - len(text.lstrip())]
    target = pieces[first][0]
    parts[target] = f"{text.strip()}\n\n{parts[target]}"
    return LateText(text.strip(), index, tuple(parts))


def _can_move(pieces: list[tuple[int, bool, str]], place: int, first: int) -> bool:
    """Whether a piece is constant text, and its template says something without it."""
    index, is_constant, text = pieces[place]
    others = [part for other, (which, _, part) in enumerate(pieces) if which == index and other != place]
    return is_constant and bool(text.strip()) and (index == pieces[first][0] or bool("".join(others).strip()))


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
