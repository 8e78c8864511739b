"""`--set field.path=value`."""

from collections.abc import Callable

import pytest

from batchgen.job.spec import Job

LoadText = Callable[..., Job]
MistakesIn = Callable[..., list[str]]


def test_values_are_yaml(load_text: LoadText, base: str) -> None:
    job = load_text(
        base,
        "generate.max_tokens=8",
        "generate.stop=[a, b]",
        "generate.min_p=1e-3",
        "limits.overlong={truncate: {field: text}}",
        "name='7'",
        "prompt.text=a=b",
    )
    assert job.generate.max_tokens == 8
    assert job.generate.stop == ["a", "b"]
    assert job.generate.min_p == 1e-3
    assert not isinstance(job.limits.overlong, str)
    assert job.limits.overlong.truncate.field == "text"
    assert (job.name, job.prompt.text) == ("7", "a=b")


def test_the_last_one_wins_and_null_takes_a_value_away(load_text: LoadText, base: str) -> None:
    job = load_text(f"{base}name: a\n", "name=b", "name=null", "generate.max_tokens=")
    assert job.name is None
    assert job.generate.max_tokens is None


def test_an_index_leads_into_a_list(load_text: LoadText, base: str) -> None:
    text = base.replace("text: Once", "messages: [{role: system, content: a}, {role: user, content: b}]")
    job = load_text(text, "prompt.messages.1.content=c", "generate.logit_bias.7=-1")
    assert isinstance(job.prompt.messages, list)
    assert [message["content"] for message in job.prompt.messages] == ["a", "c"]
    assert job.generate.logit_bias == {7: -1}


def test_it_repairs_what_the_file_has_wrong(load_text: LoadText, base: str) -> None:
    assert load_text(f"{base}generate: {{top_k: many}}\n", "generate.top_k=2").generate.top_k == 2


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "generate.max_token=8",
            "generate.max_token: unknown field; did you mean max_tokens? generate has the fields ",
        ),
        ("generat.n=8", "generat: unknown field; did you mean generate? a job has the fields "),
        ("generate.n=0", "generate.n: the number 0; write a whole number of 1 or more"),
        ("generate.n", "'generate.n' sets nothing; write --set generate.max_tokens=8"),
        ("=8", "'=8' sets nothing; write --set generate.max_tokens=8"),
        ("generate..n=8", "'generate..n=8' sets nothing; write --set generate.max_tokens=8"),
        ("model.name=8", "model.name: model is a single value; set it as a whole"),
        ("input.path.2=c", "input.path.2: input.path has the indexes 0 to 1"),
        ("input.path.x=c", "input.path.x: input.path has the indexes 0 to 1"),
        ("input.path.1=5", 'input.path.1: the number 5 where text belongs; write it in quotes: "5"'),
        ("prompt.text={{ a }} b", "prompt.text: text after the end of a value; put the whole value in quotes"),
        (
            "prompt.text={{ a }}",
            "prompt.text: a mapping in place of a name; put a template that begins with {{ in quotes",
        ),
        ("generate={top_k: 2, top_k: 3}", "generate.top_k: given twice, "),
    ],
)
def test_a_wrong_setting_is_a_mistake(mistakes_in: MistakesIn, base: str, setting: str, message: str) -> None:
    (mistake,) = mistakes_in(base.replace("rows.jsonl", "[a.jsonl, b.jsonl]"), setting)
    assert mistake.startswith(f"--set: {message}")


def test_the_environment_is_for_the_file_only(load_text: LoadText, base: str) -> None:
    assert load_text(base, "prompt.text='${HOME} $${HOME}'").prompt.text == "${HOME} $${HOME}"
