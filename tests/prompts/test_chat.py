"""Chat templates render as transformers renders them, and hostile ones stop the job (B04, B08)."""

import datetime
from pathlib import Path

import pytest
from jinja2 import TemplateError

from batchgen.errors import JobFileError
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.chat import ChatTemplate
from batchgen.prompts.failure import RowFailure

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8") for path in (Path(__file__).parent / "chat_templates").glob("*.jinja")
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city, <b>now</b> é",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich"}}}
USER = {"role": "user", "content": " How is it? <|im_end|> {{ 7 * 7 }} "}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFine. "}
CHATS = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be kind."}, USER],
    "turns": [USER, ASSISTANT, {"role": "user", "content": "Why?"}],
    "ends with the assistant": [USER, ASSISTANT],
    "tool calls": [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "sun"},
    ],
    "reasoning": [USER, {"role": "assistant", "content": "Fine.", "reasoning": "well"}],
    "empty content": [{"role": "user", "content": ""}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}],
    "wrong order": [ASSISTANT, USER],
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
NOW = datetime.datetime(2026, 2, 3, 4, 5)


def rendered(name, chat, **options):
    variables = {**NAMED, **options.pop("variables", {})}
    template = ChatTemplate(TEMPLATES[name], name, TemplateLimits(), variables=variables, now=datetime.datetime.now)
    try:
        return template.render(chat, **options)
    except RowFailure:
        return None


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, "<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **NAMED)

    def render(name, chat, *, continue_final_message=False, variables=None, **options):
        try:
            return tokenizer.apply_chat_template(
                chat,
                chat_template=TEMPLATES[name],
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                **options,
                **(variables or {}),
            )
        except (TemplateError, TypeError, ValueError):  # that both refuse is what is compared
            return None

    return render


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers_does(reference, name, chat):
    for options in ({}, {"tools": TOOLS}, {"variables": {"enable_thinking": False, "date_string": "1 Jan"}}):
        assert rendered(name, CHATS[chat], **options) == reference(name, CHATS[chat], **options)


@pytest.mark.parametrize("start", ["Label:", " Label: ", "a\nb\n"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_continues_the_answer_as_transformers_does(reference, name, start):
    chat = [USER, {"role": "assistant", "content": start}]
    text = rendered(name, chat, continue_final_message=True)
    assert text == reference(name, chat, continue_final_message=True)
    assert text is None or text.endswith((start.strip(), start))


def test_documents_are_handed_on(reference):
    documents = [{"title": "t", "text": "x"}]
    text = rendered("training", [USER], documents=documents)
    assert text == reference("training", [USER], documents=documents)
    assert "t: x" in text


def test_each_template_renders_something():
    assert all(rendered(name, CHATS["one turn"]) for name in TEMPLATES)


def test_the_date_is_the_jobs():
    template = ChatTemplate(TEMPLATES["llama3"], "x", TemplateLimits(), variables=NAMED, now=lambda: NOW)
    assert "Today Date: 03 Feb 2026\n" in template.render([USER])


def test_B04_the_templates_own_words_reach_the_row():
    template = ChatTemplate(TEMPLATES["gemma"], "gemma", TemplateLimits(), variables=NAMED)
    for chat, words in [
        (CHATS["system"], "System role not supported"),
        ([USER, USER], "roles must alternate"),
        ([ASSISTANT, USER], "roles must alternate"),
        ([], "empty"),
    ]:
        with pytest.raises(RowFailure, match=words) as caught:
            template.render(chat)
        assert caught.value.error.kind == "template_error"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ cycler.__init__.__globals__['os'].mkdir('x') }}",
        "{{ messages.append({'role': 'user', 'content': 'x'}) }}ok",
        "{% set x = namespace() %}{% set x._y = 1 %}",
        "{% include '/etc/hostname' %}",
        "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 99999999999 }}",
        "{{ messages",
        "{% generation %}",
    ],
)
def test_B08_hostile_chat_templates_stop_the_job(source):
    with pytest.raises(JobFileError, match=r"^model/chat_template\.jinja: "):
        ChatTemplate(source, "model/chat_template.jinja", TemplateLimits(seconds=0.2))


def test_templates_that_take_parts_are_known():
    takes_parts = {name: ChatTemplate(text, name, TemplateLimits()).takes_parts for name, text in TEMPLATES.items()}
    assert takes_parts == dict.fromkeys(TEMPLATES, False) | {"gemma": True}
