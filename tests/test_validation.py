"""`batchgen validate`: what is found in a job without its model."""

import subprocess
import sys
from pathlib import Path

import pytest

from batchgen.errors import InputError, JobFileError
from batchgen.validation import load_checked, validate_files

JOB = """\
version: 1
model: owner/model
input:
  path: rows.jsonl
prompt:
  user: PROMPT
output:
  path: out
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"name": "Ann", "text": "a"}\n{"name": "Ben", "city": "Oslo"}\n')


def validated(prompt: str, *settings: str, check_input: bool = False) -> tuple[str, ...]:
    Path("job.yaml").write_text(JOB.replace("PROMPT", f"|-\n    {prompt}"))
    return load_checked("job.yaml", settings, check_input=check_input).absent


def mistakes_of(prompt: str, *settings: str, check_input: bool = False) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        validated(prompt, *settings, check_input=check_input)
    lines = str(caught.value).splitlines()
    return lines[1:] if len(lines) > 1 else lines


@pytest.mark.parametrize("prompt", ["{{ text", "{% if text %}a", "{{ text | nope }}", "{% endif %}"])
def test_a_template_that_is_none_names_its_line(prompt: str) -> None:
    (mistake,) = mistakes_of(prompt)
    assert mistake.startswith("job.yaml:6: prompt.user: ")


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__['os'].mkdir('made') }}",
        "{% include '/etc/hostname' %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 99999999999 }}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
    ],
)
def test_B08_a_template_that_reaches_out_or_never_ends_is_refused(prompt: str) -> None:
    (mistake,) = mistakes_of(prompt)
    assert mistake.startswith("job.yaml:6: prompt.user: ")
    assert not Path("made").exists()


@pytest.mark.parametrize("template", ["{{ messages", "{{ ''.__class__ }}", "{% include '/etc/hostname' %}", None])
def test_B08_a_chat_template_of_the_job_is_checked_too(template: str | None) -> None:
    if template is not None:
        Path("chat.jinja").write_text(template)
    (mistake,) = mistakes_of("{{ text }}", "prompt.chat_template=chat.jinja")
    assert mistake.startswith("--set: prompt.chat_template: ")
    assert "chat.jinja" in mistake


def test_a_good_chat_template_is_fine() -> None:
    Path("chat.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    assert validated("{{ text }}", "prompt.chat_template=chat.jinja") == ()


def test_B07_a_name_in_no_column_is_a_mistake_with_the_columns() -> None:
    (mistake,) = mistakes_of("Dear {{ nmae }}", check_input=True)
    assert mistake.startswith("job.yaml:6: prompt.user: the input has no column 'nmae'")
    assert "'name'" in mistake
    assert "city, name, text" in mistake


def test_B07_a_column_that_some_rows_lack_is_no_mistake() -> None:
    assert validated("{{ name }} of {{ city }}, {{ zip | default('?') }}", check_input=True) == ()


def test_columns_are_looked_for_wherever_the_job_names_them() -> None:
    settings = ["prompt={messages: talk, tools: tols}", "output.columns=[name, id]"]
    settings.append("limits.overlong={truncate: {field: txet}}")
    fields = [mistake.split(": ")[1] for mistake in mistakes_of("-", *settings, check_input=True)]
    assert fields == ["prompt.messages", "prompt.tools", "limits.overlong.truncate.field", "output.columns.1"]


def test_messages_of_the_job_file_are_templates_too() -> None:
    (mistake,) = mistakes_of("-", "prompt={messages: [{role: user, content: '{{ a'}]}")
    assert mistake.startswith("--set: prompt.messages.0.content: ")


def test_all_mistakes_come_at_once() -> None:
    settings = ["prompt.system='{{ a'", "prompt.chat_template=no.jinja", "generate.n=0", "nmae=a"]
    mistakes = mistakes_of("{{ b", *settings)
    fields = [mistake.split(": ")[1] for mistake in mistakes]
    assert fields == ["generate.n", "nmae", "prompt.system", "prompt.user", "prompt.chat_template"]


def test_an_input_that_can_not_be_read_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"no\.jsonl"):
        validated("{{ text }}", "input.path=no.jsonl", check_input=True)


def test_a_job_may_be_checked_far_from_its_model_and_data(tmp_path: Path) -> None:
    absent = validated("{{ text }}", "input.path=[no.jsonl, '*.csv', rows.jsonl]", "model=./m.gguf", "tokenizer=gpt2")
    assert absent == (f"{tmp_path}/m.gguf", f"{tmp_path}/no.jsonl")


def test_mistakes_of_several_files_come_together() -> None:
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text(JOB.replace("PROMPT", "'{{ text'"))
    Path("c.yaml").write_text(JOB)
    with pytest.raises(JobFileError) as caught:
        validate_files(["a.yaml", "b.yaml", "c.yaml"])
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == ["a.yaml", "b.yaml"]


def test_validate_loads_neither_torch_nor_pyarrow() -> None:
    Path("job.yaml").write_text(JOB)
    code = "import sys\nfrom batchgen.validation import validate_files\nvalidate_files(['job.yaml'])\n"
    code += "print(sorted({'torch', 'transformers', 'pyarrow', 'numpy', 'fsspec', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
