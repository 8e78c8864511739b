"""The text that all prompts of a job begin with, tokenized once."""

import json
from os.path import commonprefix
from typing import Any

import tokenizers

_LEAST_CHARS = 64
_MOST_MISSES = 32
_PROBES: tuple[str, ...] = (
    *("", " ", "  x", "\n", "\n\n x", "\r\n", "\t", "x", "X", "7", " 7", ".", "...", "'s", "'S", "’s", "-", "_"),
    *("é", "e\u0301", "\u0301", "\u200d", "\u00a0x", "你好", "は\u3099", "🙂", "ﬁ", "ß", "<|", "</s>", '"', "#"),
)
"""What may come behind shared text: the cut is tried with each of them."""


class LeadingText:
    """Tokenizes texts, most of which begin alike: what they share is tokenized once, wherever that changes no id.

    Byte-level tokenizers cut a text into words first, from left to right, and no token goes over such a cut. A word
    ends where a letter or a line break comes before a space or letter that begins the next one, whatever follows
    behind. So shared text is cut there, and the halves are tokenized apart. Other tokenizers get whole texts.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._shared: str | None = None  # what all texts began with so far
        self._head, self._head_ids = "", list[int]()
        self._misses_left = _MOST_MISSES if cuts_into_words(backend) else 0
        self._added = [token.content for token in backend.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> list[int]:
        """The ids of a text whose special tokens are written out."""
        if self._head and text.startswith(self._head):
            return self._head_ids + self._ids(text[len(self._head) :])
        ids = self._ids(text)
        if self._misses_left and len(text) >= _LEAST_CHARS:
            self._misses_left -= 1
            self._learn(text)
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _learn(self, text: str) -> None:
        """Make the head what this text shares with those before it. Texts that share next to nothing are let pass."""
        if self._shared is None:
            self._shared = text
            return
        shared = commonprefix((self._shared, text))  # noqa: RUF071 - of characters
        cut = self._last_cut(shared)
        if cut < _LEAST_CHARS:
            return
        # The tokens in front of the cut, with what follows in sight: alone, line breaks at its end may be one token.
        ids, rest_ids = self._ids(shared), self._ids(shared[cut:])
        head, head_ids = shared[:cut], ids[: len(ids) - len(rest_ids)]
        tails = (text[cut:], *(shared[cut:] + probe for probe in _PROBES))
        if all(self._ids(head + tail) == head_ids + self._ids(tail) for tail in tails):
            self._shared, self._head, self._head_ids = shared, head, head_ids
        else:
            self._misses_left = 0

    def _last_cut(self, text: str) -> int:
        """Where the last word begins that has its first letter in `text`; 0 if there is none.

        No added token may begin before it and go on behind the end of the text.
        """
        for place in range(len(text) - 2, 0, -1):
            before, first, second = text[place - 1], text[place], text[place + 1]
            after_line = before == "\n" and _is_letter(first)
            if (after_line or (_is_letter(before) and first == " " and _is_letter(second))) and not any(
                _runs_over(token, text, place) for token in self._added
            ):
                return place
        return 0


def cuts_into_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer is of the kind described above, as those of GPT-2, Llama 3, Qwen and SmolLM2 are."""
    if type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return False
    normalizer, steps = backend.normalizer, _steps(backend.pre_tokenizer)
    if normalizer is not None and type(normalizer).__name__ != "NFC":
        return False
    return any(step["type"] == "ByteLevel" for step in steps) and all(map(_goes_left_to_right, steps))


def _steps(pre_tokenizer: Any) -> list[dict[str, Any]]:
    spec: dict[str, Any] = {} if pre_tokenizer is None else json.loads(pre_tokenizer.__getstate__())
    return spec["pretokenizers"] if spec.get("type") == "Sequence" else [spec]


def _goes_left_to_right(step: dict[str, Any]) -> bool:
    match step:
        case {"type": "ByteLevel"}:
            return not step["add_prefix_space"]
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return "(?<" not in pattern
        case {"type": "Digits"}:
            return True
    return False


def _is_letter(char: str) -> bool:
    return char.isascii() and char.isalpha()


def _runs_over(token: str, text: str, place: int) -> bool:
    """Whether text behind the end could make up `token` together with an end of `text` that begins before `place`."""
    return any(text.endswith(token[:size]) for size in range(len(text) - place + 1, len(token)))
