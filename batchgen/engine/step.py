"""What one step computes, as the scheduler decides it and the batch is built from it."""

from typing import NamedTuple

import numpy as np

from batchgen.engine.sequence import Ints, Sequence

NO_COPIES: Ints = np.empty((2, 0), np.int64)


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence's fill, in one prefill step; `branches` are forked from the sequence in it."""

    seq: Sequence
    start: int
    end: int
    branches: list[Sequence]


class Step(NamedTuple):
    """What one step computes: chunks of prompts, or else the next token of each of `sequences`, which sit in `rows`.

    `copies` are int64 [2, N]: slots whose keys and values other sequences take over, from and to. In halves of a step
    all of them are copied twice: what the first half copies too early, the second one copies again.
    """

    chunks: list[Chunk]
    sequences: list[Sequence]
    rows: Ints
    copies: Ints

    def halves(self) -> "list[Step]":
        """Two steps that together come to this one when they run in this order; none when it is a single token."""
        if self.sequences:
            half = len(self.sequences) // 2
            parts = [(self.sequences[:half], self.rows[:half]), (self.sequences[half:], self.rows[half:])]
            return [Step([], sequences, rows, self.copies) for sequences, rows in parts] if half else []
        half = len(self.chunks) // 2
        first, second = self.chunks[:half], self.chunks[half:]
        if not half:
            seq, start, end, branches = self.chunks[0]
            if end - start == 1:
                return []
            middle = (start + end) // 2
            first, second = [Chunk(seq, start, middle, [])], [Chunk(seq, middle, end, branches)]
        return [Step(first, [], self.rows, self.copies), Step(second, [], self.rows, self.copies)]
