"""Parquet files: the footer first, then only the wanted columns, in small batches, from any row on."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from batchgen.data import storage
from batchgen.data.expand import DataFile
from batchgen.data.reader import Record, Scan
from batchgen.data.schema import Survey, is_binary
from batchgen.errors import InputError, RowError

_TAIL_BYTES = 64 * 1024
_BATCH_ROWS = 1024
_BATCH_BYTES = 8 * 2**20
_BUFFER_BYTES = 2**20
_MAGIC = b"PAR1"


class ParquetReader:
    """One Parquet file. Making the reader reads the footer and raises InputError when there is no whole one."""

    columns_are_known = True

    def __init__(self, file: DataFile, wanted: Collection[str] | None, decode_binary: bool) -> None:
        self.file = file
        self._decode_binary = decode_binary
        footer = _read_footer(file)
        self._fingerprint = f"xxh3:{xxhash.xxh3_128(footer).hexdigest()}-{file.size}"
        with _errors(file):
            parsed = pq.ParquetFile(pa.BufferReader(_MAGIC + footer))
            self._metadata, schema = parsed.metadata, parsed.schema_arrow
        names = schema.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"{file.url}: two columns have the name {twice!r}. Rename one of them")
        self.types = {field.name: self._text_if_decoded(field.type) for field in schema}
        self._check_partitions()
        self.types |= {name: pa.string() for name, _ in file.partitions}
        self._partitions = {name: value for name, value in file.partitions if wanted is None or name in wanted}
        in_path = dict(file.partitions)
        self._wanted = [name for name in names if name not in in_path and (wanted is None or name in wanted)]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns, those of the path last."""
        return tuple(self.types)

    @property
    def num_rows(self) -> int:
        """Rows of the file, as its footer says."""
        return int(self._metadata.num_rows)

    def all_columns(self, limit: int | None) -> set[str]:
        """Names of all columns."""
        return set(self.types)

    def scan(self, limit: int | None, survey: Survey | None) -> Scan:
        """Row count and fingerprint of the footer: no data is read."""
        num_rows = self.num_rows if limit is None else min(self.num_rows, limit)
        return Scan(num_rows, self._fingerprint)

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """The records of rows [start, stop); row groups before `start` are not read."""
        stop = self.num_rows if stop is None else min(stop, self.num_rows)
        if start >= stop:
            return
        if not self._wanted:
            yield from (Record(self._partitions, f"row {row}") for row in range(start, stop))
            return
        with self._open() as opened:
            first = 0
            for group in range(self._metadata.num_row_groups):
                after = first + self._metadata.row_group(group).num_rows
                if first < stop and after > start:
                    yield from self._read_group(opened, group, first, start, stop)
                first = after

    @contextmanager
    def _open(self) -> Iterator[pq.ParquetFile]:
        """The file for reading: a remote one by row groups in few large requests, a local one in small buffers."""
        fs, path = self.file.fs, self.file.path
        with _errors(self.file):
            if storage.is_local(fs):
                with fs.open(path, "rb") as raw:
                    yield pq.ParquetFile(raw, metadata=self._metadata, buffer_size=_BUFFER_BYTES)
            else:
                with fs.open(path, "rb", cache_type="none") as raw:
                    yield pq.ParquetFile(raw, metadata=self._metadata, pre_buffer=True)

    def _read_group(self, opened: pq.ParquetFile, group: int, row: int, start: int, stop: int) -> Iterator[Record]:
        size = self._batch_rows(group)
        for batch in opened.iter_batches(size, row_groups=[group], columns=self._wanted, use_threads=False):
            skipped = min(max(start - row, 0), batch.num_rows)
            kept = min(stop - row, batch.num_rows) - skipped
            if kept > 0:
                yield from self._records(batch.slice(skipped, kept), row + skipped)
            row += batch.num_rows
            if row >= stop:
                return

    def _batch_rows(self, group: int) -> int:
        metadata = self._metadata.row_group(group)
        columns = [metadata.column(i) for i in range(metadata.num_columns)]
        wanted = [column for column in columns if column.path_in_schema.split(".")[0] in self._wanted]
        row_bytes = sum(column.total_uncompressed_size for column in wanted) / max(1, metadata.num_rows)
        return max(1, min(_BATCH_ROWS, int(_BATCH_BYTES / max(1.0, row_bytes))))

    def _records(self, batch: pa.RecordBatch, row: int) -> Iterator[Record]:
        columns = [self._values(name, batch.column(name)) for name in self._wanted]
        for index, values in enumerate(zip(*columns, strict=True), start=row):
            place = f"row {index}"
            bad = next((value for value in values if isinstance(value, RowError)), None)
            if bad is None:
                yield Record({**dict(zip(self._wanted, values, strict=True)), **self._partitions}, place)
            else:
                yield Record({}, place, RowError(bad.kind, f"{self.file.name} {place}: {bad.message}"))

    def _values(self, name: str, array: pa.Array) -> list[Any]:
        """The values of a column; a RowError for each that Python can't hold."""
        if self._decode_binary and is_binary(array.type):
            array = array.cast(pa.large_binary()).view(pa.large_string())
        try:
            values: list[Any] = array.to_pylist()
        except (ValueError, OverflowError):  # which one it was, only a reading one by one tells
            return [_value_or_error(name, value) for value in array]
        return values

    def _text_if_decoded(self, dtype: pa.DataType) -> pa.DataType:
        return pa.string() if self._decode_binary and is_binary(dtype) else dtype

    def _check_partitions(self) -> None:
        """Raises InputError when a column of the path is also in the file, with other values."""
        for name, value in self.file.partitions:
            if name not in self.types:
                continue
            with self._open() as opened:
                values = opened.read(columns=[name]).column(name).unique().to_pylist()
            for found in values:
                if (found if found is None else str(found)) != value:
                    raise InputError(
                        f"{self.file.url}: column {name!r} is {found!r} in the file and {value!r} in its path. "
                        "Rename one of them"
                    )
            del self.types[name]


def _value_or_error(name: str, scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return RowError("bad_utf8", f"column {name!r} holds bytes that are no UTF-8")
    except (ValueError, OverflowError) as error:
        return RowError("bad_value", f"column {name!r} holds a {scalar.type} that can't be read ({error})")


@contextmanager
def _errors(file: DataFile) -> Iterator[None]:
    try:
        yield
    except pa.ArrowException as error:
        raise InputError(f"{file.url}: damaged, or no Parquet file: {error}") from error
    except storage.storage_troubles() as error:
        if type(error) is OSError and error.errno is None:  # Arrow's own complaints about the content
            raise InputError(f"{file.url}: damaged, or no Parquet file: {error}") from error
        raise InputError(storage.explain(error, file.url)) from error


def _read_footer(file: DataFile) -> bytes:
    """The footer with its length and magic, by one or two small reads from the file's end."""
    if file.size is None:
        raise InputError(f"{file.url}: the server does not tell its size, which Parquet needs. Copy the file first")
    if file.size == 0:
        raise InputError(f"{file.url}: empty (0 bytes), so no Parquet file. Write it again or remove it")
    with storage.errors_as(InputError, file.url):
        tail: bytes = file.fs.cat_file(file.path, start=max(0, file.size - _TAIL_BYTES), end=file.size)
        if tail.endswith(b"PARE"):
            raise InputError(f"{file.url}: encrypted Parquet can't be read. Write it without encryption")
        length = int.from_bytes(tail[-8:-4], "little") + 8
        if not tail.endswith(_MAGIC) or length + len(_MAGIC) > file.size:
            raise InputError(f"{file.url}: no Parquet footer at its end: cut off, still being written, or not Parquet")
        if length > len(tail):
            tail = file.fs.cat_file(file.path, start=file.size - length, end=file.size)
    return tail[-length:]
