"""The thinking part of an answer, told from the rest by the model's own markers."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.errors import JobFileError
from batchgen.job.attempts import Reasoning
from batchgen.prompts.stop import StopState, StopStrings
from batchgen.prompts.text import Detokenizer, decode_utf8
from batchgen.prompts.tokenizer import Tokenizer

KNOWN = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
)
_TAIL_TOKENS = 64


class Markers(NamedTuple):
    """The texts around a thinking part."""

    start: str
    end: str


def find_markers(reasoning: Reasoning, tokenizer: Tokenizer, chat_template: str | None, where: str) -> Markers:
    """The job's markers, else the known ones that the model has: as tokens, or in its chat template.

    Raises JobFileError when there are none.
    """
    if reasoning.start and reasoning.end:
        return Markers(reasoning.start, reasoning.end)
    added = {token.content for token in tokenizer.backend.get_added_tokens_decoder().values()}
    found = [
        *(pair for pair in KNOWN if added.issuperset(pair)),
        *(pair for pair in KNOWN if chat_template is not None and pair[1] in chat_template),
    ]
    if not found:
        known = ", ".join(start for start, _ in KNOWN)
        raise JobFileError(
            f"{where}: the model's tokenizer and chat template have no marker of thinking known here ({known}); "
            "write the texts around it as `reasoning: {start: ..., end: ...}`, or leave the field out"
        )
    start, end = found[0]
    return Markers(reasoning.start or start, reasoning.end or end)


class Split(NamedTuple):
    """An answer's tokens, taken apart.

    `thought` is the text between the markers, None where there is none. Tokens from `first` on are the answer, with
    `left_over` before them: what the token that ended the thinking has behind the marker. `is_open`: the thinking did
    not end, and there is no answer.
    """

    thought: str | None
    first: int
    left_over: str
    is_open: bool


class Thinking:
    """Finds the thinking part of answers. `budget` is how many tokens it may have; None for as many as it takes."""

    def __init__(self, markers: Markers, tokenizer: Tokenizer, budget: int | None) -> None:
        self.budget = budget
        self.end_ids = tokenizer.encode_rendered(markers.end)
        self.detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        self.start, self.end = (text.encode() for text in markers)

    def opened_by(self, prompt_ids: npt.NDArray[np.int32]) -> bool:
        """Whether a prompt ends with the start of a thinking part, as some chat templates make it."""
        tail = b"".join(map(self.detokenizer.piece, prompt_ids[-_TAIL_TOKENS:].tolist()))
        return tail.rstrip().endswith(self.start)

    def split(self, token_ids: Sequence[int], *, opened: bool) -> Split:
        """Take an answer apart; `opened`: its prompt has begun the thinking."""
        scan = _Scan(self, opened)
        for token_id in token_ids:
            scan.feed(token_id)
            if scan.first is not None:
                break
        data = bytes(scan.data)
        if not scan.is_thinking:
            return Split(None, 0, "", is_open=False)
        begin = scan.begin
        if scan.first is None:
            return Split(decode_utf8(data[begin:]).strip(), len(token_ids), "", is_open=True)
        left_over = decode_utf8(data[scan.close + len(self.end) :])
        return Split(decode_utf8(data[begin : scan.close]).strip(), scan.first, left_over, is_open=False)

    def check(self, stops: StopStrings | None, *, opened: bool) -> Callable[[], "ThinkingState"]:
        """Makes StopChecks: they end an answer at a stop string, and a thinking part when its budget is used up.

        Without `stops` they end all that is generated where the answer would begin.
        """
        return lambda: ThinkingState(self, stops, opened)


class _Scan:
    """Reads an answer up to the end of its thinking part, or to where it shows that it has none.

    `is_thinking` is None as long as that can't be said. `first` is then the answer's first token.
    """

    def __init__(self, thinking: Thinking, opened: bool) -> None:
        self._thinking = thinking
        self.is_thinking: bool | None = True if opened else None
        self.data = bytearray()
        self.begin = self.close = self.num_tokens = 0
        self.first: int | None = None

    def feed(self, token_id: int) -> None:
        """Look at the next token."""
        start, end = self._thinking.start, self._thinking.end
        seen = len(self.data)
        self.data += self._thinking.detokenizer.piece(token_id)
        self.num_tokens += 1
        if self.is_thinking is None:
            text = self.data.lstrip()
            if text.startswith(start):
                self.is_thinking = True
                self.begin = seen = len(self.data) - len(text) + len(start)
            elif not start.startswith(text):
                self.is_thinking, self.first = False, 0
        if self.is_thinking:
            self.close = self.data.find(end, max(self.begin, seen - len(end) + 1))
            if self.close >= 0:
                self.first = self.num_tokens


class ThinkingState:
    """A StopCheck (see batchgen.engine.request): stop strings count in the answer alone, the budget before it."""

    def __init__(self, thinking: Thinking, stops: StopStrings | None, opened: bool) -> None:
        self._stops, self._budget = stops, thinking.budget
        self._scan = _Scan(thinking, opened)
        self._answer: StopState | None = None

    def __call__(self, token_ids: Sequence[int]) -> int | None:
        """How many tokens to keep when the answer ends here, or its thinking has to."""
        scan = self._scan
        while scan.first is None and scan.num_tokens < len(token_ids):
            scan.feed(token_ids[scan.num_tokens])
        if scan.first is None:
            spent = scan.is_thinking and self._budget is not None and len(token_ids) >= self._budget
            return len(token_ids) if spent else None
        if self._stops is None:
            return len(token_ids)
        if self._answer is None:
            self._answer = self._stops.check(scan.first)
        return self._answer(token_ids)
