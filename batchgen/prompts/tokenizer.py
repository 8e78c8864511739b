"""Text to token ids, as the model's own tokenizer does it, with the `tokenizers` library alone."""

import json
import secrets
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from batchgen.errors import JobFileError
from batchgen.prompts.chat_source import ChatSource, ChatTemplates, folder_chat_templates
from batchgen.prompts.leading import LeadingText
from batchgen.prompts.marks import SpecialText, unmark

_VOCABULARIES = ("tokenizer.model", "vocab", "merges", "spiece", "sentencepiece", "tekken", "qwen.tiktoken")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerParts(NamedTuple):
    """What a tokenizer's files say. `add_bos` None: as the tokenizer's own post-processor does."""

    backend: tokenizers.Tokenizer
    special_texts: dict[str, str]  # bos_token, eos_token, ...: what chat templates may write
    add_bos: bool | None
    chat_templates: ChatTemplates
    place: str


class Tokenizer:
    """A model's tokenizer. Make it with `Tokenizer.load`; it pickles as the path that it came from."""

    def __init__(self, parts: TokenizerParts, recipe: tuple[str, str | None]) -> None:
        self._backend = parts.backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._leading = LeadingText(self._backend)
        self._recipe = recipe
        self.place = parts.place
        self.special_texts = parts.special_texts
        self.chat_templates = parts.chat_templates
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)
        self.special_tokens = {
            token.content: token_id
            for token_id, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        """Ids of the control tokens by their text."""
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self.prefix = self._prefix(parts.add_bos)
        """Ids that the tokenizer puts before raw text; usually its BOS, or nothing."""
        self.special_text = SpecialText(self.special_tokens)

    @classmethod
    def load(cls, model_path: str | Path, tokenizer_path: str | Path | None = None) -> "Tokenizer":
        """The tokenizer of a model folder or GGUF file, or of `tokenizer_path` instead. Raises JobFileError."""
        path = Path(tokenizer_path or model_path)
        parts = _gguf_parts(path) if path.suffix == ".gguf" else _folder_parts(path)
        return cls(parts, (str(model_path), None if tokenizer_path is None else str(tokenizer_path)))

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer.load, self._recipe

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the `tokenizers` library."""
        return self._backend

    @property
    def plain_spec(self) -> str:
        """The tokenizer as tokenizer.json, but no text in it stands for a control token."""
        spec: str = self._twin[0].to_str()
        return spec

    @property
    def chat_template(self) -> ChatSource | None:
        """The model's default chat template."""
        return self.chat_templates.by_name.get("default")

    def _id(self, name: str) -> int | None:
        text = self.special_texts.get(name)
        token_id: int | None = None if text is None else self._backend.token_to_id(text)
        return token_id

    def _prefix(self, add_bos: bool | None) -> list[int]:
        plain = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        places = [k for k in range(len(whole) - len(plain) + 1) if whole[k : k + len(plain)] == plain]
        prefix: list[int] = whole[: places[0]] if places else []
        if add_bos is None or self.bos_id is None or add_bos == (self.bos_id in prefix):
            return prefix
        return [self.bos_id, *prefix] if add_bos else [i for i in prefix if i != self.bos_id]

    def encode_rendered(self, text: str, mark: str | None = None) -> list[int]:
        """Ids of a text whose special tokens are written out, such as a rendered chat; nothing is added.

        With `mark`, special text that holds the mark is plain text, and every other one is a control token.
        """
        if mark is None:
            return self._leading.encode(text)
        twin, names = self._twin
        named = self.special_text.pattern.sub(lambda match: names[match[0]], text)
        ids: list[int] = twin.encode(unmark(named, mark), add_special_tokens=False).ids
        return ids

    def encode_text(self, text: str, mark: str | None = None) -> tuple[list[int], bool]:
        """Ids of raw text, after the BOS that the tokenizer adds; and whether the text brought a BOS of its own.

        A BOS at the start of the text takes the place of the one that would be added: there is never a second.
        """
        bos = self.special_texts.get("bos_token")
        plain = unmark(text, mark)
        doubled = bool(bos) and self.bos_id in self.prefix and plain.startswith(str(bos))
        if doubled and mark is not None:
            text = text.replace(mark, "", 2 if text.startswith(mark) else 1)  # the first special text is that BOS
        ids = self.encode_rendered(text, mark)
        if not doubled:
            return [*self.prefix, *ids], False
        before_bos = self.prefix[: self.prefix.index(self.bos_id)]  # type: ignore[arg-type]
        return [*before_bos, *ids], True

    def encode_plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        return [i for i, _ in self.encode_offsets(text)]

    def encode_offsets(self, text: str) -> list[tuple[int, tuple[int, int]]]:
        """Ids of plain text with the characters of `text` that each stands for."""
        encoding = self._twin[0].encode(text, add_special_tokens=False)
        return list(zip(encoding.ids, encoding.offsets, strict=True))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids, as the `tokenizers` library decodes them, with no clean-up of spaces."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the longest token: so many, times the number of tokens, is the longest text that they spell."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def _twin(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """The same tokenizer with every control token under a name that no text can contain, and those names.

        What was special text is then text like any other, in one pass over the whole prompt: what stands left and right
        of it, added prefix spaces and stripping tokens keep their meaning.
        """
        secret = secrets.token_hex(8)
        spec = json.loads(self._backend.to_str())
        names = {text: f"\U0001fffe{secret}:{token_id}\U0001fffe" for text, token_id in self.special_tokens.items()}
        for token in spec["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = spec["model"]
        vocab = model.get("vocab")
        if isinstance(vocab, dict):
            model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
        elif isinstance(vocab, list):
            model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
        if isinstance(model.get("unk_token"), str):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        spec["post_processor"] = None
        return tokenizers.Tokenizer.from_str(json.dumps(spec)), names


def _gguf_parts(path: Path) -> TokenizerParts:
    from batchgen.models.gguf_tokenizer import gguf_tokenizer

    found = gguf_tokenizer(path)
    backend = found.tokenizer
    named = {"bos_token": found.bos_id, "eos_token": found.eos_id, "pad_token": found.pad_id}
    texts = {name: text for name, i in named.items() if (text := found.token(i)) is not None}
    by_name = {} if found.chat_template is None else {"default": ChatSource(found.chat_template, str(path))}
    return TokenizerParts(backend, texts, found.add_bos, ChatTemplates(by_name, str(path)), str(path))


def _folder_parts(folder: Path) -> TokenizerParts:
    if not folder.is_dir():
        raise JobFileError(f"there is no tokenizer at {folder}: it is no folder and no .gguf file")
    config = _read_json(folder / "tokenizer_config.json")
    legacy = _read_json(folder / "special_tokens_map.json")
    texts = {}
    for name in _NAMED:
        value = config.get(name, legacy.get(name))
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    extra = config.get("extra_special_tokens")
    texts.update({k: v for k, v in extra.items() if isinstance(v, str)} if isinstance(extra, dict) else {})
    add_bos = config.get("add_bos_token")
    return TokenizerParts(
        _folder_backend(folder, config),
        texts,
        add_bos if isinstance(add_bos, bool) else None,
        folder_chat_templates(folder, config),
        str(folder),
    )


def _folder_backend(folder: Path, config: dict[str, Any]) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return _converted(folder)
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises nothing narrower
        raise JobFileError(f"{file} can't be read as a tokenizer: {error}") from error
    # Older folders name some control tokens in tokenizer_config.json only.
    known = backend.get_vocab(with_added_tokens=True)
    named = (config.get("added_tokens_decoder") or {}).values()
    backend.add_special_tokens(
        [tokenizers.AddedToken(**entry) for entry in named if entry.get("special") and entry["content"] in known]
    )
    return backend


def _converted(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer of a folder without tokenizer.json, converted by transformers."""
    if not any(path.name.startswith(_VOCABULARIES) for path in folder.iterdir()):
        raise JobFileError(f"{folder} has no tokenizer.json; give a folder that has one as `tokenizer:`")
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise JobFileError(f"{folder} has no tokenizer.json, and transformers can't convert it: {error}") from error
    backend = getattr(found, "backend_tokenizer", None)
    if backend is None:
        raise JobFileError(
            f"the tokenizer in {folder} is written in Python ({type(found).__name__}); give a folder with a "
            "tokenizer.json as `tokenizer:`"
        )
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise JobFileError(f"{path} is no JSON: {error}") from error
    return found if isinstance(found, dict) else {}
