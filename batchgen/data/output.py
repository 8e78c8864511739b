"""The output folder: rows come in any order, and a part gets its final name when all its rows are there."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from types import TracebackType
from typing import Any, NamedTuple, Self

import pyarrow as pa

from batchgen.data.checkpoint import CHECKPOINT_S, Checkpoints
from batchgen.data.columns import NOTHING_ASKED, Asked, Columns, output_columns, to_table
from batchgen.data.coverage import Coverage
from batchgen.data.files import TEMPORARY, OutputFiles
from batchgen.data.journal import Journal
from batchgen.data.layout import PartRange
from batchgen.data.lock import OutputLock
from batchgen.data.manifest import MANIFEST_NAME, Manifest
from batchgen.data.part_files import are_whole, find_parts, part_format, remove_notes
from batchgen.data.parts import DamagedPart, whole_part, without_failed
from batchgen.data.resume import Resume, num_failed
from batchgen.data.rows import OutputRow
from batchgen.data.status import STATUS_NAME, Notes
from batchgen.data.storage import join
from batchgen.data.unsent import forget_unsent, keep_unsent, send_unsent
from batchgen.errors import BatchgenError, InternalError, Stopped

log = logging.getLogger(__name__)

_GO_ON = Resume()
_NAMED = 5  # rows named in a message


class Encoding(NamedTuple):
    """How this run writes parts."""

    version: str
    compression: str


class OutputFolder:
    """The output of one job, open for the rows that are still missing. Close it, or use it in a `with` statement.

    Finished rows wait in memory until the next checkpoint, then in the journal until their part is whole. Parts and
    journal are written in a thread; when that fails, the next call raises the error.
    """

    def __init__(self, files: OutputFiles, manifest: Manifest, columns: Columns, encoding: Encoding) -> None:
        self._files = files
        self._manifest = manifest
        self._columns = columns
        self._encoding = encoding
        self._there = Coverage(manifest.layout)
        self._format = part_format(files, manifest, columns.schema)
        self._writing: _Writing | None = None
        self._notes = Notes()
        self._num_added = 0

    @classmethod
    def open(
        cls,
        url: str,
        *,
        manifest: Manifest,
        carried: pa.Schema,
        asked: Asked = NOTHING_ASKED,
        compression: str = "zstd",
        checkpoint_s: float = CHECKPOINT_S,
        resume: Resume = _GO_ON,
    ) -> Self:
        """Start the job that `manifest` describes in the folder `url`, or go on with it as `resume` says.

        A finished job opens without a lock, and there is nothing to do. Raises JobFileError for a carried column with
        the name of one of ours and for a folder that holds another job, LockedError when another run holds it,
        StorageError for a folder with foreign files and for what the file system refuses.
        """
        files = OutputFiles(url)
        columns = output_columns(carried, asked)
        manifest = manifest.model_copy(update={"columns": {field.name: str(field.type) for field in columns.schema}})
        encoding = Encoding(manifest.batchgen_version, compression)
        stored = resume.stored(files, manifest)
        if stored is not None and resume.is_done(stored) and are_whole(files, stored):
            if OutputLock.sweep(url):
                remove_notes(files)
            return cls(files, stored, columns, encoding)
        files.make_folder()
        lock = OutputLock.acquire(url, takeover=resume.takeover)
        try:
            stored = resume.stored(files, manifest)  # again: another run may just have ended
            if stored is not None and resume.is_done(stored):
                log.warning("%s was finished, but parts are missing or damaged: they are computed again", files.url)
            current = (stored or manifest).reopen()
            files.write(MANIFEST_NAME, current.to_json(), lock)
            output = cls(files, current, columns, encoding)
            output._recover(lock, checkpoint_s, retry_failed=resume.retry_failed)
        except BaseException:
            lock.release()
            raise
        return output

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is stored; the first run's when the job was resumed."""
        return self._manifest

    @property
    def finished(self) -> bool:
        """Whether the job is finished: there is nothing to add, and nothing to finish."""
        return self._manifest.state == "finished"

    @property
    def num_finished_rows(self) -> int:
        """Input rows that are done, in parts or in the journal."""
        return self._manifest.num_rows - sum(len(rows) for rows in self.pending())

    @property
    def num_moves(self) -> int:
        """A count that grows with each row that comes and each write of rows that is done."""
        return self._num_added + (self._writing.checkpoints.num_written if self._writing else 0)

    def pending(self) -> list[range]:
        """The input rows still to do, in order, neighbours joined."""
        return [] if self.finished else self._there.pending()

    def add(self, row: OutputRow) -> None:
        """Take one finished row, in any order; its part is written when it was the last one missing.

        Raises InternalError for a row that is not pending or came before, and what went wrong with an earlier write:
        LockedError when another run took the folder over, StorageError when something can't be written.
        """
        if not (0 <= row.row < self._manifest.num_rows and 0 <= row.sample < self._manifest.n):
            raise InternalError(f"row {row.row} sample {row.sample} came back, but the job has no such row")
        number = self._there.layout.number_of(row.row)
        if self.finished or self._there.is_whole(number):
            raise InternalError(f"row {row.row} sample {row.sample} came back, but its part is finished")
        begun = self._there.begin(number)
        begun.mark(row.row, row.sample)
        self._open.checkpoints.add(number, row)
        self._num_added += 1
        if begun.num_missing == 0:
            self._open.checkpoints.complete(begun.part)

    def checkpoint(self) -> None:
        """Hand the rows that wait in memory to the journal now. Raises what went wrong with an earlier write."""
        self._open.checkpoints.checkpoint()

    def finish(self, report: Mapping[str, Any] | None = None) -> Manifest:
        """Write the finished manifest, with `report` in it, after checking that every row is there.

        The counts in the manifest are sums over all parts, those of earlier runs included. Raises InternalError, naming
        rows, when some are missing, and what went wrong with an earlier write.
        """
        if self.finished:
            return self._manifest
        self._refuse_missing()
        writing = self._open
        layout = self._there.layout
        if self._manifest.num_rows == 0 and not self._there.parts:
            writing.checkpoints.complete(layout.part(0))
        writing.checkpoints.drain()
        parts = tuple(self._there.parts[number] for number in range(layout.num_parts))
        finished = self._manifest.finish(parts, report or {})
        total = self._manifest.num_rows * self._manifest.n
        if sum(finished.rows_by_status.values()) != total:
            raise InternalError(f"{total} output rows were due, but the parts count {finished.rows_by_status}")
        writing.checkpoints.stop()  # it would write another note
        writing.journal.remove()
        self._files.remove(STATUS_NAME)
        self._files.write(MANIFEST_NAME, finished.to_json(), writing.lock)
        remove_notes(self._files)
        forget_unsent(finished.job_id)
        self._manifest = finished
        return finished

    def close(self) -> None:
        """Journal the rows that wait, and give the lock back. Raises what went wrong with a write."""
        try:
            if self._writing is not None:
                self._writing.checkpoints.flush()
        finally:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        match error:
            case None | Stopped():
                self.close()
            case Exception():
                with suppress(BatchgenError):  # most likely the one that is on its way
                    self.close()
            case _:  # a second signal: at once
                self._release()

    def keep_unsent(self) -> None:
        """Keep on this machine what an object store did not take. From any thread, also while a write is stuck."""
        rows = [] if self._files.is_local or self._writing is None else self._writing.checkpoints.unsafe_rows()
        if rows:
            keep_unsent(self._manifest.job_id, to_table(self._columns, rows))

    def _release(self) -> None:
        if self._writing is not None:
            self._writing.checkpoints.stop()
            if self._writing.checkpoints.gave_up:
                self.keep_unsent()
            self._writing.journal.close()
            self._writing.lock.release()
            self._writing = None

    @property
    def _open(self) -> "_Writing":
        if self._writing is None:
            raise InternalError("the output folder was written to after it was closed")
        return self._writing

    def _recover(self, lock: OutputLock, checkpoint_s: float, *, retry_failed: bool) -> None:
        """Find out what earlier runs finished, and remove what a kill left behind."""
        sizes = self._files.sizes()
        for name in filter(TEMPORARY.fullmatch, sizes):
            self._files.remove(name)
        there, job_id, schema = self._there, self._manifest.job_id, self._columns.schema
        there.parts = find_parts(self._files, sizes, self._manifest, self._format)
        journal = Journal(self._files, schema, job_id, lock)
        for number, rows in chain(journal.recover(sizes), send_unsent(journal, job_id, schema, there.layout)):
            there.mark(number, without_failed(rows) if retry_failed else rows)
        for number in there.parts:
            journal.forget(number)
        if retry_failed:
            self._drop_failed(journal)
        write_part, write_note = partial(self._write_part, lock), partial(self._write_note, lock)
        checkpoints = Checkpoints(journal, self._columns, write_part, checkpoint_s, write_note)
        self._writing = _Writing(lock, journal, checkpoints)
        for begun in list(there.begun.values()):
            begun.begin()
            if begun.num_missing == 0:
                checkpoints.complete(begun.part)

    def _drop_failed(self, journal: Journal) -> None:
        """Move the rows of parts with failed rows to the journal, and leave the failed ones out."""
        for number, info in list(self._there.parts.items()):
            if not num_failed(info.rows_by_status):
                continue
            del self._there.parts[number]
            try:
                table = self._format.read(info)
            except DamagedPart as damage:
                log.warning("%s is computed again: %s", join(self._files.url, info.name), damage)
                continue
            kept = without_failed(table)
            if kept.num_rows:
                journal.append([(number, kept)])
            self._there.mark(number, kept)
            self._files.remove(info.name)

    def _write_part(self, lock: OutputLock, part: PartRange, tables: Sequence[pa.Table]) -> None:
        info = self._format.write(part, whole_part(part, tables), lock, *self._encoding)
        self._there.finish(info, part.number)

    def _write_note(self, lock: OutputLock) -> None:
        self._files.write(STATUS_NAME, self._notes.note(self._num_added), lock)

    def _refuse_missing(self) -> None:
        named = ", ".join(f"row {row} sample {sample}" for row, sample in islice(self._there.missing(), _NAMED))
        if named:
            raise InternalError(f"the job ended, but some rows never came back, the first of them {named}")


class _Writing(NamedTuple):
    """What an open folder holds while there is something to write."""

    lock: OutputLock
    journal: Journal
    checkpoints: Checkpoints
