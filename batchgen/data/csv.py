"""CSV and TSV with a header: every column is text, an empty field is empty text, quotes may hold newlines."""

import csv
from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any

from batchgen.data.expand import DataFile, plain_suffix
from batchgen.data.jsonl import line_too_long
from batchgen.data.lines import ByteStream, TextRow, read_lines
from batchgen.data.text import TextReader
from batchgen.errors import InputError, RowError


class CsvReader(TextReader):
    """The first record names the columns. A row's content is its list of fields, or the error that it is."""

    columns_are_known = True

    def __init__(self, file: DataFile, wanted: Collection[str] | None, max_line_bytes: int) -> None:
        super().__init__(file, wanted, max_line_bytes)
        self._delimiter = "\t" if plain_suffix(file.name) == ".tsv" else ","
        csv.field_size_limit(max(csv.field_size_limit(), max_line_bytes))  # of the process: csv has no other

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns. Raises InputError for a header that names none or one twice."""
        header = self._header
        return (*header, *(name for name, _ in self.file.partitions if name not in header)) if header else ()

    def all_columns(self, limit: int | None) -> set[str]:
        """Names of all columns."""
        return set(self.columns)

    @cached_property
    def _header(self) -> list[str]:
        with self._open() as stream:
            header = next(self._records(stream, 1, 0), None)
        if header is None:
            return []
        names = header.content
        if isinstance(names, RowError):
            raise InputError(f"{self.file.url}: no CSV header: {names.message}")
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{self.file.url}: the CSV header names {twice[0]!r} twice. Rename one of the columns")
        return list(names)

    def _rows(self, stream: ByteStream, number: int, offset: int) -> Iterator[TextRow]:
        return islice(self._records(stream, number, offset), 0 if offset else 1, None)

    def _records(self, stream: ByteStream, number: int, offset: int) -> Iterator[TextRow]:
        feed = _LineFeed(read_lines(stream, self._max_line_bytes, number=number, offset=offset))
        reader = csv.reader(feed, delimiter=self._delimiter, strict=True)
        while True:
            feed.start_record()
            content: list[str] | RowError
            try:
                content = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                content = RowError("bad_csv", str(error))
            if feed.too_long is not None:
                content = line_too_long(feed.too_long, self._max_line_bytes)
            if content:
                yield TextRow(feed.first.number, feed.first.offset, feed.last.end, _checked(content))

    def _parse(self, row: TextRow) -> Mapping[str, Any] | RowError:
        fields: list[str] | RowError = row.content
        if isinstance(fields, RowError):
            return fields
        if len(fields) != len(self._header):
            return RowError("bad_csv", f"{len(fields)} fields where the header names {len(self._header)}")
        return dict(zip(self._header, fields, strict=True))


class _LineFeed:
    """Gives lines to the csv module as text, and remembers where they came from. Bad bytes pass as lone surrogates."""

    def __init__(self, lines: Iterator[TextRow]) -> None:
        self._lines = lines
        self.start_record()

    def start_record(self) -> None:
        """The next line is the first one of a record."""
        self.first = self.last = TextRow(0, 0, 0, None)
        self.too_long: TextRow | None = None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.last = line._replace(content=None)
        if not self.first.number:
            self.first = self.last
        if line.content is None:
            self.too_long = line
            return "\n"
        text: str = line.content.decode("utf-8", "surrogateescape")
        return text + "\n"


def _checked(content: list[str] | RowError) -> list[str] | RowError:
    if isinstance(content, list):
        try:
            "".join(content).encode()
        except UnicodeEncodeError:
            return RowError("bad_utf8", "bytes that are no UTF-8")
    return content
