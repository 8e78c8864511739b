"""The output folder: rows come in any order, and a part gets its final name when all its rows are there."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import pyarrow as pa

from batchgen.data.columns import Columns, output_columns
from batchgen.data.lock import LOCK_NAME, OutputLock
from batchgen.data.manifest import MANIFEST_NAME, Manifest, check_same_job, parse_manifest
from batchgen.data.parts import DamagedPart, PartBuffer, PartInfo, PartRange, encode_part, read_part
from batchgen.data.rows import OutputRow
from batchgen.data.storage import (
    errors_as,
    filesystem,
    is_local,
    join,
    list_files,
    read_bytes,
    redact,
    remove,
    write_atomic,
)
from batchgen.errors import InternalError, StorageError

log = logging.getLogger(__name__)

_TEMPORARY = re.compile(r"\.(part-\d{5,}-of-\d{5,}\.parquet|manifest\.json)\.[0-9a-f]{12}\.tmp")
_READERS = 8  # footers read at once
_NAMED = 5  # rows or files named in a message


class OutputFolder:
    """The output of one job, open for the rows that are still missing. Close it, or use it in a `with` statement."""

    def __init__(
        self, files: "_Files", manifest: Manifest, columns: Columns, lock: OutputLock | None, encoding: "_Encoding"
    ) -> None:
        self._files = files
        self._manifest = manifest
        self._columns = columns
        self._lock = lock
        self._encoding = encoding
        self._parts: dict[int, PartInfo] = {}
        self._buffers: dict[int, PartBuffer] = {}

    @classmethod
    def open(
        cls,
        url: str,
        *,
        manifest: Manifest,
        carried: pa.Schema,
        logprobs: bool = False,
        labels: Sequence[str] | None = None,
        compression: str = "zstd",
    ) -> Self:
        """Start the job that `manifest` describes in the folder `url`, or go on with it.

        A finished job opens without a lock, and there is nothing to do. Raises JobFileError for a carried column with
        the name of one of ours and for a folder that holds another job, LockedError when another run holds it,
        StorageError for a folder with foreign files and for what the file system refuses.
        """
        files = _Files(url)
        columns = output_columns(carried, logprobs=logprobs, labels=labels)
        manifest = manifest.model_copy(update={"columns": {field.name: str(field.type) for field in columns.schema}})
        encoding = _Encoding(manifest.batchgen_version, compression)
        stored = files.stored_manifest(manifest)
        if stored is not None and stored.state == "finished" and files.hold(stored.parts):
            return cls(files, stored, columns, None, encoding)
        files.make_folder()
        lock = OutputLock.acquire(url)
        try:
            stored = files.stored_manifest(manifest)  # again: another run may just have ended
            if stored is None:
                files.write(MANIFEST_NAME, manifest.to_json(), lock)
            elif stored.state == "finished" and not files.hold(stored.parts):
                log.warning("%s was finished, but parts are missing or cut: they are computed again", files.url)
            output = cls(files, (stored or manifest).reopen(), columns, lock, encoding)
            output._find_parts()
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
        """Input rows that lie in finished parts."""
        return self._manifest.num_rows - sum(len(rows) for rows in self.pending())

    def pending(self) -> list[range]:
        """The input rows still to do, in order, neighbouring parts joined."""
        ranges: list[range] = []
        for number in range(0 if self.finished else self._manifest.num_parts):
            part = self._part(number)
            if number in self._parts or part.start == part.stop:
                continue
            if ranges and ranges[-1].stop == part.start:
                ranges[-1] = range(ranges[-1].start, part.stop)
            else:
                ranges.append(range(part.start, part.stop))
        return ranges

    def add(self, row: OutputRow) -> None:
        """Take one finished row, in any order; write its part when it was the last one missing.

        Raises InternalError for a row that is not pending or came before, LockedError when another run took the folder
        over, StorageError when the part can't be written.
        """
        number = row.row // self._manifest.part_rows
        if not (0 <= row.row < self._manifest.num_rows and 0 <= row.sample < self._manifest.n):
            raise InternalError(f"row {row.row} sample {row.sample} came back, but the job has no such row")
        if self.finished or number in self._parts:
            raise InternalError(f"row {row.row} sample {row.sample} came back, but its part is finished")
        buffer = self._buffers.get(number)
        if buffer is None:
            buffer = self._buffers[number] = PartBuffer(self._part(number))
        buffer.add(row)
        if buffer.num_missing == 0:
            self._write_part(buffer)

    def finish(self, report: Mapping[str, Any] | None = None) -> Manifest:
        """Write the finished manifest, with `report` in it, after checking that every row is there.

        The counts in the manifest are sums over all parts, those of earlier runs included. Raises InternalError, naming
        rows, when some are missing.
        """
        if self.finished:
            return self._manifest
        self._refuse_missing()
        if self._manifest.num_rows == 0 and not self._parts:
            self._write_part(PartBuffer(self._part(0)))
        parts = tuple(self._parts[number] for number in range(self._manifest.num_parts))
        finished = self._manifest.finish(parts, report or {})
        total = self._manifest.num_rows * self._manifest.n
        if sum(finished.rows_by_status.values()) != total:
            raise InternalError(f"{total} output rows were due, but the parts count {finished.rows_by_status}")
        self._files.write(MANIFEST_NAME, finished.to_json(), self._held_lock())
        self._manifest = finished
        return finished

    def close(self) -> None:
        """Give the lock back. Rows of parts that are not whole are dropped; a rerun computes them again."""
        self._buffers.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _part(self, number: int) -> PartRange:
        manifest = self._manifest
        start = number * manifest.part_rows
        stop = min(start + manifest.part_rows, manifest.num_rows)
        return PartRange(number, manifest.num_parts, start, stop, manifest.n)

    def _find_parts(self) -> None:
        """Fill `_parts` with the parts that are there and whole; remove what a killed run left behind."""
        sizes = self._files.sizes()
        for name in filter(_TEMPORARY.fullmatch, sizes):
            self._files.remove(name)
        there = [part for part in map(self._part, range(self._manifest.num_parts)) if part.name in sizes]
        with ThreadPoolExecutor(_READERS, thread_name_prefix="batchgen-footers") as pool:
            infos = pool.map(lambda part: self._read_part(part, sizes[part.name]), there)
            self._parts = {part.number: info for part, info in zip(there, infos, strict=True) if info is not None}

    def _read_part(self, part: PartRange, size: int) -> PartInfo | None:
        try:
            return read_part(self._files.reader(part.name), size, self._columns, part, job_id=self._manifest.job_id)
        except DamagedPart as damage:
            log.warning("%s is computed again: %s", join(self._files.url, part.name), damage)
            return None

    def _write_part(self, buffer: PartBuffer) -> None:
        data, info = encode_part(
            self._columns,
            buffer.part,
            buffer.rows(),
            job_id=self._manifest.job_id,
            version=self._encoding.version,
            compression=self._encoding.compression,
        )
        self._files.write(buffer.part.name, data, self._held_lock())
        self._parts[buffer.part.number] = info
        self._buffers.pop(buffer.part.number, None)

    def _held_lock(self) -> OutputLock:
        if self._lock is None:
            raise InternalError("the output folder was written to after it was closed")
        return self._lock

    def _refuse_missing(self) -> None:
        missing = (
            place
            for number in range(self._manifest.num_parts)
            if number not in self._parts
            for place in (self._buffers.get(number) or PartBuffer(self._part(number))).missing()
        )
        named = ", ".join(f"row {row} sample {sample}" for row, sample in islice(missing, _NAMED))
        if named:
            raise InternalError(f"the job ended, but some rows never came back, the first of them {named}")


class _Encoding(NamedTuple):
    """How this run writes parts."""

    version: str
    compression: str


class _Files:
    """The files of the folder."""

    def __init__(self, url: str) -> None:
        self.url = redact(url)
        self._fs, self._folder = filesystem(url)

    def make_folder(self) -> None:
        if is_local(self._fs):  # object stores have no folders
            with errors_as(StorageError, self.url):
                Path(self._folder).mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by name; a file in a subfolder is named with it."""
        start = len(self._folder.rstrip("/")) + 1
        return {file.path[start:]: file.size for file in list_files(self._fs, self._folder)}

    def hold(self, parts: Sequence[PartInfo]) -> bool:
        """Whether all these parts are there."""
        sizes = self.sizes()
        return all(sizes.get(part.name, 0) > part.data_bytes for part in parts)

    def stored_manifest(self, manifest: Manifest) -> Manifest | None:
        """The folder's manifest, which must be of the same job; None for a folder with no files but a killed run's."""
        names = self.sizes().keys()
        if MANIFEST_NAME in names:
            url = join(self.url, MANIFEST_NAME)
            stored = parse_manifest(read_bytes(self._fs, join(self._folder, MANIFEST_NAME)), url)
            check_same_job(stored, manifest, self.url)
            return stored
        foreign = sorted(name for name in names if name != LOCK_NAME and not _TEMPORARY.fullmatch(name))
        if foreign:
            more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
            raise StorageError(
                f"{self.url} is no output of batchgen, and not empty: it has {', '.join(foreign[:_NAMED])}{more}. "
                "Give the job an output.path of its own."
            )
        return None

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        """A function that reads bytes [start, stop) of a file."""

        def read(start: int, stop: int) -> bytes:
            with errors_as(StorageError, join(self.url, name)):
                content: bytes = self._fs.cat_file(join(self._folder, name), start=start, end=stop)
                return content

        return read

    def write(self, name: str, content: bytes, lock: OutputLock) -> None:
        """Publish a file while `lock` is held."""

        def fill(file: IO[bytes]) -> None:
            file.write(content)
            lock.check()  # as late as can be: what comes after is the rename or the upload

        lock.check()
        write_atomic(self._fs, join(self._folder, name), fill)

    def remove(self, name: str) -> None:
        remove(self._fs, join(self._folder, name))
