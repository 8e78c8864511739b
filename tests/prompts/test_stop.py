"""Stop strings across token borders, and token ids back to text (C01, C02, C07)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models

from batchgen.prompts.stop import Answer, StopStrings
from batchgen.prompts.text import Detokenizer, decode_utf8
from batchgen.prompts.tokenizer import Tokenizer


class Pieces:
    """A detokenizer whose token i is the i-th of some texts."""

    def __init__(self, *pieces):
        self.pieces = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]

    def piece(self, token_id):
        return self.pieces[token_id]


def generate(stops, pieces):
    """Feed the tokens one by one, as the engine does: the answer, and whether a stop string ended it."""
    check = stops.check()
    for num_tokens in range(1, len(pieces.pieces) + 1):
        kept = check(range(num_tokens))
        if kept is not None:
            assert kept == num_tokens
            return stops.finish(range(kept), is_stopped=True), True
    return stops.finish(range(len(pieces.pieces)), is_stopped=False), False


def answer(stops, *pieces, **options):
    detokenizer = Pieces(*pieces)
    return generate(StopStrings(stops, detokenizer, **options), detokenizer)


def test_C01_a_stop_spans_tokens():
    assert answer(["END"], "Hel", "lo E", "ND", " more") == (Answer("Hello ", 2, "END"), True)


def test_C01_a_beginning_of_a_stop_stays_when_the_answer_ends():
    assert answer(["END"], "Hello ", "EN") == (Answer("Hello EN", 2), False)


@pytest.mark.parametrize("stops", [["ab", "abc"], ["abc", "ab"]])
def test_C01_the_longest_of_those_that_begin_together_wins(stops):
    assert answer(stops, "x", "abcd")[0] == Answer("x", 1, "abc")
    assert answer(stops, "x", "ab", "c")[0] == Answer("x", 1, "ab")


def test_C01_the_earliest_wins():
    assert answer(["cd", "bcde"], "a", "bcdef")[0] == Answer("a", 1, "bcde")
    assert answer(["e", "bc"], "abcde")[0] == Answer("a", 1, "bc")


def test_C01_a_stop_within_a_token():
    assert answer(["d"], "abcdef", "x") == (Answer("abc", 1, "d"), True)


def test_C01_a_stop_at_the_start_leaves_no_token():
    assert answer(["Hel"], "Hel", "lo")[0] == Answer("", 0, "Hel")


def test_C01_include_stop_keeps_it_and_its_tokens():
    assert answer(["END"], "Hel", "lo E", "ND", " more", include_stop=True)[0] == Answer("Hello END", 3, "END")
    assert answer(["lo"], "Hel", "lo E", include_stop=True)[0] == Answer("Hello", 2, "lo")


def test_C01_texts_are_not_normalised():
    composed, decomposed = "\u00e9", "e\u0301"
    assert answer([composed], "caf", decomposed)[1] is False
    assert answer([decomposed], "caf", "e", "\u0301 x")[0] == Answer("caf", 1, decomposed)


def test_C01_a_hundred_stops():
    stops = [f"<{number}>" for number in range(100)]
    assert answer(stops, "a<", "9", "9", ">b")[0] == Answer("a", 1, "<99>")


def test_C07_stops_within_min_tokens_are_text():
    assert answer(["b"], "a", "b", "c", "b", "d", min_tokens=3)[0] == Answer("abc", 3, "b")
    assert answer(["bc"], "a", "b", "c", "d", min_tokens=4)[1] is False


def test_C01_checks_are_independent_and_may_skip_calls():
    pieces = Pieces("a", "b", "c", "d")
    stops = StopStrings(["bc"], pieces)
    first, second = stops.check(), stops.check()
    assert first([0]) is None
    assert second([0, 1, 2, 3]) == 3
    assert first([0, 1, 2]) == 3


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_C01_equals_a_search_of_the_whole_text_at_each_token(data):
    pieces = data.draw(st.lists(st.text("ab\u00e9", max_size=4), max_size=12))
    stops = data.draw(st.lists(st.text("ab\u00e9", min_size=1, max_size=5), min_size=1, max_size=4))
    result, is_stopped = answer(stops, *pieces)
    text = ""
    for num_tokens, piece in enumerate(pieces, 1):
        text += piece
        found = [(text.find(stop), -len(stop.encode()), stop) for stop in stops if stop in text]
        if found:
            start, _, stop = min(found)
            assert (result.text, result.stop, is_stopped) == (text[:start], stop, True)
            assert result.num_tokens <= num_tokens
            needed = "".join(pieces[: result.num_tokens])
            assert needed.startswith(result.text)
            assert result.num_tokens == 0 or len("".join(pieces[: result.num_tokens - 1])) < start
            return
    assert (result, is_stopped) == (Answer(text, len(pieces)), False)


FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request, byte_level, sentencepiece, model_folder):
    return Tokenizer.load(model_folder(byte_level() if request.param == "byte_level" else sentencepiece()))


TEXTS = ["\U0001f600", FAMILY, "नमस्ते", "plain cat", " ,", " n't", "a  b", "\n\n x ", "def f():\n    x"]


@pytest.mark.parametrize("text", TEXTS)
def test_C02_whole_characters_come_back(tokenizer, text):
    prompt = "the cat"
    ids = tokenizer.encode_rendered(prompt + text)
    head = tokenizer.encode_rendered(prompt)
    assert ids[: len(head)] == head, "the text does not begin with a token of its own"
    out = ids[len(head) :]
    assert Detokenizer(tokenizer).text(out) == text
    assert prompt + Detokenizer(tokenizer).text(out) == tokenizer.decode(ids)


def test_C02_a_word_keeps_its_space(tokenizer):
    ids = tokenizer.encode_rendered("the cat")[-1:]
    assert Detokenizer(tokenizer).text(ids) in (" cat", "cat", "at", "t")
    if tokenizer.backend.id_to_token(ids[0]) == "▁cat":
        assert Detokenizer(tokenizer).text(ids) == " cat"


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_C02_a_cut_character_is_left_out(tokenizer, num_tokens):
    byte_ids = [_byte_id(tokenizer, byte) for byte in "\U0001f600".encode()]
    plain = [_byte_id(tokenizer, ord("a"))]
    assert Detokenizer(tokenizer).text(plain + byte_ids[:num_tokens]) == "a"
    assert Detokenizer(tokenizer).text(plain + byte_ids) == "a\U0001f600"


def test_C02_forty_invalid_bytes_become_forty_replacement_characters(tokenizer):
    text = Detokenizer(tokenizer).text([_byte_id(tokenizer, 0xFF)] * 40 + [_byte_id(tokenizer, ord("a"))])
    assert text == "\ufffd" * 40 + "a"
    assert text.encode().decode() == text


def _byte_id(tokenizer, byte):
    detokenizer = Detokenizer(tokenizer)
    return next(i for i in range(tokenizer.vocab_size) if detokenizer.piece(i) == bytes([byte]))


def test_C02_special_tokens_are_left_out_or_kept(tokenizer):
    start, end = (tokenizer.special_tokens[text] for text in ("<|im_start|>", "<|im_end|>"))
    a = _byte_id(tokenizer, ord("a"))
    assert Detokenizer(tokenizer).text([a, start, a, end]) == "aa"
    assert Detokenizer(tokenizer, skip_special_tokens=False).text([a, start, a, end]) == "a<|im_start|>a<|im_end|>"


def test_C02_ids_outside_the_vocabulary_are_no_text(tokenizer):
    assert Detokenizer(tokenizer).text([tokenizer.vocab_size + 5, -1, 2**33]) == ""


def test_C02_every_token_decodes_as_the_library_does(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    anchor = _byte_id(tokenizer, ord("a"))
    for token_id in range(tokenizer.vocab_size):
        text = tokenizer.decode([anchor, token_id])
        if "\ufffd" not in text:
            assert "a" + detokenizer.text([token_id]) == text


def test_vocabularies_without_a_decoder_are_plain_text(model_folder):
    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, "<unk>"))
    assert Detokenizer(Tokenizer.load(model_folder(backend))).text([1, 2]) == "ab"


def test_decode_utf8_is_always_valid():
    assert decode_utf8(b"a\xe2\x82") == "a"
    assert decode_utf8(b"a\xe2\x82b") == "a\ufffdb"
