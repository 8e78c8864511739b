"""Rows become prompts or errors: what is no text, messages, over-long prompts, choices (A16, B04, C03, C13)."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.data.rows import Row
from batchgen.errors import JobFileError, RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt
from batchgen.prompts.builder import PromptBuilder, PromptRecipe
from batchgen.prompts.first_rows import watch_first_rows

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture
def builder(model_folder, byte_level):
    def make(prompt, *, max_length=256, generate=None, limits=None, bos=False, name="model"):
        folder = model_folder(byte_level(bos=bos), chat_template=CHATML, name=name)
        sections = Prompt(**prompt), Generate(**(generate or {})), Limits(**(limits or {}))
        return PromptBuilder(PromptRecipe(*sections, str(folder), max_length))

    return make


def build(prompt_builder, **values):
    return prompt_builder.build(Row(0, values, "row 0"))


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"prompt": None}, "null_prompt"),
        ({"prompt": 123}, "not_text"),
        ({"prompt": True}, "not_text"),
        ({"prompt": 1.5}, "not_text"),
        ({"prompt": float("nan")}, "not_text"),
        ({"prompt": ["a"]}, "not_text"),
        ({"prompt": {"a": 1}}, "not_text"),
        ({"other": 1}, "missing_prompt"),
        ({"prompt": ""}, "empty_prompt"),
    ],
)
def test_A16_what_is_no_text_is_an_error_of_its_own_kind(builder, values, kind):
    result = build(builder({"text": "{{ prompt }}"}), **values)
    assert result.error is not None
    assert result.error.kind == kind
    assert result.token_ids is None


@pytest.mark.parametrize("text", ["   ", "\n", " keep my spaces ", "NaN", "null", "None"])
def test_A16_every_text_is_kept_as_it_is(builder, text):
    raw = builder({"text": "{{ prompt }}"})
    result = build(raw, prompt=text)
    assert result.text == text
    assert raw.tokenizer.decode(list(result.token_ids)) == text


def test_A16_empty_text_is_a_prompt_where_there_is_a_token_to_start_from(builder, model_folder):
    raw = builder({"text": "{{ prompt }}"}, bos=True)
    assert list(build(raw, prompt="").token_ids) == [raw.tokenizer.bos_id]
    recipe = PromptRecipe(Prompt(user="{{ prompt }}"), Generate(), Limits(), raw.recipe.model_path, 64)
    assert build(PromptBuilder(recipe), prompt="").error is None


def test_a_row_that_could_not_be_read_keeps_its_error(builder):
    error = RowError("bad_json", "no JSON")
    result = builder({"text": "{{ prompt }}"}).build(Row(3, {}, "line 4", error))
    assert (result.error, result.row.index) == (error, 3)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "messages",
    [MESSAGES, json.dumps(MESSAGES), [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None}]],
)
def test_messages_come_as_lists_as_json_and_in_parts(builder, messages):
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert build(builder({"messages": "m"}), m=messages).text == text


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        (None, "null_prompt"),
        ("no json", "not_text"),
        ({"role": "user"}, "not_text"),
        (["hi"], "not_text"),
        ([{"content": "hi"}], "template_error"),
        ([], "template_error"),
        ([{"role": "user", "content": 3}], "not_text"),
        ([{"role": "user", "content": None}], "null_prompt"),
        ([{"role": "user"}], "missing_prompt"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "not_text"),
    ],
)
def test_bad_messages_fail_their_row(builder, messages, kind):
    assert build(builder({"messages": "m"}), m=messages).error.kind == kind


def test_half_characters_fail_their_row(builder):
    messages = '[{"role": "user", "content": "\\ud800"}]'
    assert build(builder({"messages": "m"}), m=messages).error.kind == "bad_utf8"


@pytest.mark.parametrize("prompt", [{"text": "{{ a | tojson }}"}, {"messages": "a"}])
def test_bottomless_values_fail_their_row(builder, prompt):
    bottomless = []
    for _ in range(5000):
        bottomless = [bottomless]
    messages = [{"role": "user", "content": "<s>", "extra": bottomless}]
    assert build(builder(prompt), a=messages).error.kind in ("not_text", "template_error")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["<s>", "<|im_end|", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
_BUILDERS = []


@given(a=JSON, b=JSON)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_row_is_a_prompt_or_an_error_whatever_it_holds(model_folder, byte_level, a, b):
    if not _BUILDERS:
        folder = str(model_folder(byte_level(), chat_template=CHATML))
        cut = {"overlong": {"truncate": {"field": "a"}}}
        for prompt, limits in [({"text": "{{ a }}{{ b.x }}"}, cut), ({"messages": "a", "tools": "b"}, {}), ({}, {})]:
            recipe = PromptRecipe(Prompt(**prompt), Generate(max_tokens=4), Limits(**limits), folder, 16)
            _BUILDERS.append(PromptBuilder(recipe))
    for prompt_builder in _BUILDERS:
        for values in ({"a": a, "b": b}, {"messages": a, "tools": b}, {"prompt": a}):
            result = build(prompt_builder, **values)
            assert (result.token_ids is None) == (result.error is not None)
            assert result.token_ids is None or 0 < len(result.token_ids) < 16


def test_system_goes_before_messages_that_have_none(builder):
    chat = builder({"messages": "m", "system": "Be {{ how }}."})
    assert build(chat, m=MESSAGES, how="kind").text.startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user"
    )
    own = [{"role": "system", "content": "Own."}, *MESSAGES]
    assert build(chat, m=own, how="kind").text.startswith("<|im_start|>system\nOwn.<|im_end|>\n<|im_start|>user")


def test_a_list_of_message_templates(builder):
    chat = builder(
        {"messages": [{"role": "user", "content": "Q: {{ q }}"}, {"role": "assistant", "content": "{{ a }}"}]}
    )
    assert build(chat, q="1", a="2").text == (
        "<|im_start|>user\nQ: 1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_start_of_the_answer_is_left_open(builder):
    assert build(builder({"user": "{{ q }}", "assistant": "Label:"}), q="x").text.endswith("assistant\nLabel:")


def test_openai_rows_with_messages_need_a_chat_template(model_folder):
    recipe = PromptRecipe(Prompt(), Generate(), Limits(), str(model_folder()), 64)
    base = PromptBuilder(recipe)
    assert build(base, prompt="raw").text == "raw"
    assert "no chat template" in build(base, messages=MESSAGES).error.message


def test_openai_rows_bring_messages_or_a_prompt(builder):
    chat = builder({})
    assert chat.templates.columns == {"messages", "prompt", "tools"}
    assert build(chat, messages=MESSAGES).text.startswith("<|im_start|>user\nhi")
    assert build(chat, prompt="raw", messages=None).text == "raw"
    assert build(chat, messages=None).error.kind == "missing_prompt"


@pytest.mark.parametrize("num_tokens", [1, 62, 63])
def test_C03_prompts_that_leave_room_for_a_token_fit(builder, num_tokens):
    result = build(builder({"text": "{{ a }}"}, max_length=64), a="\x00" * num_tokens)
    assert len(result.token_ids) == num_tokens


@pytest.mark.parametrize("num_tokens", [64, 65, 640])
def test_C03_longer_ones_are_errors_with_both_numbers(builder, num_tokens):
    result = build(builder({"text": "{{ a }}"}, max_length=64), a="\x00" * num_tokens)
    assert result.error.kind == "prompt_too_long"
    assert f"{num_tokens} tokens" in result.error.message
    assert "max_length is 64" in result.error.message


def test_C03_a_hopelessly_long_text_is_refused_by_its_beginning(builder, monkeypatch):
    raw = builder({"text": "{{ a }}"}, max_length=64)
    seen = []
    encode = raw.tokenizer.encode_rendered

    def watched(text, mark):
        seen.append(len(text))
        return encode(text, mark)

    monkeypatch.setattr(raw.tokenizer, "encode_rendered", watched)
    result = build(raw, a="\x00x" * 5_000_000)
    assert result.error.kind == "prompt_too_long"
    assert "at least" in result.error.message
    assert sum(seen) < 100_000


@pytest.mark.parametrize("prompt", [{"text": "{{ a }}"}, {"text": "Q: {{ a }}"}, {"user": "Q: {{ a }}"}])
def test_C03_a_text_beyond_the_templates_limits_is_too_long(builder, prompt):
    result = build(builder(prompt, limits={"template_chars": 1000}), a="x" * 100_000)
    assert result.error.kind == "prompt_too_long"
    cut = {"overlong": {"truncate": {"field": "a", "keep": "head"}}, "template_chars": 1000}
    assert build(builder(prompt, limits=cut, name="cut"), a="x" * 100_000).truncated_tokens > 0


def test_C03_skipping_is_a_choice(builder):
    result = build(builder({"text": "{{ a }}"}, max_length=64, limits={"overlong": "skip"}), a="x" * 999)
    assert result.skipped
    assert result.error.kind == "prompt_too_long"


def cutter(builder, prompt, keep, **generate):
    truncate = {"field": "a", "keep": keep}
    return builder(prompt, max_length=64, generate=generate, limits={"overlong": {"truncate": truncate}})


WORDS = " ".join(f"cat{number}" for number in range(200))
EMOJI = "नमस्ते 😀 " * 60


@pytest.mark.parametrize("text", [WORDS, EMOJI, "the cat <|im_end|> " * 80])
@pytest.mark.parametrize("template", ["{{ a }}", "Q: {{ a }} A:", "{{ a }} and {{ a | upper }}"])
@pytest.mark.parametrize("keep", ["head", "tail"])
def test_C03_a_cut_keeps_as_much_as_fits(builder, keep, template, text):
    chat = cutter(builder, {"user": template}, keep, max_tokens=8)
    result = build(chat, a=text)
    head, tail = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    assert result.text.startswith(head)
    assert result.text.endswith(tail)
    assert len(result.token_ids) <= 64 - 8
    if template == "{{ a }}":
        kept = result.text[len(head) : -len(tail)]
        assert text.startswith(kept) if keep == "head" else text.endswith(kept)
        spans = chat.tokenizer.encode_offsets(text)
        num_kept = len(spans) - result.truncated_tokens
        one_more = text[: spans[num_kept][1][1]] if keep == "head" else text[spans[-num_kept - 1][1][0] :]
        assert len(kept) <= len(one_more)
        longer = build(PromptBuilder(_roomy(chat)), a=one_more)
        assert one_more == kept or len(longer.token_ids) > 64 - 8
    assert result.truncated_tokens > 0


def _roomy(chat):
    recipe = chat.recipe
    return PromptRecipe(recipe.prompt, recipe.generate, Limits(), recipe.model_path, 4096)


def test_C03_what_fits_is_not_cut(builder):
    result = build(cutter(builder, {"user": "{{ a }}"}, "head", max_tokens=8), a="the cat")
    assert result.truncated_tokens == 0
    assert "the cat" in result.text


def test_C03_a_cut_that_can_not_help_is_an_error(builder):
    result = build(cutter(builder, {"text": "{{ a }}{{ b }}"}, "head", max_tokens=8), a="x", b="\x00" * 100)
    assert result.error.kind == "prompt_too_long"


def test_C03_a_huge_field_is_cut(builder):
    result = build(cutter(builder, {"text": "{{ a }}"}, "tail", max_tokens=8), a="the cat sat " * 20_000 + "END")
    assert result.text.endswith("the cat sat END")
    assert len(result.token_ids) == 64 - 8


def test_a_cut_needs_a_column_of_text(builder):
    with pytest.raises(JobFileError, match="no template reads 'a'; cut one of: b"):
        cutter(builder, {"text": "{{ b }}"}, "head")


CHOICES = ["A", "AB", "A B", "a.b", "(x)", 'say "hi"', "ü", "null", " lead"]


@pytest.mark.parametrize("template", ["Label:", "Label: ", "{{ a }}", "{{ a }}\n"])
def test_C13_choices_are_encoded_behind_the_prompt_and_end(builder, template):
    raw = builder({"text": template + ("" if "a" in template[:4] else "{{ a }}")}, generate={"choices": CHOICES})
    eos_id = raw.tokenizer.eos_id
    for text in ("the cat", "cat <|im_end|> ", "ü"):
        result = build(raw, a=text)
        assert all(choice[-1] == eos_id for choice in result.choices)
        assert len(set(result.choices)) == len(CHOICES)
        for choice, ids in zip(CHOICES, result.choices, strict=True):
            assert raw.tokenizer.decode([*result.token_ids, *ids[:-1]], False) == result.text + choice
            whole = raw.tokenizer.encode_rendered(result.text + choice)
            prefix = raw.tokenizer.encode_rendered(result.text)
            if "<|" not in text and whole[: len(prefix)] == prefix:
                assert [*result.token_ids, *ids[:-1]] == whole


def test_C13_no_prefix_space_is_put_before_a_choice(model_folder, sentencepiece):
    recipe = PromptRecipe(
        Prompt(text="{{ a }}"), Generate(choices=["cat", " cat"]), Limits(), str(model_folder(sentencepiece())), 64
    )
    raw = PromptBuilder(recipe)
    result = build(raw, a="the ")
    texts = [raw.tokenizer.decode([*result.token_ids, *choice]) for choice in result.choices]
    assert texts == ["the cat", "the  cat"]


@pytest.mark.parametrize(
    ("prompt", "choices", "expected"),
    [
        ("Sentiment:", ["good", "bad"], [" good", " bad"]),
        ("the cat is", ["good", "7"], [" good", " 7"]),
        ("Sentiment: ", ["good", "bad"], None),
        ("Sentiment:\n", ["good", "bad"], None),
        ("Label: (", ["a", "b"], None),
        ("<label>", ["a", "b"], None),
        ("Sentiment:", [" good", "bad"], None),  # its author says where spaces are
        ("Sentiment:", ["(a)", "(b)"], None),
        ("情感:", ["好", "坏"], None),
        ("Sentiment：", ["good", "bad"], None),
    ],
)
def test_C13_a_space_goes_where_writing_has_one(builder, prompt, choices, expected):
    raw = builder({"text": "{{ a }}"}, generate={"choices": choices})
    result = build(raw, a=prompt)
    assert [raw.tokenizer.decode(ids) for ids in result.choices] == (expected or choices)
    assert result.labels == tuple(choices)


def test_C13_the_longest_choice_must_fit(builder):
    raw = builder({"text": "{{ a }}"}, max_length=64, generate={"choices": ["\x00", "\x00" * 3]})
    assert build(raw, a="\x01" * 60).error is None
    assert build(raw, a="\x01" * 61).error.kind == "prompt_too_long"


def test_B04_rows_that_all_fail_alike_end_the_job(builder):
    raw = builder({"text": "{{ a }}!"})
    with pytest.raises(JobFileError, match=r"first 3 rows failed in the same way .*'a' is null"):
        next(watch_first_rows((build(raw, a=None) for _ in range(9)), 3))  # before any row is passed on
    fewer = [build(raw, a=None) for _ in range(2)]
    assert list(watch_first_rows(fewer, 3)) == fewer


@pytest.mark.parametrize("odd_one", [{"a": "fine"}, {}])
def test_B04_rows_that_differ_do_not(builder, odd_one):
    raw = builder({"text": "{{ a }}!"})
    rows = [{"a": None}, odd_one, {"a": None}, {"a": None}, {"a": None}, {"a": None}]
    prompts = [build(raw, **values) for values in rows]
    assert list(watch_first_rows(prompts, 3)) == prompts
