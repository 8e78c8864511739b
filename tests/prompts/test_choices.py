"""Choices behind prompts: what rows that end alike share, and choices that can't be told apart."""

import pytest
from tokenizers import normalizers

from batchgen.errors import JobFileError
from batchgen.prompts.choices import ChoiceEncoder
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.tokenizer import Tokenizer

CHOICES = ("positive", "negative", "cat", "the cat", "good")
TEXTS = [
    "this film is good, that film is bad\nlabel:",
    "a cat  label:",
    "the cat\n",
    "<|im_start|>assistant\n",
    "label: ",
    " ",
    "x",
    "cat",
    "a" * 100,
    "the other\tcat:",
]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request, model_folder):
    make = request.getfixturevalue(request.param)
    return Tokenizer.load(model_folder(make()))


@pytest.mark.parametrize("text", TEXTS)
def test_the_last_word_says_how_choices_are_encoded(tokenizer, monkeypatch, text):
    """They are the same as with the whole text before them."""
    ids = tokenizer.encode_rendered(text)
    found = ChoiceEncoder(tokenizer, None).encode(CHOICES, text, None, ids)
    monkeypatch.setattr("batchgen.prompts.choices._tail", lambda text: text)
    assert found == ChoiceEncoder(tokenizer, None).encode(CHOICES, text, None, ids)


def test_rows_that_end_alike_are_encoded_once(tokenizer, monkeypatch):
    encoder = ChoiceEncoder(tokenizer, None)
    texts = [f"this film is number {row}\nSentiment:" for row in range(50)]
    ids = [tokenizer.encode_rendered(text) for text in texts]
    first = encoder.encode(CHOICES, texts[0], None, ids[0])
    monkeypatch.setattr(tokenizer, "encode_rendered", lambda *_: pytest.fail("tokenized again"))
    assert all(encoder.encode(CHOICES, text, None, one) is first for text, one in zip(texts, ids, strict=True))


def test_choices_of_the_same_tokens_are_told(byte_level, model_folder):
    backend = byte_level()
    backend.normalizer = normalizers.NFC()
    encoder = ChoiceEncoder(Tokenizer.load(model_folder(backend)), None)
    twins = ("caf\u00e9", "tea", "cafe\u0301")
    with pytest.raises(JobFileError, match=r"'caf\\xe9' and 'cafe\\u0301' have the same tokens"):
        encoder.check(twins, 64)
    with pytest.raises(RowFailure, match="nothing tells them apart"):
        encoder.encode(twins, "x:", None, encoder._tokenizer.encode_rendered("x:"))


def test_a_choice_longer_than_the_context_is_told(tokenizer):
    with pytest.raises(JobFileError, match=r"'aaa.* has \d+ tokens, and prompt and choice may have 64"):
        ChoiceEncoder(tokenizer, None).check(["b", "a" * 500], 64)
