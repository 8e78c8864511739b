"""Which output rows lie in which part, and which of them are there."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from batchgen.errors import InternalError

PARQUET = ".parquet"
TEXT_SUFFIXES = {"none": ".jsonl", "gzip": ".jsonl.gz", "zstd": ".jsonl.zst"}
"""How parts of text end, by their compression."""


class PartRange(NamedTuple):
    """Which rows a part holds: part `number` of `num_parts`, input rows [start, stop), `n` samples each."""

    number: int
    num_parts: int
    start: int
    stop: int
    n: int
    suffix: str = PARQUET

    @property
    def name(self) -> str:
        """The part's final file name."""
        return f"part-{self.number:05d}-of-{self.num_parts:05d}{self.suffix}"

    @property
    def num_output_rows(self) -> int:
        """Rows in the file: one per input row and sample."""
        return (self.stop - self.start) * self.n

    def place(self, row: int, sample: int) -> int:
        """Where an output row lies in the file."""
        return (row - self.start) * self.n + sample


@dataclass(frozen=True)
class Layout:
    """The parts of a job. `extended_at` are the numbers of input rows at which new files were added to the input:

    a part never spans such a border, so the parts before it stay as they are, and keep their names. `suffix` ends them.
    """

    num_rows: int
    n: int
    part_rows: int
    extended_at: tuple[int, ...] = ()
    suffix: str = PARQUET

    @property
    def num_parts(self) -> int:
        """Number of part files; an empty input has one empty part, so that readers find the columns."""
        return self._first_parts[-1]

    def part(self, number: int) -> PartRange:
        """Part `number`, counted from 0."""
        extent = bisect_right(self._first_parts, number) - 1
        start = self._borders[extent] + (number - self._first_parts[extent]) * self.part_rows
        stop = min(start + self.part_rows, self._borders[extent + 1])
        return PartRange(number, self._first_parts[extent + 1], start, stop, self.n, self.suffix)

    def number_of(self, row: int) -> int:
        """The part that holds an input row."""
        extent = bisect_right(self._borders, row) - 1
        return self._first_parts[extent] + (row - self._borders[extent]) // self.part_rows

    @cached_property
    def _borders(self) -> tuple[int, ...]:
        return (0, *self.extended_at, self.num_rows)

    @cached_property
    def _first_parts(self) -> tuple[int, ...]:
        """Number of the first part after each border."""
        sizes = [-(-(stop - start) // self.part_rows) for start, stop in pairwise(self._borders)]
        return (0, *accumulate([max(1, sizes[0]), *sizes[1:]]))


class PartRows:
    """Which rows of a part have come."""

    def __init__(self, part: PartRange) -> None:
        self.part = part
        self.num_missing = part.num_output_rows
        self._here = np.zeros(part.num_output_rows, bool)

    def mark(self, row: int, sample: int) -> None:
        """Note that a row came. Raises InternalError when it came before."""
        place = self.part.place(row, sample)
        if self._here[place]:
            raise InternalError(f"row {row} sample {sample} came back twice")
        self._here[place] = True
        self.num_missing -= 1

    def mark_whole(self, rows: np.ndarray, samples: np.ndarray) -> None:
        """Note what is there already: rows and samples as arrays of equal length."""
        self._here[(rows - self.part.start) * self.part.n + samples] = True

    def begin(self) -> None:
        """Count what `mark_whole` noted: an input row is there when all its samples are."""
        by_row = self._here.reshape(-1, self.part.n)
        by_row[:] = by_row.all(axis=1, keepdims=True)
        self.num_missing = int((~self._here).sum())

    def missing_rows(self) -> Iterator[range]:
        """The input rows of which a sample is missing, as ranges in order."""
        missing = ~self._here.reshape(-1, self.part.n).all(axis=1)
        edges = np.flatnonzero(np.diff(missing, prepend=False, append=False)) + self.part.start
        for start, stop in edges.reshape(-1, 2).tolist():
            yield range(start, stop)

    def missing(self) -> Iterator[tuple[int, int]]:
        """(row, sample) of those that did not come, in order."""
        for place in np.flatnonzero(~self._here).tolist():
            index, sample = divmod(place, self.part.n)
            yield self.part.start + index, sample
