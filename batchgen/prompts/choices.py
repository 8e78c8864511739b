"""The texts that a job scores behind its prompts, and their token ids as the model would see them there."""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from batchgen.errors import JobFileError
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.tokenizer import Tokenizer

_TAIL_CHARS = 64
_CACHE_SIZE = 4096
_SPACE_AFTER = frozenset(":,;.!?)")

Choices = tuple[tuple[int, ...], ...]


class ChoiceEncoder:
    """Encodes choices behind a prompt. Where one begins another, all end with `eos_id`, to tell them apart.

    Elsewhere the end is left out: how likely the model is to stop after a label says nothing of the label, and behind a
    raw prompt it seldom would.

    Prompt and choice are tokenized together, and the prompt's tokens taken off the front. Where they would merge over
    the border (a prompt that ends in a space, say), the model has read the prompt's tokens already: then the choice is
    tokenized as the text that follows them. A space goes in between where writing has one (see `_is_word_apart`).
    """

    def __init__(self, tokenizer: Tokenizer, eos_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._end = () if eos_id is None else (eos_id,)
        self._by_tail: dict[tuple[Sequence[str], str], Choices] = {}

    def check(self, choices: Sequence[str], max_length: int) -> None:
        """Raise JobFileError for choices that no prompt can have: too long, or of the same tokens."""
        for choice, ids in zip(choices, self._apart(choices), strict=True):
            if len(ids) >= max_length:
                raise JobFileError(
                    f"generate.choices: {choice!r:.50} has {len(ids)} tokens, and prompt and choice may have "
                    f"{max_length} together; shorten it"
                )
        if (twins := _twins(choices, self._apart(choices))) is not None:
            raise JobFileError(f"generate.choices: {twins}; keep one of them")

    def longest(self, choices: Sequence[str]) -> int:
        """Tokens of the longest choice behind any prompt, with its end where it has one."""
        spaced = [f" {choice}" for choice in choices] if self._writes_spaces else []
        return max(len(ids) for texts in (choices, spaced) for ids in _ended(self._apart(texts), self._end))

    def encode(self, choices: tuple[str, ...], text: str, mark: str | None, ids: Sequence[int]) -> Choices:
        """The choices' ids behind the prompt `text`, whose ids are `ids`. Raises RowFailure when two have the same."""
        tail = _tail(text)
        found = self._by_tail.get((choices, tail))
        if found is None:
            spaced = self._is_word_apart(tail, choices)
            texts = [f" {choice}" for choice in choices] if spaced else choices
            behind = self._behind(texts, tail, mark, ids) or self._behind(texts, text, mark, ids)
            found = _ended(behind or self._apart(texts), self._end)
            if (twins := _twins(choices, found)) is not None:
                raise RowFailure("bad_request", f"choices: {twins}")
            if len(self._by_tail) >= _CACHE_SIZE:
                self._by_tail.clear()
            if len(choices) > 1:  # a text to score is another one in each row
                self._by_tail[choices, tail] = found
        return found

    def _is_word_apart(self, tail: str, choices: Sequence[str]) -> bool:
        """Whether writing has a space between prompt and choice: behind a word or `:`, before words of letters.

        Not when a choice begins with a space: then the job's author says where they are. Not before scripts without
        spaces, nor with a tokenizer that does not write a space and a word together.
        """
        last = tail[-1:]
        if not (last in _SPACE_AFTER or (last.isalnum() and not _is_wide(last))) or not last:
            return False
        return all(choice[0].isalnum() and not _is_wide(choice[0]) for choice in choices) and self._writes_spaces

    @cached_property
    def _writes_spaces(self) -> bool:
        return len(self._tokenizer.encode_rendered("\na a")) == len(self._tokenizer.encode_rendered("\na")) + 1

    def _behind(self, choices: Sequence[str], text: str, mark: str | None, ids: Sequence[int]) -> Choices | None:
        """None when the text's own tokens do not end as the prompt's do, or a choice changes them."""
        before = self._tokenizer.encode_rendered(text, mark)
        if before[-2:] != list(ids[-len(before[-2:]) :] if before else []):
            return None
        encoded = [self._tokenizer.encode_rendered(text + choice, mark) for choice in choices]
        if any(after[: len(before)] != before or len(after) == len(before) for after in encoded):
            return None
        return tuple(tuple(after[len(before) :]) for after in encoded)

    def _apart(self, choices: Sequence[str]) -> Choices:
        # After a line break, so that no tokenizer adds the space that it puts before a text's first word.
        before = self._tokenizer.encode_rendered("\n")
        encoded = [self._tokenizer.encode_rendered("\n" + choice) for choice in choices]
        return tuple(
            tuple(after[len(before) :] if after[: len(before)] == before else self._tokenizer.encode_rendered(choice))
            for choice, after in zip(choices, encoded, strict=True)
        )


def row_choices(values: Mapping[str, Any], column: str) -> tuple[str, ...]:
    """The choices that a row brings: a list of texts, or JSON text of one. Raises RowFailure."""
    found = values.get(column)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            raise RowFailure("bad_request", f"choices: {column!r} holds text that is no JSON list") from None
    if not isinstance(found, list | tuple) or not found:
        raise RowFailure("bad_request", f"choices: {column!r} holds no list of texts: {found!r:.100}")
    wrong = [choice for choice in found if not isinstance(choice, str) or not choice]
    if wrong:
        raise RowFailure("bad_request", f"choices: {column!r} holds {wrong[0]!r:.100}; each choice is a text")
    if len(set(found)) != len(found):
        raise RowFailure(
            "bad_request", f"choices: {column!r} holds {next(c for c in found if found.count(c) > 1)!r} twice"
        )
    return tuple(found)


def _twins(choices: Sequence[str], ids: Choices) -> str | None:
    """Two choices that the tokenizer makes the same, in words: normalization, say, makes one of two ways to write é."""
    seen: dict[tuple[int, ...], str] = {}
    for choice, tokens in zip(choices, ids, strict=True):
        if (other := seen.setdefault(tokens, choice)) is not choice:
            return f"{other!a:.50} and {choice!a:.50} have the same tokens, so nothing tells them apart"
    return None


def _tail(text: str) -> str:
    """The last word of a text with the white space before it, or what fits of it.

    No token goes on over the space before a word, so rows that end alike have the same choices behind them.
    """
    end = len(text) - 1
    return text[max(text.rfind(" ", 0, end), text.rfind("\n", 0, end), len(text) - _TAIL_CHARS, 0) :]


def _ended(choices: Choices, end: tuple[int, ...]) -> Choices:
    # Sorted, what begins with a choice stands right behind it.
    if any(one != other and other[: len(one)] == one for one, other in pairwise(sorted(choices))):
        return tuple((*choice, *end) for choice in choices)
    return choices


def _is_wide(character: str) -> bool:
    """Whether it is of a script that is written without spaces, as Chinese and Japanese are."""
    return unicodedata.east_asian_width(character) in "WF"
