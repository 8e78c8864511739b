"""What the readers of text formats share: opening (compressed) files, counting, fingerprints, an index of rows."""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any

import pyarrow as pa
import xxhash

from batchgen.data import storage
from batchgen.data.expand import DataFile
from batchgen.data.lines import ByteStream, TextRow
from batchgen.data.reader import Record, Scan
from batchgen.data.schema import Survey
from batchgen.errors import InputError, RowError

_SAMPLE_ROWS = 100
_BLOCK_BYTES = 8 * 2**20  # of one request to a remote file system


class TextReader(ABC):
    """A file whose rows are text. A format says how lines become rows (`_rows`) and rows become values (`_parse`)."""

    columns_are_known = False

    def __init__(self, file: DataFile, wanted: Collection[str] | None, max_line_bytes: int) -> None:
        self.file = file
        self.types: Mapping[str, pa.DataType] = {}
        self._wanted = None if wanted is None else tuple(wanted)
        self._max_line_bytes = max_line_bytes
        self._index = _RowIndex()

    @abstractmethod
    def _rows(self, stream: ByteStream, number: int, offset: int) -> Iterator[TextRow]:
        """The rows of a stream that stands at byte `offset`, the start of line `number`."""

    @abstractmethod
    def _parse(self, row: TextRow) -> Mapping[str, Any] | RowError:
        """The values of a row in all its columns, or why there are none."""

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns in the first rows."""
        return tuple(self._names(_SAMPLE_ROWS))

    def all_columns(self, limit: int | None) -> set[str]:
        """Names of all columns in the first `limit` rows, by a whole pass."""
        return set(self._names(limit))

    def _names(self, limit: int | None) -> dict[str, None]:
        names: dict[str, None] = {}
        with self._open() as stream:
            for row in islice(self._rows(stream, 1, 0), limit):
                values = self._parse(row)
                if not isinstance(values, RowError):
                    names.update(dict.fromkeys(values))
        if names:
            names.update(dict.fromkeys(name for name, _ in self.file.partitions))
        return names

    def scan(self, limit: int | None, survey: Survey | None) -> Scan:
        """Counts, indexes and fingerprints the first `limit` rows, and shows their values to `survey`."""
        index = _RowIndex()
        num_rows = end = 0
        with self._open() as stream:
            can_seek = not isinstance(stream, pa.CompressedInputStream)
            hashed = _HashedStream(stream)
            for row in islice(self._rows(hashed, 1, 0), limit):
                if can_seek:
                    index.add(num_rows, row)
                num_rows, end = num_rows + 1, row.end
                if survey is not None or self.file.partitions:
                    values = self._record(row).values
                    if survey is not None:
                        survey.add(values)
            is_whole = limit is None or num_rows < limit
            if is_whole and can_seek and hashed.num_bytes != (self.file.size or hashed.num_bytes):
                raise InputError(
                    f"{self.file.url}: {hashed.num_bytes:,} bytes read where {self.file.size:,} were listed: "
                    "the file changed. Run again when nothing writes to it"
                )
        self._index = index
        return Scan(num_rows, hashed.fingerprint(None if is_whole else end))

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """The records of rows [start, stop)."""
        if stop is not None and start >= stop:
            return
        first, number, offset = self._index.at_or_before(start)
        with self._open() as stream:
            if offset:
                stream.seek(offset)
            rows = self._rows(stream, number, offset)
            for row in islice(rows, start - first, None if stop is None else stop - first):
                yield self._record(row)

    def _record(self, row: TextRow) -> Record:
        place = f"line {row.number}"
        values = self._parse(row)
        if isinstance(values, RowError):
            message = f"{self.file.name} {place} (byte {row.offset}): {values.message}"
            return Record({}, place, RowError(values.kind, message))
        if self._wanted is not None:
            values = {name: values[name] for name in self._wanted if name in values}
        if self.file.partitions:
            values = self._with_partitions(values, place)
        return Record(values, place)

    def _with_partitions(self, values: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        partitions = {n: v for n, v in self.file.partitions if self._wanted is None or n in self._wanted}
        for name in partitions.keys() & values.keys():
            if values[name] != partitions[name] and str(values[name]) != partitions[name]:
                raise InputError(
                    f"{self.file.url} {place}: column {name!r} is {values[name]!r} in the file and "
                    f"{partitions[name]!r} in its path. Rename one of them"
                )
        return {**values, **partitions}

    @contextmanager
    def _open(self) -> Iterator[Any]:
        """The file's bytes, decompressed when its first bytes say gzip or zstd; all members and frames."""
        compression = None
        try:
            with self.file.fs.open(self.file.path, "rb", block_size=_BLOCK_BYTES) as raw:
                compression = _compression(raw.read(4))
                raw.seek(0)
                if compression is None:
                    yield raw
                else:
                    with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), compression) as stream:
                        yield stream
        except storage.storage_troubles() as error:
            cause = storage.explain(error, self.file.url)
            if compression and getattr(error, "errno", None) is None:
                cause += f". The {compression} file is cut off or damaged: write it again"
            raise InputError(cause) from error


def _compression(magic: bytes) -> str | None:
    """What a file's first four bytes say; a zstd file may begin with a skippable frame."""
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    is_zstd = magic == b"\x28\xb5\x2f\xfd" or (magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5)
    return "zstd" if is_zstd else None


class _HashedStream:
    """Passes bytes through and hashes them, one chunk late, so that the hash can end at any byte of the last chunk."""

    def __init__(self, stream: ByteStream) -> None:
        self._stream = stream
        self._hash = xxhash.xxh3_128()
        self._held = b""
        self.num_bytes = 0

    def read(self, size: int, /) -> bytes:
        """The next bytes."""
        self._hash.update(self._held)
        self._held = self._stream.read(size)
        self.num_bytes += len(self._held)
        return self._held

    def fingerprint(self, end: int | None) -> str:
        """Hash of all bytes read, or of those before byte `end`."""
        surplus = 0 if end is None else max(0, self.num_bytes - end)
        self._hash.update(self._held[: len(self._held) - surplus])
        self._held = b""
        return f"xxh3:{self._hash.hexdigest()}"


class _RowIndex:
    """Line number and byte offset of every 4,096th row of a file."""

    stride = 4096

    def __init__(self) -> None:
        self._numbers = array("q")
        self._offsets = array("q")

    def add(self, index: int, row: TextRow) -> None:
        """Notes where row `index` starts; rows come in order."""
        if index % self.stride == 0:
            self._numbers.append(row.number)
            self._offsets.append(row.offset)

    def at_or_before(self, index: int) -> tuple[int, int, int]:
        """The last noted row up to `index`: its index, line number and byte offset."""
        if not self._offsets:
            return 0, 1, 0
        entry = min(index // self.stride, len(self._offsets) - 1)
        return entry * self.stride, self._numbers[entry], self._offsets[entry]
