"""Finished rows that no part holds yet, safe on disk within seconds: append-only segments of checked frames.

A segment is a heading and then frames; a frame is a few rows of one part as an Arrow record batch, with its length and
hash. What a kill left of the last frame is not read. A segment goes when the parts of all its frames are written.
"""

import logging
import struct
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from batchgen.data.files import NOTES, OutputFiles
from batchgen.data.lock import OutputLock
from batchgen.data.rows import FAILED
from batchgen.data.storage import errors_as, sync, sync_folder
from batchgen.errors import StorageError

log = logging.getLogger(__name__)

JOURNAL = NOTES
SEGMENT_BYTES = 64 * 2**20

_MAGIC = b"BGJRNL01"
_FRAME = struct.Struct("<QQQQQ")  # part number, bytes of the record batch, rows, failed ones, xxh3-64 of all but this
_HASHED = struct.Struct("<QQQQ")


class _Frame(NamedTuple):
    """Where a record batch lies."""

    segment: str
    offset: int
    length: int


class FrameCounts(NamedTuple):
    """What a frame says about its rows: their part, how many, and how many of them failed."""

    part: int
    num_rows: int
    num_failed: int


class Journal:
    """The journal of one output folder. On a local disk a segment grows by appending; elsewhere each is one object.

    Whatever the file system, rows are read back from local files: those of an object store have a copy in a temporary
    folder. Not safe for several threads.
    """

    def __init__(self, files: OutputFiles, schema: pa.Schema, job_id: str, lock: OutputLock) -> None:
        self._files = files
        self._schema = schema
        self._heading = _heading(job_id)
        self._lock = lock
        self._copies = None if files.is_local else TemporaryDirectory(prefix="batchgen-journal-")
        self._folder = files.local_path(JOURNAL) if self._copies is None else Path(self._copies.name)
        self._frames: dict[int, list[_Frame]] = {}
        self._live: Counter[str] = Counter()  # frames by segment that no part holds yet
        self._open: tuple[str, BinaryIO] | None = None
        self._run = uuid.uuid4().hex[:8]
        self._next = 0

    def recover(self, names: Iterable[str]) -> Iterator[tuple[int, pa.Table]]:
        """Read the segments among an output folder's files: each frame's part number and rows.

        What is damaged is left out with a line in the log; its rows are computed again.
        """
        for name in sorted(name.removeprefix(f"{JOURNAL}/") for name in names if is_segment(name)):
            self._next = max(self._next, _number(name) + 1)
            if self._copies is not None:
                (self._folder / name).write_bytes(self._files.read(f"{JOURNAL}/{name}"))
            self._live[name] = 0
            yield from self._scan(name)

    def append(self, batches: Iterable[tuple[int, pa.Table]]) -> None:
        """Make rows safe: tables of rows with the numbers of their parts. Raises StorageError or LockedError."""
        frames = [
            (FrameCounts(part, table.num_rows, _num_failed(table)), table.combine_chunks().to_batches()[0].serialize())
            for part, table in batches
        ]
        self._lock.check()
        if self._copies is None:
            self._append_local(frames)
        else:
            self._append_object(frames)

    def tables(self, part: int) -> list[pa.Table]:
        """All journalled rows of a part, in the order in which they came. Raises StorageError."""
        return [self._read(frame) for frame in self._frames.get(part, [])]

    def forget(self, part: int) -> None:
        """Take note that a part is written, and remove the segments that nothing needs any more."""
        for frame in self._frames.pop(part, []):
            self._live[frame.segment] -= 1
        current = self._open and self._open[0]
        for segment in [name for name, count in self._live.items() if count == 0 and name != current]:
            self._remove(segment)

    def remove(self) -> None:
        """Remove the whole journal: the job is done, and parts hold all its rows."""
        self._close_segment()
        for segment in list(self._live):
            self._remove(segment)
        self._files.remove_empty_folder(JOURNAL)

    def close(self) -> None:
        """Close the files; the journal stays for the next run."""
        self._close_segment()
        if self._copies is not None:
            self._copies.cleanup()

    def _append_local(self, frames: list[tuple[FrameCounts, pa.Buffer]]) -> None:
        with errors_as(StorageError, str(self._folder)):
            name, file = self._open or self._new_segment()
            self._open = None  # what a failed write leaves is a torn tail: nothing may come after it
            try:
                self._write(name, file, frames)
                sync(file)
            except BaseException:
                with suppress(OSError):  # what could not be written can't be written now either
                    file.close()
                raise
            self._open = name, file
            if file.tell() >= SEGMENT_BYTES:
                self._close_segment()

    def _append_object(self, frames: list[tuple[FrameCounts, pa.Buffer]]) -> None:
        with errors_as(StorageError, str(self._folder)):
            name, file = self._new_segment()
            with file:
                self._write(name, file, frames)
        self._files.write(f"{JOURNAL}/{name}", (self._folder / name).read_bytes(), self._lock)

    def _write(self, name: str, file: BinaryIO, frames: list[tuple[FrameCounts, pa.Buffer]]) -> None:
        places = []
        for counts, body in frames:
            file.write(_FRAME.pack(*_hashed(counts, body), _hash(counts, body)))
            places.append((counts.part, _Frame(name, file.tell(), body.size)))
            file.write(body)
        file.flush()
        for part, frame in places:
            self._add(part, frame)

    def _new_segment(self) -> tuple[str, BinaryIO]:
        name = f"{self._next:06d}-{self._run}.rows"
        self._next += 1
        self._folder.mkdir(exist_ok=True)
        file = (self._folder / name).open("xb")
        file.write(self._heading)
        self._live[name] = 0
        if self._copies is None:
            sync_folder(self._folder)
        return name, file

    def _close_segment(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _remove(self, name: str) -> None:
        self._lock.check()  # a run that took over may read from it
        del self._live[name]
        if self._copies is not None:
            (self._folder / name).unlink()
        self._files.remove(f"{JOURNAL}/{name}")

    def _add(self, part: int, frame: _Frame) -> None:
        self._frames.setdefault(part, []).append(frame)
        self._live[frame.segment] += 1

    def _scan(self, name: str) -> Iterator[tuple[int, pa.Table]]:
        with errors_as(StorageError, str(self._folder / name)), (self._folder / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            if file.read(len(self._heading)) != self._heading:
                log.warning("%s/%s is no journal of this job, or torn at its beginning: not read", JOURNAL, name)
                return
            while (start := file.tell()) < size:
                found = _read_frame(file)
                if found is None:
                    log.warning(
                        "%s/%s was cut off by a kill at byte %d of %d: rows after it are done again",
                        *(JOURNAL, name, start, size),
                    )
                    return
                counts, body = found
                self._add(counts.part, _Frame(name, start + _FRAME.size, len(body)))
                yield counts.part, self._table(body)

    def _read(self, frame: _Frame) -> pa.Table:
        path = self._folder / frame.segment
        with errors_as(StorageError, str(path)), path.open("rb") as file:
            file.seek(frame.offset - _FRAME.size)
            found = _read_frame(file)
        if found is None:
            raise StorageError(f"{path} was changed while the job ran. Run it again: the rows in it are done again.")
        return self._table(found[1])

    def _table(self, body: bytes) -> pa.Table:
        return pa.Table.from_batches([pa.ipc.read_record_batch(pa.py_buffer(body), self._schema)])


def is_segment(name: str) -> bool:
    """Whether a file of an output folder is a segment of its journal."""
    return name.startswith(f"{JOURNAL}/") and name.endswith(".rows")


def read_counts(content: bytes, job_id: str) -> Iterator[FrameCounts]:
    """What the frames of a segment hold, as far as it is whole; nothing for a segment of another job."""
    file = BytesIO(content)
    if file.read(len(_heading(job_id))) == _heading(job_id):
        while (found := _read_frame(file)) is not None:
            yield found[0]


def _heading(job_id: str) -> bytes:
    return _MAGIC + job_id.encode()


def _number(name: str) -> int:
    digits = name.partition("-")[0]
    return int(digits) if digits.isdecimal() else 0


def _num_failed(table: pa.Table) -> int:
    return pc.sum(pc.is_in(table["status"], pa.array(FAILED))).as_py() or 0


def _hashed(counts: FrameCounts, body: bytes | pa.Buffer) -> tuple[int, int, int, int]:
    return counts.part, len(body), counts.num_rows, counts.num_failed


def _hash(counts: FrameCounts, body: bytes | pa.Buffer) -> int:
    digest = xxhash.xxh3_64(_HASHED.pack(*_hashed(counts, body)))
    digest.update(body)
    value: int = digest.intdigest()
    return value


def _read_frame(file: BinaryIO) -> tuple[FrameCounts, bytes] | None:
    """Counts and record batch of the frame that begins here; None when it is not whole."""
    header = file.read(_FRAME.size)
    if len(header) < _FRAME.size:
        return None
    part, length, num_rows, num_failed, digest = _FRAME.unpack(header)
    start = file.tell()
    left = file.seek(0, 2) - start  # a damaged length may be anything
    file.seek(start)
    body = file.read(length) if length <= left else b""
    counts = FrameCounts(part, num_rows, num_failed)
    return (counts, body) if len(body) == length and _hash(counts, body) == digest else None
