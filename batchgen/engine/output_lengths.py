"""How many tokens an answer will have: learned from those that are finished."""

from collections import deque

from batchgen.engine.sequence import Sequence

_LEARN_FROM, _LEARN_EVERY = 64, 16
"""Answers that must be finished before their lengths count, and how often the count is renewed."""


class OutputLengths:
    """How long the answer of a new sequence is expected to be: the 95th percentile of recent ones, or max_tokens."""

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._recent: deque[int] = deque(maxlen=512)
        self._num_seen = 0
        self._expected: int | None = None

    def add(self, length: int) -> None:
        """Learn from a finished answer."""
        self._recent.append(length)
        self._num_seen += 1
        if self._num_seen >= _LEARN_FROM and self._num_seen % _LEARN_EVERY == 0:
            self._expected = sorted(self._recent)[len(self._recent) * 95 // 100]

    def expect(self, seq: Sequence) -> int:
        """Output tokens to set pages aside for. One that was preempted has shown that it needs more than expected."""
        if seq.scoring or seq.preempted:
            return seq.max_outputs
        if self._share is not None:
            return round(seq.max_outputs * self._share)
        return seq.max_outputs if self._expected is None else min(seq.max_outputs, self._expected)
