"""Which rows of a job are there, in parts and on their way to one."""

from collections.abc import Iterator

import pyarrow as pa

from batchgen.data.layout import Layout, PartRows
from batchgen.data.parts import PartInfo


class Coverage:
    """`parts` are the finished ones by number, `begun` those of which some rows are there."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.parts: dict[int, PartInfo] = {}
        self.begun: dict[int, PartRows] = {}

    def begin(self, number: int) -> PartRows:
        """The rows of a part that is not finished."""
        begun = self.begun.get(number)
        if begun is None:
            begun = self.begun[number] = PartRows(self.layout.part(number))
        return begun

    def mark(self, number: int, rows: pa.Table) -> None:
        """Note that these rows of a part are there already."""
        if number not in self.parts:
            self.begin(number).mark_whole(rows["row"].to_numpy(), rows["sample"].to_numpy())

    def finish(self, info: PartInfo, number: int) -> None:
        """Note that a part is written."""
        self.parts[number] = info
        self.begun.pop(number, None)

    def is_whole(self, number: int) -> bool:
        """Whether all rows of a part are there."""
        begun = self.begun.get(number)
        return number in self.parts or (begun is not None and begun.num_missing == 0)

    def pending(self) -> list[range]:
        """The input rows still to do, in order, neighbours joined."""
        ranges: list[range] = []
        for rows in self._missing_rows():
            if ranges and ranges[-1].stop == rows.start:
                ranges[-1] = range(ranges[-1].start, rows.stop)
            else:
                ranges.append(rows)
        return ranges

    def missing(self) -> Iterator[tuple[int, int]]:
        """(row, sample) of those that did not come, in order."""
        for number in range(self.layout.num_parts):
            if number not in self.parts:
                yield from (self.begun.get(number) or PartRows(self.layout.part(number))).missing()

    def _missing_rows(self) -> Iterator[range]:
        for number in range(self.layout.num_parts):
            begun, part = self.begun.get(number), self.layout.part(number)
            if begun is not None:
                yield from begun.missing_rows()
            elif number not in self.parts and part.start < part.stop:
                yield range(part.start, part.stop)
