"""Special-token text inside data: found before rendering, marked, and kept apart from the template's own markers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Noncharacters: Unicode keeps them for a program's own use, and never gives them a meaning.
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class SpecialText:
    """The texts of a tokenizer's special tokens, and how data that holds one of them is marked.

    A mark is one character, put inside each special text in the data, so that a template's search for its own markers,
    and this package's, can't find it; `unmark` takes it out again. Data that could become special text together with
    its neighbours (`<|im_` beside `end|>`) is marked at that end.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        # Longest first, as the tokenizer matches them. A token of one character has no inside to mark.
        texts = sorted((token for token in tokens if len(token) > 1), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[size:] for text in texts for size in range(1, len(text)))
        self._first_chars = frozenset(text[0] for text in texts)
        self._last_chars = frozenset(text[-1] for text in texts)
        self._longest = max(map(len, texts), default=0)

    def mark(self, values: Mapping[str, Any]) -> tuple[Mapping[str, Any], str | None]:
        """`values` with special text marked, and the mark; the same `values` and None when there is nothing to mark."""
        texts = list(texts_in(list(values.values())))
        if not any(self._is_risky(text) for text in texts):
            return values, None
        mark = next((char for char in _MARKS if not any(char in text for text in texts)), None)
        if mark is None:  # all noncharacters are taken: a data set made for this; the private use area is larger
            used = set().union(*texts)
            mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
        return {key: self._marked(value, mark) for key, value in values.items()}, mark

    def _is_risky(self, text: str) -> bool:
        return self.pattern.search(text) is not None or self._opens(text) or self._closes(text)

    def _opens(self, text: str) -> bool:
        most = min(len(text), self._longest - 1)
        if self._first_chars.isdisjoint(text[len(text) - most :]):
            return False
        return any(text[-size:] in self._heads for size in range(1, most + 1))

    def _closes(self, text: str) -> bool:
        most = min(len(text), self._longest - 1)
        if self._last_chars.isdisjoint(text[:most]):
            return False
        return any(text[:size] in self._tails for size in range(1, most + 1))

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            text = self.pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return (mark if self._closes(value) else "") + text + (mark if self._opens(value) else "")
        if isinstance(value, Mapping):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(item, mark) for item in value]
        return value


def unmark(text: str, mark: str | None) -> str:
    """`text` without marks."""
    return text if mark is None else text.replace(mark, "")


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a value: itself, or those of its items and keys, however deep."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, Mapping):
            pending.extend(item.keys())
            pending.extend(item.values())
        elif isinstance(item, list | tuple):
            pending.extend(item)
