"""Which chat template a model folder has (B01)."""

import json

import pytest

from batchgen.data.rows import Row
from batchgen.errors import JobFileError
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt
from batchgen.prompts.builder import PromptBuilder, PromptRecipe


def chatml(letter):
    return (
        letter + ":{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )


NAMED_LIST = [{"name": "default", "template": chatml("D")}, {"name": "tool_use", "template": chatml("T")}]


def built_text(folder, **prompt):
    recipe = PromptRecipe(Prompt(**{"messages": "messages", **prompt}), Generate(), Limits(), str(folder), 512)
    result = PromptBuilder(recipe).build(Row(0, {"messages": [{"role": "user", "content": "hi"}]}, "row 0"))
    assert result.error is None
    return result.text


def expected(letter):
    return f"{letter}:<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_B01_template_in_the_config(model_folder):
    assert built_text(model_folder(chat_template=chatml("C"))) == expected("C")


def test_B01_a_file_wins_over_the_config(model_folder):
    folder = model_folder(chat_template=chatml("C"))
    (folder / "chat_template.jinja").write_text(chatml("F"))
    assert built_text(folder) == expected("F")


def test_B01_named_templates(model_folder):
    folder = model_folder(chat_template=NAMED_LIST)
    assert built_text(folder) == expected("D")
    assert built_text(folder, tools=[{"type": "function", "function": {"name": "f"}}]) == expected("T")


def test_B01_additional_files(model_folder):
    folder = model_folder()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text(chatml("T"))
    (folder / "chat_template.jinja").write_text(chatml("F"))
    assert built_text(folder) == expected("F")
    assert built_text(folder, tools=[{"type": "function", "function": {"name": "f"}}]) == expected("T")


def test_B01_the_jobs_own_file_wins(model_folder, tmp_path):
    (tmp_path / "own.jinja").write_text(chatml("O"))
    assert built_text(model_folder(chat_template=chatml("C")), chat_template=str(tmp_path / "own.jinja")) == expected(
        "O"
    )


@pytest.mark.parametrize("config", [{}, {"chat_template": NAMED_LIST[1:]}])
def test_B01_no_template_stops_the_job_with_the_folder_and_a_way_out(model_folder, config):
    folder = model_folder(**config)
    with pytest.raises(JobFileError) as caught:
        built_text(folder)
    assert str(folder) in str(caught.value)
    assert "prompt.chat_template: FILE" in str(caught.value)


def test_B01_raw_text_needs_no_template(model_folder):
    recipe = PromptRecipe(Prompt(text="{{ a }}"), Generate(), Limits(), str(model_folder()), 512)
    assert PromptBuilder(recipe).build(Row(0, {"a": "x"}, "row 0")).text == "x"


def test_tokens_as_objects_are_read(model_folder):
    folder = model_folder(bos_token={"content": "<s>", "special": True}, chat_template="{{ bos_token }}{{ eos_token }}")
    assert built_text(folder) == "<s></s>"


def test_older_folders_keep_names_in_special_tokens_map(model_folder):
    folder = model_folder(chat_template="{{ bos_token }}{{ pad_token }}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ bos_token }}{{ pad_token }}"}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "pad_token": {"content": "</s>"}}))
    assert built_text(folder) == "<s></s>"
