"""What happens to prompts that leave no room for an answer: refused early, or one field cut by exact tokens."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from batchgen.job.spec import Truncate
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.render import Rendered
from batchgen.prompts.tokenizer import Tokenizer

_CHARS_PER_TOKEN = 16  # more than any prose needs: texts up to here are always counted exactly
_SLICE_CHARS = 2**20
_MOST_ATTEMPTS = 64


class Draft(NamedTuple):
    """A prompt that may still be too long: its token ids, and the rendered text that they came from."""

    ids: list[int]
    rendered: Rendered
    has_own_bos: bool = False


class Cut(NamedTuple):
    """A prompt that fits, and how many tokens its field lost."""

    draft: Draft
    truncated_tokens: int


def too_long(
    num_tokens: int, max_length: int, room: int, *, at_least: bool = False, what: str = "the answer"
) -> RowFailure:
    """The error of a prompt of `num_tokens` tokens that must leave `room` for `what`."""
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return RowFailure(
        "prompt_too_long",
        f"the prompt has {count} tokens; max_length is {max_length}, with at least {room} of them for {what}",
    )


def window_chars(encode: Callable[[str], list[int]], text: str, limit: int, *, tail: bool = False) -> tuple[int, int]:
    """How much of a text must be tokenized to know that it is over `limit` tokens: (characters, their tokens).

    Tokens of a part differ from those of the whole at the cut only, so a part with twice the limit settles it.
    """
    size = _CHARS_PER_TOKEN * limit + 2**16
    while size < len(text):
        num_tokens = len(encode(text[-size:] if tail else text[:size]))
        if num_tokens > 2 * limit:
            return size, num_tokens
        size *= 4
    return len(text), 0


class FieldCutter:
    """Cuts one column's text until the prompt fits."""

    def __init__(self, truncate: Truncate, tokenizer: Tokenizer) -> None:
        self._field = truncate.field
        self._keep = truncate.keep
        self._tokenizer = tokenizer

    def cut(self, values: Mapping[str, Any], draft: Callable[[Mapping[str, Any]], Draft], limit: int) -> Cut | None:
        """The longest cut of the field with which `draft(values)` has at most `limit` tokens; None when none has."""
        text = values.get(self._field)
        if not isinstance(text, str):
            return None
        size, _ = window_chars(self._tokenizer.encode_plain, text, limit, tail=self._keep == "tail")
        window = text[len(text) - size :] if self._keep == "tail" else text[:size]
        spans = [span for _, span in self._tokenizer.encode_offsets(window)]
        best = draft({**values, self._field: ""})
        if len(best.ids) > limit:
            return None
        low, high = 0, len(spans)
        # Each token of the field is a token of the prompt, or several where the field is used twice: that bounds the
        # cut from both sides, and with one use it names the cut at once.
        floor, ceiling = low, limit - len(best.ids)
        for _ in range(_MOST_ATTEMPTS):
            if low >= high:
                break
            guess = min(max((floor + ceiling + 1) // 2, low + 1), high)
            tried = draft({**values, self._field: self._kept(window, spans, guess)})
            over = len(tried.ids) - limit
            if over > 0:
                high = guess - 1
                floor, ceiling = max(floor, guess - over), min(ceiling, high)
            else:
                low, best = guess, tried
                floor, ceiling = low, min(ceiling, low - over)
        total = len(spans) if size == len(text) else self._count(text)
        return Cut(best, total - low)

    def _kept(self, window: str, spans: list[tuple[int, int]], num_tokens: int) -> str:
        return window[: spans[num_tokens - 1][1]] if self._keep == "head" else window[spans[-num_tokens][0] :]

    def _count(self, text: str) -> int:
        parts = (text[start : start + _SLICE_CHARS] for start in range(0, len(text), _SLICE_CHARS))
        return sum(len(self._tokenizer.encode_plain(part)) for part in parts)
