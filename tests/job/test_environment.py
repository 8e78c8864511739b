"""`${NAME}` in the values of a job file."""

from collections.abc import Callable

import pytest

from batchgen.job.spec import Job

LoadText = Callable[..., Job]
MistakesIn = Callable[..., list[str]]


def prompt_of(load_text: LoadText, base: str, written: str) -> str | None:
    return load_text(base.replace("Once", written)).prompt.text


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("'a ${WORD} b'", "a hat b"),
        ("${WORD}${WORD}", "hathat"),
        ("'${NONE:-red} ${EMPTY:-blue} ${WORD:-green}'", "red blue hat"),
        ("'x${EMPTY}${NONE:-}'", "x"),
        ("'$${WORD} $WORD ${} ${ WORD }'", "${WORD} $WORD ${} ${ WORD }"),
        ("'costs ${{ price }}'", "costs ${{ price }}"),
        ("'${MEAN}'", "a: [b] # c ${WORD}"),
        ("|\n    ${WORD}\n    {{ text }}", "hat\n{{ text }}\n"),
    ],
)
def test_values_are_put_in_once(
    load_text: LoadText, base: str, monkeypatch: pytest.MonkeyPatch, written: str, read: str
) -> None:
    monkeypatch.setenv("WORD", "hat")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("MEAN", "a: [b] # c ${WORD}")
    monkeypatch.delenv("NONE", raising=False)
    assert prompt_of(load_text, base, written) == read


def test_without_quotes_a_number_is_a_number(
    load_text: LoadText, mistakes_in: MistakesIn, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENS", "8")
    job = load_text(f"{base}name: '${{TOKENS}}'\ngenerate:\n  max_tokens: ${{TOKENS}}\n")
    assert (job.name, job.generate.max_tokens) == ("8", 8)
    (mistake,) = mistakes_in(f"{base}generate:\n  max_tokens: '${{TOKENS}}'\n")
    assert mistake.endswith("write 8 without quotes")


def test_a_variable_that_is_not_set_names_its_line(
    mistakes_in: MistakesIn, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NONE", raising=False)
    (mistake,) = mistakes_in(base.replace("path: out", "path: s3://${NONE}/out"))
    assert mistake == (
        "job.yaml:8: output.path: the environment has no NONE; "
        "set it, write ${NONE:-default}, or $${NONE} for the text itself"
    )


def test_names_of_fields_are_left_alone(mistakes_in: MistakesIn, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "name")
    (mistake,) = mistakes_in(f"{base}${{WORD}}: a\n")
    assert mistake.startswith("job.yaml:9: ${WORD}: unknown field; ")
