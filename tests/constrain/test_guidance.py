"""Matchers over tokenizers of several kinds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from batchgen.constrain.grammar import Grammar
from batchgen.constrain.guidance import GuidanceCompiler
from batchgen.prompts.tokenizer import Tokenizer

EOS = 258
TITLE = {"type": "object", "properties": {"title": {"type": "string", "maxLength": 3}}, "required": ["title"]}
TITLE["additionalProperties"] = False


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def byte_fallback() -> tokenizers.Tokenizer:
    """Pieces with a sign for spaces, and single bytes for what they can't spell, as Llama 2 and Mistral have them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *'▁abcdeilt{}":,']
    merges = [("{", '"'), ('"', ":"), ("▁", '"'), ("t", "i")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in pieces[:3]])
    return tokenizer


def allowed(constraint: Any, matchers: list[Any], num_tokens: int) -> list[set[int]]:
    masks = np.zeros((len(matchers), -(-num_tokens // 32)), np.int32)
    constraint.fill_masks([(matcher, row) for row, matcher in enumerate(matchers)], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in bits]


def test_pieces_with_byte_fallback() -> None:
    tokenizer = byte_fallback()
    size = tokenizer.get_vocab_size()
    constraint = GuidanceCompiler(tokenizer.to_str(), size, [2]).compile(schema(TITLE))
    matcher = constraint.matcher()
    forced = matcher.forced_tokens()
    assert [tokenizer.id_to_token(i) for i in forced] == ['{"', "ti", "t", "l", "e", '":']
    ids = [*forced, *tokenizer.encode(' "é"}', add_special_tokens=False).ids[1:]]
    assert matcher.accept(ids)
    assert matcher.is_complete
    assert tokenizer.decode(ids) == '{"title": "é"}'


@pytest.mark.parametrize("model", [models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"), models.Unigram([("a", -1.0)])])
def test_a_tokenizer_without_bytes_is_told(model: Any) -> None:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(ValueError, match="no grammar can be followed with the model's tokenizer"):
        GuidanceCompiler(tokenizer.to_str(), 2, [0])


def test_a_tokenizer_larger_than_the_model_is_told(follows: Any) -> None:
    with pytest.raises(ValueError, match="vocab size too small; 100 vs 259"):
        GuidanceCompiler(follows.tokenizer.to_str(), 100, [0])


def test_many_matchers_go_on_at_once_as_each_alone(follows: Any) -> None:
    constraint = follows.compiler.compile(Grammar("regex", "[a-f]+"))
    matchers = [constraint.matcher() for _ in range(40)]
    ids = follows.tokenizer.encode("abxf").ids
    tokens = [ids[number % 4] for number in range(40)]
    assert constraint.accept_tokens(list(zip(matchers, tokens, strict=True))) == [token != ids[2] for token in tokens]
    assert [matcher.problem is None for matcher in matchers] == [token != ids[2] for token in tokens]


def test_text_of_control_tokens_is_written_as_text(tiny_llama: Path) -> None:
    tokenizer = Tokenizer.load(tiny_llama)
    matcher = GuidanceCompiler(tokenizer.plain_spec, 259, [EOS]).compile(schema({"const": "<|im_end|>"})).matcher()
    forced = matcher.forced_tokens()
    assert max(forced) < 256  # no control token among them
    assert tokenizer.decode(forced) == '"<|im_end|>"'
    assert matcher.accept(forced)
    assert matcher.is_complete


def test_an_answer_ends_where_it_may_or_goes_on(follows: Any) -> None:
    constraint = follows.compiler.compile(Grammar("regex", "a|ab"))
    matcher = constraint.matcher()
    a, b = follows.tokenizer.encode("ab").ids
    assert allowed(constraint, [matcher], 259) == [{a}]
    assert not matcher.is_accepting
    assert matcher.accept([a])
    assert (matcher.is_accepting, matcher.is_complete) == (True, False)
    assert allowed(constraint, [matcher], 259) == [{b, EOS}]
    assert matcher.accept([b])
    assert (matcher.is_accepting, matcher.is_complete) == (True, True)
    matcher.rollback(1)
    assert (matcher.is_accepting, matcher.is_complete) == (True, False)
    assert not matcher.accept([a])
    assert "doesn't satisfy the grammar" in matcher.problem


def test_masks_of_many_matchers_are_those_of_each_alone(follows: Any) -> None:
    constraints = [follows.compiler.compile(Grammar("regex", text)) for text in ("[a-f]{0,9}x", "(ab|ac|d)*")]
    matchers = []
    for number in range(60):
        matchers.append(constraints[number % 2].matcher())
        matchers[-1].accept(
            follows.tokenizer.encode("abacabdd"[: number % 9] if number % 2 else "abcdef"[: number % 7]).ids
        )
    together = allowed(constraints[0], matchers, 259)
    assert together == [allowed(constraints[1], [matcher], 259)[0] for matcher in matchers]
    assert len(set(map(frozenset, together))) == 3
