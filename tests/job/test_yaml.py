"""The file as YAML: what a value without quotes means, and text that is no YAML."""

from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.errors import JobFileError
from batchgen.job.load import load_job
from batchgen.job.spec import Job

LoadText = Callable[..., Job]
MistakesIn = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("written", "value"),
    [("1e-3", 1e-3), ("1E-3", 1e-3), ("1.", 1.0), (".5", 0.5), ("+2", 2.0), ("0", 0.0), ("010", 10.0), ("0x10", 16.0)],
)
def test_numbers_are_numbers(load_text: LoadText, base: str, written: str, value: float) -> None:
    assert load_text(f"{base}generate: {{temperature: {written}}}\n").generate.temperature == value


def test_words_that_yaml_1_1_takes_for_something_else_are_text(load_text: LoadText, base: str) -> None:
    words = ["no", "yes", "on", "off", "y", "n", "1:30", "2026-01-01", "1_000", "nan", "0b1"]
    job = load_text(f"{base}generate: {{choices: [{', '.join(words)}]}}\n")
    assert job.generate.choices == words


def test_quotes_and_tags_make_text(load_text: LoadText, base: str) -> None:
    job = load_text(f"{base}generate: {{choices: ['1', \"true\", !!str 2, 'null']}}\n")
    assert job.generate.choices == ["1", "true", "2", "null"]


@pytest.mark.parametrize("mark", [b"\xef\xbb\xbf", b"\xef\xbb\xbf---\n", b"# a job\r\n---\r\n"])
def test_byte_order_marks_comments_and_crlf_are_fine(load_text: LoadText, base: str, mark: bytes) -> None:
    assert load_text(mark + base.replace("\n", "\r\n").encode()).model == "owner/model"


def test_anchors_are_fine(load_text: LoadText, base: str) -> None:
    job = load_text(f"{base}name: &n same\ntokenizer: *n\n")
    assert job.tokenizer == job.name == "same"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: the file is empty; start with `version: 1`"),
        ("# nothing\n", "1: the file is empty; start with `version: 1`"),
        ("- version: 1\n", "1: this is no mapping of fields; start with `version: 1`"),
        ("version\n", "1: this is no mapping of fields; start with `version: 1`"),
        ("version: 1\ninput:\n\tpath: a\n", "3: a tab; indent with spaces"),
        ("version: 1\n---\nversion: 1\n", "2: a second document (---) in the file; write one job per file"),
        ("prompt:\n  user: Review: {{ text }}\n", "2: a second `: ` in one value, or a line indented too far; put"),
        (
            "prompt:\n  user: {{ text }}\n",
            "2: prompt.user: a mapping in place of a name; put a template that begins with {{ in quotes",
        ),
        ("prompt:\n  user: {{ a }} and {{ b }}\n", "2: text after the end of a value; put the whole value in quotes"),
        ("prompt:\n  user: {% if a %}b{% endif %}\n", "2: a value can't begin with %; put the template in quotes"),
        ("prompt:\n  user: @all\n", "2: a value can't begin with @ or `; put the text in quotes"),
        ("prompt:\n  user: *all\n", "2: an alias (*name) without its anchor (&name); put text that begins with * in"),
        ("model: 'a\nname: b\n", "3: a quote that is never closed; close it"),
        ("generate:\n  choices: [a, b\n", "3: a bracket that is never closed; close it"),
        (
            "version: 1\nmodel\n",
            "3: a line that is no `field: value`; write a colon and a space after the field's name",
        ),
        (
            "input:\n  - a\n  path: b\n",
            "3: the indentation does not fit the lines above; align the fields of a section",
        ),
        ("version: 1\nname: a\x01b\n", "2: a control character (U+0001); remove it"),
        (b"version: 1\nname: \xff\xfe\n", "2: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("version: 1".encode("utf-16"), "1: byte 0xff is not UTF-8; save the file as UTF-8"),
        ("a: " + "[" * 5000, "1: brackets nested too deeply; flatten them"),
        ("a: &a [*a]\n", "1: values nested more than 50 deep; flatten them"),
        (
            "name: !!python/object:os.system x\n",
            "1: name: the tag tag:yaml.org,2002:python/object:os.system means nothing",
        ),
        ("name: !!int x\n", "1: name: "),
        ("version: 1\nversion: 1\n", "2: version: given twice, first in line 1; keep one of them"),
        (f"generate: {{seed: {'9' * 5000}}}\n", "1: generate.seed: "),
    ],
)
def test_text_that_is_no_job_names_the_line(mistakes_in: MistakesIn, text: str | bytes, message: str) -> None:
    mistakes = mistakes_in(text)
    assert any(mistake.startswith(f"job.yaml:{message}") for mistake in mistakes), mistakes


def test_aliases_of_aliases_end(mistakes_in: MistakesIn) -> None:
    layers = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    (mistake,) = mistakes_in("\n".join(["a0: &a0 x", *layers]))
    assert "more than 100,000 values" in mistake


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="there is no such file"):
        load_job(tmp_path / "no.yaml")
    with pytest.raises(JobFileError, match="can't be read"):
        load_job(tmp_path)
