"""The tokenizer of a GGUF header gives llama.cpp's ids, frozen in gguf_tokens.json, where splitting matters."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from batchgen.errors import JobFileError
from batchgen.models.gguf_tokenizer import gguf_tokenizer

FROZEN = json.loads((Path(__file__).parent / "gguf_tokens.json").read_text())
ROWS = FROZEN["rows"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PRES = ["default", "gpt-2", "smollm", "llama-bpe", "qwen2"]


def vocabulary():
    """Three control tokens, the bytes, every merge once, and one user-defined token."""
    merged = [merge.replace(" ", "") for merge in FROZEN["merges"]]
    return list(dict.fromkeys([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged, "<user-defined>"]))


@pytest.fixture
def header(make_gguf):
    def make(**changes):
        tokens = vocabulary()
        metadata = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 4) + [4],
            "tokenizer.ggml.merges": FROZEN["merges"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": "{{ messages }}",
        }
        metadata |= {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
        metadata = {key: value for key, value in metadata.items() if value is not None}
        return make_gguf("llama", metadata, {"token_embd.weight": np.zeros((1, 32), np.float32)})

    return make


def test_enough_texts_tell_the_splits_apart():
    assert len(ROWS) == 60
    for one, other in itertools.combinations(PRES, 2):
        assert sum(row["ids"][one] != row["ids"][other] for row in ROWS) >= 5, (one, other)


@pytest.mark.parametrize("pre", PRES)
def test_ids_equal_llama_cpp(pre, header):
    tokenizer = gguf_tokenizer(header(pre=pre)).tokenizer
    assert tokenizer.get_vocab_size() == len(vocabulary())
    tokenizer.encode_special_tokens = True
    got = {row["text"]: tokenizer.encode(row["text"]).ids for row in ROWS}
    assert got == {row["text"]: row["ids"][pre] for row in ROWS}
    assert all(tokenizer.decode(ids, skip_special_tokens=False) == text for text, ids in got.items())
    tokenizer.encode_special_tokens = False
    special = [row for row in ROWS if "special" in row]
    assert len(special) == 6
    assert [tokenizer.encode(row["text"]).ids for row in special] == [row["special"][pre] for row in special]


def test_smollm2_ids_equal_llama_cpp(smollm2):
    gguf = gguf_tokenizer(smollm2)
    gguf.tokenizer.encode_special_tokens = True
    assert [gguf.tokenizer.encode(row["text"]).ids for row in ROWS] == [row["smollm2"] for row in ROWS]
    gguf.tokenizer.encode_special_tokens = False
    special = [row for row in ROWS if "special" in row]
    assert [gguf.tokenizer.encode(row["text"]).ids for row in special] == [row["special"]["smollm2"] for row in special]
    assert (gguf.bos_id, gguf.eos_id, gguf.pad_id, gguf.add_bos, gguf.add_eos) == (1, 2, 2, False, False)
    assert gguf.special_tokens["<|im_end|>"] == 2
    assert "<|im_start|>" in gguf.chat_template


def test_what_the_header_says_of_its_use(header):
    gguf = gguf_tokenizer(header(add_bos_token=True, padding_token_id=0))
    assert (gguf.bos_id, gguf.eos_id, gguf.pad_id, gguf.add_bos) == (1, 2, 0, True)
    assert gguf.chat_template == "{{ messages }}"
    assert gguf.special_tokens == {token: i for i, token in enumerate(SPECIAL)}
    assert gguf.token(gguf.eos_id) == "<|im_end|>"
    assert gguf.token(None) is None


def test_llama_3_puts_bos_first_unless_the_header_says_no(header):
    assert gguf_tokenizer(header(pre="llama-bpe")).add_bos
    assert not gguf_tokenizer(header(pre="llama-bpe", add_bos_token=False)).add_bos
    assert not gguf_tokenizer(header(pre="qwen2")).add_bos


def test_user_defined_tokens_are_always_one_token(header):
    tokenizer = gguf_tokenizer(header()).tokenizer
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("a<user-defined>b").tokens == ["a", "<user-defined>", "b"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "llama"}, r"tokenizer\.ggml\.model is 'llama'.*supported: gpt2.*tokenizer:"),
        ({"pre": "tekken"}, r"tokenizer\.ggml\.pre is 'tekken'.*supported: default, gpt-2, smollm"),
        ({"merges": ["a b", "a nothing"]}, r"is damaged: tokenizer\.ggml\.merges holds \('a', 'nothing'\)"),
        ({"merges": None}, r"no tokenizer\.ggml\.tokens or no tokenizer\.ggml\.merges"),
    ],
)
def test_other_tokenizers_are_refused(changes, said, header):
    with pytest.raises(JobFileError, match=said):
        gguf_tokenizer(header(**changes))
