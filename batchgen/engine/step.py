"""What one step computes, as the scheduler decides it and the batch is built from it."""

from typing import NamedTuple

from batchgen.engine.sequence import Ints, Sequence


class Chunk(NamedTuple):
    """Tokens [start, end) of a sequence's fill, in one prefill step; `branches` are forked from the sequence in it."""

    seq: Sequence
    start: int
    end: int
    branches: list[Sequence]


class Step(NamedTuple):
    """What one step computes: chunks of prompts, or else the next token of each of `sequences`, which sit in `rows`.

    `copies` are (source, target) pages to copy when the step has run: the page that a prompt ends inside, for forks.
    """

    chunks: list[Chunk]
    sequences: list[Sequence]
    rows: Ints
    copies: list[tuple[int, int]]

    def halves(self) -> "list[Step]":
        """Two steps that together come to this one when they run in this order; none when it is a single token."""
        if self.sequences:
            half = len(self.sequences) // 2
            parts = [(self.sequences[:half], self.rows[:half]), (self.sequences[half:], self.rows[half:])]
            return [Step([], sequences, rows, []) for sequences, rows in parts] if half else []
        half = len(self.chunks) // 2
        first, second = self.chunks[:half], self.chunks[half:]
        if not half:
            seq, start, end, branches = self.chunks[0]
            if end - start == 1:
                return []
            middle = (start + end) // 2
            first, second = [Chunk(seq, start, middle, [])], [Chunk(seq, middle, end, branches)]
        return [Step(first, [], self.rows, []), Step(second, [], self.rows, self.copies)]
