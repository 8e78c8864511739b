"""Constant text behind what changes is found, and what stands in blocks is left alone."""

import pytest
from jinja2 import Environment

from batchgen.prompts.late_text import late_text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ x }} one two", "one two"),
        ("First. {{ x }} short {{ y }} the longest one {{ z }} end", "the longest one"),
        ("{{ x }}{% if y %} in a block {% endif %} behind", "behind"),
        ("{{ x }}{% for y in z %} in a loop {{ y }} {% endfor %}\n behind \n", "behind"),
        ("{% set name = x %}{{ name }} behind", "behind"),
        ("{{ x }}{% raw %} {{ no expression }} {% endraw %} behind", "behind"),
        ("{{ x }}{# a comment that is longer #} behind", "behind"),
    ],
)
def test_the_longest_text_behind_an_expression(source: str, text: str) -> None:
    late = late_text(source)
    assert late is not None
    assert late.text == text
    assert late.moved[0].startswith(f"{text}\n\n")
    values = {"x": "X", "y": "Y", "z": "Z"}
    before, after = (Environment().from_string(template).render(values) for template in (source, *late.moved))
    assert sorted(before.split()) == sorted(after.split()), "nothing is lost and nothing is added"


@pytest.mark.parametrize(
    "source", ["constant", "constant {{ x }}", "{{ x }} \n {{ y }}", "{% if x %}{{ x }} in{% endif %}", "{{ x", ""]
)
def test_nothing_to_move(source: str) -> None:
    assert late_text(source) is None


@pytest.mark.parametrize(
    ("sources", "index", "moved"),
    [
        (("You help {{ x }}.", "Label the text.\n{{ y }}"), 1, ("Label the text.\n\nYou help {{ x }}.", "\n{{ y }}")),
        (("Help {{ x }}", "Label it."), None, ()),
        (("Label.", "{{ x }} Say a word."), 1, ("Label.", "Say a word.\n\n{{ x }}")),
        (("{{ x }} long text here", "short {{ y }}"), 0, ("long text here\n\n{{ x }}", "short {{ y }}")),
    ],
)
def test_text_in_a_later_template(sources: tuple[str, ...], index: int | None, moved: tuple[str, ...]) -> None:
    late = late_text(*sources)
    if index is None:
        assert late is None, "a message that is nothing but constant text stays"
        return
    assert late is not None
    assert (late.source, tuple(part.strip() for part in late.moved)) == (index, tuple(part.strip() for part in moved))
