"""Rows between the engine and the disk: they wait in memory for seconds, then in the journal, until a part is whole."""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from batchgen.data.columns import Columns, to_table
from batchgen.data.journal import Journal
from batchgen.data.layout import PartRange
from batchgen.data.rows import OutputRow
from batchgen.data.writer import Task, Writer

CHECKPOINT_S = 10.0
MOST_BYTES = 16 * 2**20
"""Rows of this size in memory are journalled before their time."""
_GUARD_S = 1.0
_ROW_BYTES = 500
_LOGPROB_BYTES = 400  # of each alternative of each token, as Python objects

WritePart = Callable[[PartRange, list[pa.Table]], None]


class Checkpoints:
    """Journals rows every `seconds` and hands whole parts to `write_part`, both in a thread of their own.

    `write_note` is called there every `seconds` too.

    When that fails, the next call raises the error, and nothing more is written. Close it with `stop`.
    """

    def __init__(
        self,
        journal: Journal,
        columns: Columns,
        write_part: WritePart,
        seconds: float,
        write_note: Callable[[], None] = lambda: None,
    ) -> None:
        self._journal = journal
        self._columns = columns
        self._write_part = write_part
        self._write_note = write_note
        self._writer = Writer()
        self._guard = threading.Lock()
        self._waiting: dict[int, list[OutputRow]] = {}
        self._handed: deque[dict[int, list[OutputRow]]] = deque()  # to the writer, and not safe yet
        self._num_bytes = 0
        self.num_written = 0
        """Writes of rows that are done."""
        self._stopped = threading.Event()
        self._clock = threading.Thread(target=self._tick, args=[seconds], name="batchgen-checkpoint", daemon=True)
        self._clock.start()

    def add(self, number: int, row: OutputRow) -> None:
        """Take a row of part `number`. Raises what went wrong with an earlier write."""
        self._writer.check()
        with self._guard:
            self._waiting.setdefault(number, []).append(row)
            self._num_bytes += _num_bytes(row)
            if self._num_bytes >= MOST_BYTES:
                self._writer.submit(self._take_waiting())

    def complete(self, part: PartRange) -> None:
        """All rows of this part came: write it. Raises what went wrong with an earlier write."""
        with self._guard:
            rows = self._waiting.pop(part.number, [])
            self._num_bytes -= sum(map(_num_bytes, rows))
            self._handed.append({part.number: rows})
            self._writer.submit(partial(self._make_part, part, rows))

    def checkpoint(self) -> None:
        """Hand what waits in memory to the journal. Raises what went wrong with an earlier write."""
        with self._guard:
            if self._waiting:
                self._writer.submit(self._take_waiting())

    def drain(self) -> None:
        """Wait until all that was handed over is safe. Raises what went wrong with a write."""
        self._writer.drain()

    def flush(self) -> None:
        """Make everything safe that came so far. Raises what went wrong with a write, unless a call did already."""
        if not self._writer.told:
            self.checkpoint()
            self.drain()

    @property
    def gave_up(self) -> bool:
        """Whether a write failed, so that there are no more; known for certain after `stop`."""
        return self._writer.gave_up

    def unsafe_rows(self) -> list[OutputRow]:
        """The rows that are neither in the journal nor in a part. From any thread, also while a write is stuck."""
        free = self._guard.acquire(timeout=_GUARD_S)  # whoever waits for the writer holds it, and changes nothing
        try:
            return [row for batch in [*self._handed, self._waiting] for rows in batch.values() for row in rows]
        finally:
            if free:
                self._guard.release()

    def stop(self) -> None:
        """End the threads. What was not written yet is dropped."""
        self._stopped.set()
        self._clock.join()  # first: it hands tasks to the writer
        self._writer.stop()

    def _take_waiting(self) -> Task:
        waiting, self._waiting, self._num_bytes = self._waiting, {}, 0
        self._handed.append(waiting)
        return partial(self._append, waiting)

    def _append(self, waiting: dict[int, list[OutputRow]]) -> None:
        self._journal.append((number, to_table(self._columns, rows)) for number, rows in waiting.items())
        self._done()

    def _make_part(self, part: PartRange, rows: list[OutputRow]) -> None:
        tables = self._journal.tables(part.number)
        self._write_part(part, [*tables, to_table(self._columns, rows)])
        self._journal.forget(part.number)
        self._done()

    def _done(self) -> None:
        self._handed.popleft()
        self.num_written += 1

    def _tick(self, seconds: float) -> None:
        """What goes wrong here is raised by the next call of whoever adds rows."""
        while not self._stopped.wait(seconds):
            with self._guard:
                if not self._writer.has_room:
                    continue  # the disk is slow, and has enough to do
                if self._waiting:
                    self._writer.offer(self._take_waiting())
                self._writer.offer(self._write_note)


def _num_bytes(row: OutputRow) -> int:
    """About what a row takes in memory."""
    logprobs = row.logprobs
    alternatives = 0 if not logprobs else len(logprobs) * (1 + len(logprobs[0]["top"]))
    return _ROW_BYTES + len(row.output or "") + _LOGPROB_BYTES * alternatives
