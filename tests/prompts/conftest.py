"""Small tokenizers of the two common kinds, and folders that hold one."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<unk>", "<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the cat sat on the mat and looked at the other cat",
    "this film is good, that film is bad; I liked it a lot, really",
    "negative positive neutral system user assistant hello world",
    "def f(x):\n    return x + 1\n",
]


def make_byte_level(*, bos=False):
    """Byte-level BPE as GPT-2's, Llama 3's and Qwen's, of a few hundred tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        _add_bos(tokenizer)
    return tokenizer


def make_sentencepiece(*, bos=True, prepend="first"):
    """BPE with word marks and byte tokens, as Llama 2's and Mistral's. `prepend` legacy: a normalizer adds the mark."""
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({char for text in CORPUS for char in text.replace(" ", "▁") if char != "\n"})
    merges = [("▁", "c"), ("▁c", "a"), ("▁ca", "t"), ("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("o", "o"), ("▁", "▁")]
    words = ["".join(merge) for merge in merges]
    vocab = {piece: token_id for token_id, piece in enumerate(dict.fromkeys([*pieces, *letters, *words]))}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True, ignore_merges=False)
    )
    if prepend == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIALS])
    if bos:
        _add_bos(tokenizer)
    return tokenizer


def _add_bos(tokenizer):
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )


@pytest.fixture(scope="session")
def byte_level():
    return make_byte_level


@pytest.fixture(scope="session")
def sentencepiece():
    return make_sentencepiece


@pytest.fixture
def model_folder(tmp_path):
    """Make a folder with a tokenizer: `model_folder(tokenizer, chat_template=..., **more of tokenizer_config.json)`."""

    def make(tokenizer=None, *, name="model", **config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text((tokenizer or make_byte_level()).to_str(), encoding="utf-8")
        named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps({**named, **config}), encoding="utf-8")
        return folder

    return make
