"""What the messages say: the line, the field, what is wrong, and what to write instead."""

from collections.abc import Callable

import pytest

from batchgen.errors import JobFileError
from batchgen.job.fields import walk
from batchgen.job.spec import Job

LoadText = Callable[..., Job]
MistakesIn = Callable[..., list[str]]

ODD_VALUES = """\
5
-1
1.5
true
no
~
''
word
[]
[1]
[a, b]
[[a]]
{}
{a: 1}
{a:
{truncate: 5}
{truncate: {field: 5}}
[{}]
[null]
.nan
1e400
99999999999999999999999
'0.7'
2026-01-01
{1: 2}
{[a]: b}
{{ a }}
!!str 5
!x 5
all
'²'
"\\ud800"
"\\0"
*a
|
'
""".splitlines()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "max_tokens: '8'",
            'max_tokens: the text "8" where a whole number of 1 or more belongs; write 8 without quotes',
        ),
        (
            "temperature: '0.7'",
            'temperature: the text "0.7" where a number of 0 or more belongs; write 0.7 without quotes',
        ),
        ("temperature: warm", 'temperature: the text "warm"; write a number of 0 or more'),
        ("temperature: -1", "temperature: the number -1; write a number of 0 or more"),
        ("temperature: .nan", "temperature: the number nan; write a number of 0 or more"),
        ("temperature: .inf", "temperature: the number inf; write a number of 0 or more"),
        ("temperature: 1e999", "temperature: the number inf; write a number of 0 or more"),
        ("temperature: true", "temperature: true; write a number of 0 or more"),
        ("temperature: [1]", "temperature: a list; write a number of 0 or more"),
        ("temperature:", "temperature: nothing; write a number of 0 or more"),
        ("top_k: -2", "top_k: the number -2; write a whole number of -1 or more"),
        ("top_p: 0", "top_p: the number 0; write a number above 0 and at most 1"),
        ("top_p: 1.5", "top_p: the number 1.5; write a number above 0 and at most 1"),
        ("min_p: 2", "min_p: the number 2; write a number from 0 to 1"),
        ("max_tokens: 8.0", "max_tokens: the number 8.0 where a whole number of 1 or more belongs; write 8"),
        ("max_tokens: 8.5", "max_tokens: the number 8.5; write a whole number of 1 or more"),
        ("max_tokens: 0", "max_tokens: the number 0; write a whole number of 1 or more"),
        ("seed: 9223372036854775808", None),
        ("ignore_eos: no", 'ignore_eos: the text "no" where true or false belongs; write false'),
        ("ignore_eos: On", 'ignore_eos: the text "On" where true or false belongs; write true'),
        ("ignore_eos: 1", "ignore_eos: the number 1; write true or false"),
        ("stop: 5", 'stop: the number 5 where text or a list of texts belongs; write it in quotes: "5"'),
        ("stop: ''", "stop: an empty text; write something, or leave the field out"),
        ("stop: [a, '']", "stop.1: an empty text; write something, or leave the field out"),
        ("stop: {a: 1}", "stop: a mapping; write text or a list of texts"),
        ("stop: [END, true]", 'stop.1: true where text belongs; write it in quotes: "true"'),
        ("stop_token_ids: [1, x]", 'stop_token_ids.1: the text "x"; write a whole number of 0 or more'),
        ("stop_token_ids: [-1]", "stop_token_ids.0: the number -1; write a whole number of 0 or more"),
        ("logit_bias: {a: 1}", "logit_bias: 'a' is no token id; write whole numbers, such as `{50256: -100}`"),
        ("logit_bias: {7: x}", None),
        ("choices: [a]", "choices: a list of 1; write 2 or more"),
        ("choices: [a, a]", "choices: has 'a' twice; keep each choice once"),
        ("choices: [a, '']", "choices: an empty text is no choice; write at least one character for each"),
        ("choices: [1, 2]", 'choices.0: the number 1 where text belongs; write it in quotes: "1"'),
        ("n: 4", "n: 4 answers at temperature 0 are all the same; raise temperature or leave n out"),
        ("min_tokens: 300", "min_tokens: 300 is more than max_tokens (256); lower it"),
    ],
)
def test_C09_a_generate_field_out_of_range_names_its_line_and_what_to_write(
    mistakes_in: MistakesIn, base: str, line: str, message: str | None
) -> None:
    mistakes = mistakes_in(
        f"{base}generate:\n  seed: 7\n  {line}\n" if "seed" not in line else f"{base}generate:\n\n  {line}\n"
    )
    first = mistakes[0].removeprefix("job.yaml:11: generate.")
    assert first != mistakes[0]
    assert first == message or (message is None and "; write a" in first)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("generate: 5", "generate: the number 5; write a mapping with choices, "),
        (
            "generate: {temprature: 1}",
            "generate.temprature: unknown field; did you mean temperature? generate has the fields ",
        ),
        ("generate: {qqq: 1}", "generate.qqq: unknown field; generate has the fields choices, "),
        (
            "genrate: {n: 1}",
            "genrate: unknown field; did you mean generate? a job has the fields version, name, model, ",
        ),
        (
            "limits: {overlong: trunc}",
            'limits.overlong: the text "trunc"; write error or skip or a mapping with truncate',
        ),
        (
            "limits: {overlong: {truncate: {feild: a}}}",
            "limits.overlong.truncate.field: missing; write `field:` with text. ",
        ),
        (
            "limits: {overlong: {truncate: {field: a, keep: 5}}}",
            "limits.overlong.truncate.keep: the number 5; write head or ",
        ),
        ("limits: {failed_rows: 1.5%%}", "limits.failed_rows: '1.5%%' is no share; write 1% or a number of rows"),
        ("limits: {failed_rows: 101%}", "limits.failed_rows: '101%' is no share; write 1% or a number of rows"),
        ("limits: {failed_rows: -1}", "limits.failed_rows: the number -1"),
        ("limits: {runtime: 6hours}", "limits.runtime: '6hours' is no duration; write 30s, 90m, 6h or 2d"),
        ("limits: {runtime: nan}", "limits.runtime: 'nan' is no duration; write 30s, 90m, 6h or 2d"),
        ("engine: {kv_memory: 4G}", "engine.kv_memory: '4G' is no size; write 4GiB or 500MB"),
        ("engine: {kv_memory: 0GiB}", "engine.kv_memory: '0GiB' is no size; write 4GiB or 500MB"),
        (
            "engine: {dtype: float16}",
            'engine.dtype: the text "float16" where auto, bfloat16 or float32 belongs; did you mean ',
        ),
        ("version: '1'", 'version: the text "1" where 1 belongs; write 1 without quotes'),
        ("version: 2", "version: the number 2; write 1"),
        ("plan: {window: 0}", "plan.window: the number 0; write all or a whole number of 1 or more or text"),
        ("plan: {window: 5 rows}", "plan.window: '5 rows' is a text, and a number of rows is none; write 5"),
        ("plan: {window: '5'}", "plan.window: '5' is a text, and a number of rows is none; write 5"),
        ("name: 5", 'name: the number 5 where text belongs; write it in quotes: "5"'),
        ("tokenizer: ''", "tokenizer: an empty text; write something, or leave the field out"),
    ],
)
def test_a_wrong_section_names_its_line_and_what_to_write(
    mistakes_in: MistakesIn, base: str, section: str, message: str
) -> None:
    text = base.replace("version: 1\n", "\n") if section.startswith("version") else base
    mistakes = mistakes_in(f"{text}{section}\n")
    assert any(mistake.startswith(f"job.yaml:9: {message}") for mistake in mistakes), mistakes


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{text: a, user: b}", "user: text and user exclude one another; keep one of text, user and messages"),
        (
            "{user: a, messages: b}",
            "messages: user and messages exclude one another; keep one of text, user and messages",
        ),
        ("{text: a, system: b}", "system: belongs to a chat prompt; write `user: ...` instead of `text: ...`"),
        ("{messages: [{role: user, content: a}], system: b}", "system: messages are a list here; "),
    ],
)
def test_a_prompt_is_of_one_kind(mistakes_in: MistakesIn, base: str, prompt: str, message: str) -> None:
    (mistake,) = mistakes_in(base.replace("\n  text: Once", f" {prompt}"))
    assert mistake.startswith(f"job.yaml:5: prompt.{message}")


@pytest.mark.parametrize("prompt", ["prompt: {}\n", "prompt: {system: You label.}\n", ""])
def test_a_prompt_says_something(mistakes_in: MistakesIn, base: str, prompt: str) -> None:
    (mistake,) = mistakes_in(base.replace("prompt:\n  text: Once\n", prompt))
    assert mistake.endswith(
        "prompt: says nothing to send; add one of `user: ...`, `text: ...` or `messages: ...` under it"
    )


def test_missing_fields_are_told_with_their_meaning(mistakes_in: MistakesIn) -> None:
    assert mistakes_in("version: 1\ninput:\n  format: csv\n") == [
        "job.yaml:1: model: missing; write `model:` with text. A hub id, a folder, a .gguf file, or an s3:// folder.",
        "job.yaml:1: output: missing; write `output:` with a mapping with path, columns, part_rows, format, "
        "compression.",
        "job.yaml:2: input.path: missing; write `path:` with text or a list of texts. File, folder, pattern or a list "
        "of them: local, s3:// or any fsspec URL; a dataset with `format: datasets`.",
    ]


def test_all_mistakes_come_at_once_in_the_order_of_the_file(mistakes_in: MistakesIn, base: str) -> None:
    text = base.replace("text: Once", "text: Once\n  user: Twice\n  sytem: no") + (
        "generate:\n  min_tokens: 300\n  temprature: 1\n  max_tokens: '8'\n"
        "  seed: ${BATCHGEN_NOT_SET}\n  top_k: 2\n  top_k: 3\n"
    )
    mistakes = mistakes_in(text, "generate.top_p=7", "engine.dvice=cpu")
    assert [mistake.split(": ")[:2] for mistake in mistakes] == [
        ["--set", "generate.top_p"],
        ["--set", "engine.dvice"],
        ["job.yaml:7", "prompt.user"],
        ["job.yaml:8", "prompt.sytem"],
        ["job.yaml:12", "generate.min_tokens"],
        ["job.yaml:13", "generate.temprature"],
        ["job.yaml:14", "generate.max_tokens"],
        ["job.yaml:15", "generate.seed"],
        ["job.yaml:17", "generate.top_k"],
    ]
    assert all(";" in mistake or "did you mean" in mistake for mistake in mistakes)


def test_a_mistake_is_told_once(mistakes_in: MistakesIn, base: str) -> None:
    """A value that is wrong by itself does not also count as missing."""
    (mistake,) = mistakes_in(base.replace("owner/model", "${BATCHGEN_NOT_SET}"))
    assert mistake.startswith("job.yaml:2: model: the environment has no BATCHGEN_NOT_SET; ")


def test_choices_and_samples_exclude_one_another(mistakes_in: MistakesIn, base: str) -> None:
    (mistake,) = mistakes_in(f"{base}generate:\n  choices: [a, b]\n  n: 4\n")
    assert mistake.startswith("job.yaml:11: generate.n: is for sampled answers")


@pytest.mark.parametrize("field", [".".join(path) for path, _ in walk()])
def test_any_value_anywhere_is_taken_or_told_with_advice(load_text: LoadText, base: str, field: str) -> None:
    for value in ODD_VALUES:
        try:
            load_text(base, f"{field}={value}")
        except JobFileError as error:
            last = str(error).splitlines()[-1]
            assert last.startswith((f"--set: {field}", "job.yaml:5: prompt: ")), (value, last)
            assert "; " in last or "did you mean" in last, (value, last)
