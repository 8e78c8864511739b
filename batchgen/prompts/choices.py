"""The token ids of a job's choices, as the model would see them after a prompt."""

from collections.abc import Sequence

from batchgen.prompts.tokenizer import Tokenizer

_TAIL_CHARS = 64
_CACHE_SIZE = 4096

Choices = tuple[tuple[int, ...], ...]


class ChoiceEncoder:
    """Encodes each choice behind a prompt. Where one begins another, all end with `eos_id`, to tell them apart.

    Elsewhere the end is left out: how likely the model is to stop after a label says nothing of the label, and behind a
    raw prompt it seldom would.

    Prompt and choice are tokenized together, and the prompt's tokens taken off the front. Where they would merge over
    the border (a prompt that ends in a space, say), the model has read the prompt's tokens already: then the choice is
    tokenized as the text that follows them.
    """

    def __init__(self, choices: Sequence[str], tokenizer: Tokenizer, eos_id: int | None) -> None:
        self._choices = tuple(choices)
        self._tokenizer = tokenizer
        self._end = () if eos_id is None else (eos_id,)
        self.longest = max(map(len, self._ended(self._apart())))
        """Tokens of the longest choice, with its end where it has one."""
        self._by_tail: dict[str, Choices] = {}

    def encode(self, text: str, mark: str | None, ids: Sequence[int]) -> Choices:
        """The choices' ids behind the prompt `text`, whose ids are `ids`."""
        tail = text[-_TAIL_CHARS:]
        found = self._by_tail.get(tail)
        if found is None:
            found = self._ended(self._behind(tail, mark, ids) or self._behind(text, mark, ids) or self._apart())
            if len(self._by_tail) >= _CACHE_SIZE:
                self._by_tail.clear()
            self._by_tail[tail] = found
        return found

    def _behind(self, text: str, mark: str | None, ids: Sequence[int]) -> Choices | None:
        """None when the text's own tokens do not end as the prompt's do, or a choice changes them."""
        before = self._tokenizer.encode_rendered(text, mark)
        if before[-2:] != list(ids[-len(before[-2:]) :] if before else []):
            return None
        encoded = [self._tokenizer.encode_rendered(text + choice, mark) for choice in self._choices]
        if any(after[: len(before)] != before or len(after) == len(before) for after in encoded):
            return None
        return tuple(tuple(after[len(before) :]) for after in encoded)

    def _apart(self) -> Choices:
        # After a line break, so that no tokenizer adds the space that it puts before a text's first word.
        before = self._tokenizer.encode_rendered("\n")
        encoded = [self._tokenizer.encode_rendered("\n" + choice) for choice in self._choices]
        return tuple(
            tuple(after[len(before) :] if after[: len(before)] == before else self._tokenizer.encode_rendered(choice))
            for choice, after in zip(self._choices, encoded, strict=True)
        )

    def _ended(self, choices: Choices) -> Choices:
        if any(one != other and other[: len(one)] == one for one in choices for other in choices):
            return tuple((*choice, *self._end) for choice in choices)
        return choices
