"""D03: what a resumed job is compared by."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.job.fields import walk
from batchgen.job.fingerprint import EXCLUDED, differences, fingerprint, sources_of_values
from batchgen.job.load import load_job
from batchgen.job.spec import Job

LoadText = Callable[..., Job]

# One setting for every field of the job file that the base job does not have as it is.
DECIDES = """\
model=other/model
tokenizer=other/tokenizer
input.path=others.jsonl
input.format=csv
input.limit=5
input.split=test
input.decode_binary=true
input.max_line_bytes=4096
prompt.text=Twice
prompt={system: Now, user: Once}
prompt={user: Once}
prompt={messages: [{role: user, content: Once}]}
prompt={user: Once, tools: tools}
prompt.assistant=Yes
prompt={user: Once, chat_template: chat.jinja}
prompt.chat_template_args={think: false}
prompt.special_tokens=parse
generate.choices=[a, b]
generate={choices: [a, b], choice_logprobs: true}
generate={choices: [a, b], calibrate: batch}
generate={choices: [a, b], length_normalize: true}
generate.score=Once
generate={n: 2, temperature: 1, vote: majority}
generate={max_tokens: "{{ budget }}"}
generate.max_tokens=8
generate.min_tokens=8
generate.temperature=0.5
generate.top_k=5
generate.top_p=0.5
generate.min_p=0.5
generate.repetition_penalty=1.5
generate.presence_penalty=0.5
generate.frequency_penalty=0.5
generate.logit_bias={7: 1}
generate.stop=END
generate.stop_token_ids=[7]
generate.include_stop=true
generate.ignore_eos=true
generate.skip_special_tokens=false
generate.seed=1
generate.n=2
generate.logprobs=2
generate.expect=Yes
generate.retry={length: 1}
generate.reasoning=true
limits.overlong=skip
limits.overlong={truncate: {field: text}}
limits.template_seconds=1
limits.template_chars=1000
generate.json_schema={type: integer}
generate.regex="a+"
generate.grammar="start: /a/"
output.columns=[id]
output.format=jsonl
engine.dtype=float32
engine.batch_invariant=true
engine.max_length=512
""".splitlines()

DOES_NOT = """\
name=other
input.on_bad_row=stop
limits.failed_rows=5%
limits.runtime=6h
limits.stall=1h
plan.order=input
plan.window=all
output.path=elsewhere
output.part_rows=7
output.compression=none
checkpoint.every=1s
storage.endpoint=http://127.0.0.1:9000
storage.region=eu-west-1
storage.profile=work
storage.anonymous=true
engine.device=cpu
engine.page_size=16
engine.kv_memory=1GiB
engine.max_batch_rows=1
engine.max_batch_tokens=99
engine.prefix_caching=false
engine.threads=1
engine.prompt_workers=1
""".splitlines()


def test_D03_every_field_is_compared_or_listed_as_harmless() -> None:
    known = {".".join(path) for path, _ in walk()}
    assert known >= EXCLUDED
    tried = {setting.split("=")[0] for setting in DECIDES}
    tried |= {"prompt.system", "prompt.user", "prompt.messages", "prompt.tools", "prompt.chat_template"} - {"prompt"}
    tried |= {f"generate.{name}" for name in ("choice_logprobs", "calibrate", "length_normalize", "templates", "vote")}
    assert tried - {"prompt", "generate"} == known - EXCLUDED
    assert {setting.split("=")[0] for setting in DOES_NOT} | {"version"} == EXCLUDED


@pytest.mark.parametrize("setting", DECIDES)
def test_D03_a_field_that_decides_the_output_is_a_difference(load_text: LoadText, base: str, setting: str) -> None:
    base += "generate:\n  temperature: 1\n"
    before = fingerprint(load_text(base))
    Path("chat.jinja").write_text("{{ messages }}")
    found = differences(before, fingerprint(load_text(base, setting)))
    assert any(difference.field.startswith(setting.split("=")[0]) for difference in found)
    assert all(difference.old != difference.new for difference in found)


@pytest.mark.parametrize("setting", DOES_NOT)
def test_D03_a_field_that_does_not_is_none(load_text: LoadText, base: str, setting: str) -> None:
    assert differences(fingerprint(load_text(base)), fingerprint(load_text(base, setting))) == []


def test_D03_a_difference_names_the_field_and_both_values(load_text: LoadText, base: str) -> None:
    old = fingerprint(load_text(base))
    new = fingerprint(load_text(base, "generate.temperature=0.5", "generate.stop=[a]"))
    assert differences(old, new) == [("generate.temperature", "0.0", "0.5"), ("generate.stop", "[]", '["a"]')]


def test_D03_a_field_that_an_older_version_did_not_have_is_a_difference() -> None:
    assert differences({"a": "1"}, {"a": "1", "b": "2"}) == [("b", "(none)", "2")]
    assert differences({"a": "1", "b": "2"}, {"a": "1"}) == [("b", "2", "(none)")]


def test_D03_a_chat_template_counts_by_its_content(load_text: LoadText, base: str) -> None:
    text = base.replace("text: Once", "user: Once\n  chat_template: ${TEMPLATE:-a.jinja}")
    job = load_text(text)
    Path("a.jinja").write_text("{{ messages }}")
    old = fingerprint(job)
    Path("a.jinja").rename("b.jinja")
    assert fingerprint(load_text(text, "prompt.chat_template=b.jinja")) == old
    Path("a.jinja").write_text("{{ messages }} ")
    (difference,) = differences(old, fingerprint(job))
    assert difference.field == "prompt.chat_template"


def test_D03_the_same_values_written_otherwise_are_the_same(load_text: LoadText, base: str) -> None:
    lists = "generate: {stop: END, temperature: 1, logit_bias: {7: 1, 8: 2}}\n"
    words = "generate: {logit_bias: {8: 2.0, 7: 1}, temperature: 1.0, stop: [END], seed: 0}\n"
    assert fingerprint(load_text(base + lists)) == fingerprint(load_text(base + words))


def test_D03_a_folder_may_move_with_everything_in_it(tmp_path: Path, base: str) -> None:
    old = tmp_path / "old"
    old.mkdir()
    (old / "job.yaml").write_text(base.replace("owner/model", "./model"))
    before = fingerprint(load_job(old / "job.yaml"))
    shutil.move(old, tmp_path / "new")
    assert fingerprint(load_job(tmp_path / "new" / "job.yaml")) == before


def test_C09_the_source_of_each_generate_value_is_known(load_text: LoadText, base: str) -> None:
    sources = sources_of_values(
        load_text(f"{base}generate: {{seed: 0, stop: [a]}}\n", "generate.top_k=2", "generate.stop.0=b")
    )
    assert {name for name, source in sources.items() if source == "--set"} == {"top_k", "stop"}
    assert {name for name, source in sources.items() if source == "job file"} == {"seed"}
    assert sources["temperature"] == "default"
    assert sources_of_values(load_text(base, "generate={top_k: 2}"))["top_k"] == "--set"
