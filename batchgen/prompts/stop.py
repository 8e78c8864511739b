"""Stop strings: found across token borders while an answer grows, and cut off its text at the end."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from batchgen.prompts.text import Detokenizer, decode_utf8


class Answer(NamedTuple):
    """The text of a finished answer.

    `num_tokens` is how many of its tokens the text needs: the fewest that spell it. The token in which a stop string
    begins counts if it also holds text before it. Cut token ids and logprobs to this length and they end where the text
    ends. `stop` is the stop string that ended the answer.
    """

    text: str
    num_tokens: int
    stop: str | None = None


class StopStrings:
    """The stop strings of a job.

    A stop string is looked for in the generated text alone, as bytes: no Unicode normalisation, so U+00E9 and `e` with
    U+0301 are two texts. The token that completes one ends the answer; of several then there, the one that begins first
    wins, and of those that begin together the longest. One that is complete before `min_tokens` tokens is no stop.
    """

    def __init__(
        self, stops: Sequence[str], detokenizer: Detokenizer, *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self.stops = tuple(sorted(set(stops), key=lambda stop: len(stop.encode()), reverse=True))
        self._bytes = [stop.encode() for stop in self.stops]
        self._any = re.compile(b"|".join(map(re.escape, self._bytes)) or b"(?!)")
        self._longest = len(self._bytes[0]) if self._bytes else 0
        self._detokenizer = detokenizer
        self._include_stop = include_stop
        self._min_tokens = min_tokens

    def check(self, first: int = 0) -> "StopState":
        """A fresh StopCheck for the engine: one for each sample. `Request(stop_check=stops.check)`.

        It looks at tokens from number `first` on.
        """
        return StopState(self, first)

    def advance(self, tail: bytes, token_id: int, num_tokens: int) -> bytes | None:
        """The new tail when a token was added to a text that ends in `tail`; None when it completes a stop string.

        The tail is one byte shorter than the longest stop string. A match that this token completes begins at most that
        far before it, so no more of the text has to be looked at; and every match is seen with the token that
        completes it, so none lies in the tail.
        """
        piece = self._detokenizer.piece(token_id)
        window = tail + piece
        if num_tokens >= self._min_tokens and self._any.search(window) and self._first(window, len(tail)) is not None:
            return None
        return window[-(self._longest - 1) :] if self._longest > 1 else b""

    def finish(self, token_ids: Sequence[int], *, is_stopped: bool) -> Answer:
        """The answer of these token ids; `is_stopped`: its last token completed a stop string."""
        pieces = [self._detokenizer.piece(token_id) for token_id in token_ids]
        data = b"".join(pieces)
        found = self._first(data, len(data) - len(pieces[-1])) if is_stopped and pieces else None
        if found is None:
            return Answer(decode_utf8(data), len(pieces))
        start, place = found
        end = start + (len(self._bytes[place]) if self._include_stop else 0)
        num_tokens = size = 0
        while size < end:
            size += len(pieces[num_tokens])
            num_tokens += 1
        return Answer(decode_utf8(data[:end]), num_tokens, self.stops[place])

    def _first(self, data: bytes, old: int) -> tuple[int, int] | None:
        """Where the first stop string begins that ends beyond `old` bytes, and which one it is."""
        best: tuple[int, int] | None = None
        for place, stop in enumerate(self._bytes):  # longest first: the earlier one wins a tie
            start = data.find(stop, max(0, old - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = start, place
        return best


class StopState:
    """A StopCheck (see batchgen.engine.request) that looks at each token once."""

    def __init__(self, stops: StopStrings, first: int) -> None:
        self._stops = stops
        self._num_seen = first
        self._tail = b""

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens to keep when a stop string is complete (up to the one that completes it), else None."""
        while self._num_seen < len(token_ids):
            tail = self._stops.advance(self._tail, token_ids[self._num_seen], self._num_seen + 1)
            self._num_seen += 1
            if tail is None:
                return self._num_seen
            self._tail = tail
        return None
