"""The tokenizer inside a GGUF header, giving llama.cpp's ids. No torch, no transformers."""

from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from batchgen.errors import JobFileError
from batchgen.models.gguf import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_GPT4 = (
    r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {  # tokenizer.ggml.pre: patterns that cut the text one after the other
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_GPT4.format(digits="{1,3}"),),
    "qwen2": (_GPT4.format(digits=""),),
}
_WHOLE_WORDS = ("llama-bpe",)  # a piece that is a token is taken as it is, without merging


class GGUFTokenizer(NamedTuple):
    """A tokenizer and what the header says of its use. `add_bos` and `add_eos` are for text that is no chat."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool
    add_eos: bool
    chat_template: str | None
    special_tokens: dict[str, int]

    def token(self, token_id: int | None) -> str | None:
        """Return a token's text."""
        return None if token_id is None else self.tokenizer.id_to_token(token_id)


def gguf_tokenizer(path: str | Path) -> GGUFTokenizer:
    """Build the tokenizer of a GGUF file. Raises JobFileError naming a tokenizer that is not supported.

    Control tokens are special: text that spells one becomes one token, unless the caller sets
    `tokenizer.encode_special_tokens`. Nothing is put before or after the text.
    """
    with GGUFFile(path) as file:
        data = file.metadata
    where = str(path)
    kind, pre = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise JobFileError(_trouble(where, "tokenizer.ggml.model", kind, ("gpt2",)))
    if pre not in _SPLITS:
        raise JobFileError(_trouble(where, "tokenizer.ggml.pre", pre, tuple(_SPLITS)))
    tokens, types = data.get("tokenizer.ggml.tokens") or [], data.get("tokenizer.ggml.token_type") or []
    merges = [tuple(merge.split(" ", 1)) for merge in data.get("tokenizer.ggml.merges") or []]
    if not tokens or not merges:
        raise JobFileError(f"{where}: the header holds no tokenizer.ggml.tokens or no tokenizer.ggml.merges")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    known = vocabulary.keys()
    for merge in merges:
        if not known >= {*merge, "".join(merge)}:
            raise JobFileError(f"{where} is damaged: tokenizer.ggml.merges holds {merge}, which makes no token")
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=type_ == _CONTROL, normalized=False)
        for token, type_ in zip(tokens, types, strict=False)
        if type_ in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return GGUFTokenizer(
        tokenizer=tokenizer,
        bos_id=data.get("tokenizer.ggml.bos_token_id"),
        eos_id=data.get("tokenizer.ggml.eos_token_id"),
        pad_id=data.get("tokenizer.ggml.padding_token_id"),
        add_bos=data.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"),
        add_eos=data.get("tokenizer.ggml.add_eos_token", False),
        chat_template=data.get("tokenizer.chat_template"),
        special_tokens={token.content: vocabulary[token.content] for token in added if token.special},
    )


def _trouble(where: str, field: str, value: object, supported: tuple[str, ...]) -> str:
    return (
        f"{where}: {field} is {value!r}, which is not supported; supported: {', '.join(supported)}. "
        "Name the model's original tokenizer with `tokenizer:` in the job file"
    )
