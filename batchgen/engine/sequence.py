"""A request while it runs: its sequences, and the table of the rows they sit in."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batchgen.engine.config import Limits, num_pages
from batchgen.engine.request import FinishReason, Matcher, Request, StopCheck, TokenLogprob
from batchgen.engine.trie import Trie

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

_FEWEST_FORCED = 2
"""Forced tokens that are worth a prefill step. A single one is drawn like any other, by a mask that leaves it alone."""
_NO_LOGPROBS = np.empty(0, np.float64)


@dataclass(slots=True, eq=False)
class Scores:
    """Log-probabilities of a request's targets as they come in, from one trie of them after the other."""

    values: list[tuple[float, ...]]
    missing: int
    """Targets without values."""
    cached_tokens: int = 0

    def add(self, seq: "Sequence") -> bool:
        """Take in the targets of a sequence that is computed. Returns whether that was the last one."""
        assert seq.trie is not None
        for target, values in zip(seq.targets, seq.trie.by_target(seq.edge_logprobs), strict=True):
            self.values[target] = values
        self.missing -= len(seq.targets)
        return self.missing == 0


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request, or the prompt with targets to score.

    `fill` are the tokens to compute before anything is drawn: the prompt; when scoring, the nodes of `trie` too; after
    a preemption or forced tokens, the output so far too. `branches` are further samples: they are forked from this one,
    the leader, when its prompt is computed.
    """

    request: Request
    sample: int
    prompt_length: int
    fill: Tokens
    max_outputs: int
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    page_hashes: list[bytes]
    branches: list["Sequence"] = field(default_factory=list)
    scores: Scores | None = None
    trie: Trie | None = None
    targets: list[int] = field(default_factory=list)
    """Numbers of the targets in the trie."""
    edge_logprobs: npt.NDArray[np.float64] = field(default_factory=lambda: _NO_LOGPROBS)
    """Of the edges of the trie, as they come in."""
    stop_check: StopCheck | None = None
    matcher: Matcher | None = None
    num_forced: int = 0
    """Outputs at the end that were not drawn but had to come, and whose KV is missing."""
    kept_tokens: int = 0
    """First prompt tokens whose pages are kept for the next sequence to be admitted."""
    is_first: bool = True
    """Of the leaders of a request: the one whose prompt tokens count as the request's."""

    row: int = -1
    order: int = -1
    """Counts admissions: the newest is preempted first."""
    promised: int = 0
    """Pages set aside for this sequence that it does not have yet."""
    preempted: bool = False
    finished: bool = False
    cached_tokens: int = 0
    outputs: list[int] = field(default_factory=list)
    """Tokens drawn. While the sequence runs, new ones are in the table of rows until somebody has to look at them."""
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def scoring(self) -> bool:
        """Whether this sequence scores targets and draws nothing."""
        return self.scores is not None

    @property
    def watched(self) -> bool:
        """Whether each drawn token needs a look on the host, not only one that may end the answer."""
        return bool(self.stop_check or self.matcher) or self.request.params.logprobs is not None

    def constrain(self, matcher: Matcher) -> None:
        """Follow a grammar from the start. What every answer begins with is filled behind the prompt, nothing drawn."""
        self.matcher = matcher
        if self.request.params.logprobs is None:
            self.outputs = matcher.forced_tokens()[: self.max_outputs - 1]
            matcher.accept(self.outputs)
            if self.outputs and matcher.is_complete:  # a sequence draws one token at least
                matcher.rollback(1)
                self.outputs.pop()
            self.fill_outputs()

    def fill_outputs(self) -> None:
        """Compute the output so far with the prompt."""
        self.fill = np.concatenate((self.fill[: self.prompt_length], np.array(self.outputs, np.int32)))

    def accept(self, token: int, logprob: TokenLogprob | None, *, allowed: bool = True) -> FinishReason | None:
        """Take in the next drawn token, and what must follow it. Returns why the answer ends with it, or None.

        The matcher has taken the token in already, and `allowed` is what it said. A stop check is asked after every
        token, but before `min_tokens` its word does not count.
        """
        self.num_forced = 0
        if token in self.stop_ids:
            if self.matcher is not None and not self.matcher.is_accepting:
                return "error"
            return "eos" if token in self.eos_ids else "stop"
        self.outputs.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.stop_check is not None:
            keep = self.stop_check(self.outputs)
            if keep is not None and len(self.outputs) >= self.request.params.min_tokens:
                del self.outputs[keep:], self.logprobs[keep:]
                return "stop"
        if self.matcher is not None:
            if not allowed:
                return "error"
            self._force(self.matcher)
            if self.matcher.is_complete:
                return "stop"
        return "length" if len(self.outputs) >= self.max_outputs else None

    def _force(self, matcher: Matcher) -> None:
        """Take in the tokens for which there is no choice, unless each one's log-probability is wanted."""
        if self.request.params.logprobs is not None:
            return
        forced = matcher.forced_tokens()[: self.max_outputs - len(self.outputs)]
        if not forced:
            return
        matcher.accept(forced)
        if len(forced) < _FEWEST_FORCED and not matcher.is_complete:
            matcher.rollback(len(forced))
            forced = []
        self.outputs += forced
        self.num_forced = len(forced)


class RowTable:
    """Where each running sequence stands, one row a sequence, in arrays. A sequence keeps its row while it runs.

    `block_table[row, :num_pages[row]]` are its pages, `computed[row]` the tokens whose KV is written when every
    launched step has run. The logits of the token at `first_position[row]` give output 0, those at `last_position[row]`
    the last one. `drawn[row]` are the output tokens that the host has seen since the sequence came into the row.
    """

    def __init__(self, limits: Limits) -> None:
        rows = limits.max_rows
        self.block_table = np.zeros((rows, num_pages(limits.max_length, limits.page_size)), np.int32)
        self.num_pages = np.zeros(rows, np.int64)
        self.computed = np.zeros(rows, np.int64)
        self.first_position = np.zeros(rows, np.int64)
        self.last_position = np.zeros(rows, np.int64)
        self.drawn = np.zeros((rows, limits.max_length), np.int32)
        self._stop_ids = np.full((rows, 4), -1, np.int64)
        self._watched = np.zeros(rows, np.bool_)
        self.constrained = np.zeros(rows, np.bool_)
        self._free = list(range(rows - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def num_free(self) -> int:
        """Rows that no sequence sits in."""
        return len(self._free)

    def place(self, seq: Sequence, pages: list[int], computed: int) -> None:
        """Give a sequence a row, its first pages and the number of tokens that they hold already."""
        row = seq.row = self._free.pop()
        self._taken.add(row)
        self.num_pages[row] = 0
        self.append_pages(row, pages)
        self.computed[row] = computed
        self.first_position[row] = seq.prompt_length - 1
        self.last_position[row] = seq.prompt_length + seq.max_outputs - 2
        self._watched[row] = seq.watched
        self.constrained[row] = seq.matcher is not None
        if len(seq.stop_ids) > self._stop_ids.shape[1]:
            missing = len(seq.stop_ids) - self._stop_ids.shape[1]
            self._stop_ids = np.pad(self._stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self._stop_ids[row] = -1
        self._stop_ids[row, : len(seq.stop_ids)] = list(seq.stop_ids)

    def put_tokens(self, rows: Ints, index: Ints, tokens: Ints) -> npt.NDArray[np.bool_]:
        """Note output number `index` of each row. Returns which need a look: answers that may end, or are watched.

        A row may have a new sequence by now, and the token is a late one of the old one's. It does no harm: the new
        one's own tokens come later, and write over it.
        """
        self.drawn[rows, index] = tokens
        look = self._watched[rows] | (self.first_position[rows] + index >= self.last_position[rows])
        look |= (self._stop_ids[rows] == tokens[:, None]).any(1)
        return look

    def num_drawn(self, row: int) -> int:
        """Tokens that all launched steps have drawn for a row."""
        return int(self.computed[row] - self.first_position[row])

    def fetch_tokens(self, seq: Sequence, end: int) -> None:
        """Bring a sequence's outputs up to number `end`, that one left out."""
        seq.outputs += self.drawn[seq.row, len(seq.outputs) : end].tolist()

    def append_pages(self, row: int, pages: list[int]) -> None:
        """More pages at the end of a sequence."""
        start = self.num_pages[row]
        self.block_table[row, start : start + len(pages)] = pages
        self.num_pages[row] = start + len(pages)

    def pages(self, row: int) -> list[int]:
        """The pages of a row, in order."""
        pages: list[int] = self.block_table[row, : self.num_pages[row]].tolist()
        return pages

    def remove(self, seq: Sequence) -> list[int]:
        """Take a sequence out of its row and return its pages."""
        pages = self.pages(seq.row)
        self.num_pages[seq.row] = 0
        self._taken.remove(seq.row)
        self._free.append(seq.row)
        seq.row = -1
        return pages

    def tables(self) -> Iterator[list[int]]:
        """The pages of every row in use."""
        return map(self.pages, self._taken)
