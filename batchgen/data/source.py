"""The input of a job: files of one format as one numbered sequence of rows."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.data import storage
from batchgen.data.csv import CsvReader
from batchgen.data.expand import DataFile, expand, format_of
from batchgen.data.hf import HfReader
from batchgen.data.jsonl import JsonlReader
from batchgen.data.openai import OpenaiReader
from batchgen.data.parquet import ParquetReader
from batchgen.data.reader import FileReader, Record
from batchgen.data.rows import Row
from batchgen.data.schema import Survey, fit, is_binary, normal_type, unify
from batchgen.errors import InputError
from batchgen.job.spec import Input

_OPEN_FILES = 16


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the input. `fingerprint` changes when the content of its rows does (docs/input.md says how)."""

    path: str
    num_rows: int
    bytes: int
    fingerprint: str


class Source:
    """All rows of the input. Opening is cheap; what needs a pass over the data is found when it is first asked for.

    Every iteration reads the files anew, so a source can be read many times, from any row on.
    """

    def __init__(self, readers: Sequence[FileReader], spec: Input, carried: Sequence[str] | None) -> None:
        self._readers = tuple(readers)
        self._limit = spec.limit
        self._stops_at_bad_rows = spec.on_bad_row == "stop"
        self._carried = None if carried is None else tuple(carried)
        self._id_column = "custom_id" if spec.format == "openai" else None

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Names of columns: all of them for Parquet, CSV and data sets, those of each file's first rows for JSONL."""
        return tuple(dict.fromkeys(name for reader in self._readers for name in reader.columns))

    @property
    def num_rows(self) -> int:
        """Number of rows, `limit` taken into account."""
        return sum(file.num_rows for file in self.files)

    @property
    def files(self) -> tuple[InputFile, ...]:
        """The files that have rows of this input (those behind `limit` have none), in order."""
        return self._scanned.files

    @property
    def schema(self) -> pa.Schema:
        """Types of the carried columns, the same for all files. A column found nowhere is text."""
        return self._scanned.schema

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know, though the job can run."""
        return self._scanned.warnings

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[Row]:
        """The rows [start, stop) in order. Raises InputError when a file has changed since it was counted."""
        stop = _least(stop, self._limit)
        first = 0
        for position, reader in enumerate(self._readers):
            if stop is not None and first >= stop:
                return
            counted = self._num_rows_of(position) if start or self._is_scanned else None
            begin = max(0, start - first)
            end = _least(None if stop is None else stop - first, counted)
            after = begin
            if end is None or begin < end:
                for record in reader.read(begin, end):
                    yield self._row(reader, first + after, record)
                    after += 1
            if counted is not None and end is not None and after < end:
                raise InputError(f"{reader.file.url}: fewer rows than before: the file changed while the job ran")
            first += after if counted is None else counted

    def has_column(self, name: str) -> bool:
        """Whether any row has this column. Looks at the first rows, and through the whole input before saying no.

        An input in which no row can be read lacks nothing.
        """
        return name in self.columns or name in self._all_columns or not self._all_columns

    def require(self, names: Iterable[str]) -> None:
        """Checks columns that prompts are made of: in every file that names its columns, and text if it is typed.

        Raises InputError that names all files at fault and the columns that they have.
        """
        problems: list[str] = []
        for name in names:
            by_file = [problem for reader in self._readers if (problem := _problem_with(reader, name))]
            if not by_file and not self.has_column(name):
                by_file.append(f"no row has a column {name!r}; columns: {', '.join(self.columns)}")
            problems += by_file
        if problems:
            raise InputError(_listed(problems))

    def carried(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A row's values for the columns of `schema`, null where it has none."""
        return {field.name: fit(values.get(field.name), field.type) for field in self.schema}

    def _row(self, reader: FileReader, index: int, record: Record) -> Row:
        if record.error is not None and self._stops_at_bad_rows:
            raise InputError(f"{record.error.message} ({record.error.kind}; input.on_bad_row is stop)")
        return Row(index, record.values, f"{reader.file.name} {record.place}", record.error)

    def _num_rows_of(self, position: int) -> int:
        reader = self._readers[position]
        return reader.num_rows if isinstance(reader, ParquetReader) else self.files[position].num_rows

    @property
    def _is_scanned(self) -> bool:
        return "_scanned" in self.__dict__

    @cached_property
    def _all_columns(self) -> frozenset[str]:
        return frozenset().union(*(reader.all_columns(self._limit) for reader in self._readers))

    @cached_property
    def _scanned(self) -> "_Scanned":
        files, survey = self._scan_files()
        scanned = _Scanned(files, self._unified(survey), tuple(self._warnings(survey)))
        if self._stops_at_bad_rows:
            for _ in self.rows():
                pass
        return scanned

    def _scan_files(self) -> tuple[tuple[InputFile, ...], Survey]:
        survey = Survey(self._carried, self._id_column)
        needs_values = self._carried is None or bool(self._carried) or self._id_column is not None
        files: list[InputFile] = []
        problems: list[str] = []
        left = self._limit
        for reader in self._readers:
            if left == 0:
                break
            try:
                num_rows, fingerprint = reader.scan(left, survey if needs_values else None)
            except InputError as error:
                problems.append(str(error))
                continue
            left = None if left is None else left - num_rows
            files.append(InputFile(reader.file.url, num_rows, reader.file.size or 0, fingerprint))
        if problems:
            raise InputError(_listed(problems))
        return tuple(files), survey

    def _unified(self, survey: Survey) -> pa.Schema:
        types = survey.fields() | {name: unify(seen) for name, seen in self._types_by_file().items()}
        names = types if self._carried is None else self._carried
        return pa.schema([(name, types.get(name, pa.string())) for name in names])

    def _types_by_file(self) -> dict[str, dict[pa.DataType, str]]:
        """For each column of files that have types: its types, and the first file that has each."""
        seen: dict[str, dict[pa.DataType, str]] = {}
        for reader in self._readers:
            for name, dtype in reader.types.items():
                seen.setdefault(name, {}).setdefault(dtype, reader.file.url)
        return seen

    def _warnings(self, survey: Survey) -> Iterator[str]:
        yield from (f"{r.file.url} is empty (0 bytes): no rows" for r in self._readers if _is_empty(r))
        yield from survey.warnings()
        for name, seen in self._types_by_file().items():
            wanted = self._carried is None or name in self._carried
            plain = {normal_type(dtype): f"{dtype} in {url}" for dtype, url in seen.items() if dtype != pa.null()}
            if wanted and len(plain) > 1 and unify(seen) == pa.string():
                yield f"column {name!r} is {' and '.join(plain.values())}: carried as text"


@dataclass(frozen=True, slots=True)
class _Scanned:
    files: tuple[InputFile, ...]
    schema: pa.Schema
    warnings: tuple[str, ...]


def open_source(
    spec: Input, *, base: Path, columns: Collection[str] | None, carried: Sequence[str] | None = None
) -> Source:
    """Finds the files of an input and reads what their formats tell up front (Parquet footers, CSV headers).

    Args:
        spec: The `input` section of the job file.
        base: The folder where relative paths start.
        columns: Columns whose values the rows shall have, or None for all. Others are not read where the format allows.
        carried: Columns that `Source.schema` and `Source.carried` are about, or None for all of `columns`. With no
            carried column, counting the rows of a text file needs no parsing.

    Raises InputError that names every file at fault.
    """
    if carried is None and columns is not None:
        carried = sorted(columns)
    elif carried is not None and columns is not None:
        columns = {*columns, *carried}
    paths = [spec.path] if isinstance(spec.path, str) else spec.path
    if spec.format == "datasets":
        return Source([HfReader(path, base, spec.split, columns) for path in paths], spec, carried)
    files, problems = expand(paths, base, spec.format)
    file_format = spec.format
    if file_format == "auto":
        file_format, trouble = _common_format(files)
        problems += trouble
    readers, trouble = (
        _open_all(files, _reader_maker(file_format, spec, columns)) if file_format != "auto" else ([], [])
    )
    if problems or trouble:
        raise InputError(_listed(problems + trouble))
    return Source(readers, spec, carried)


def _common_format(files: list[DataFile]) -> tuple[Any, list[str]]:
    by_format: dict[str | None, str] = {}
    for file in files:
        by_format.setdefault(format_of(file.path), file.url)
    if None in by_format:
        return "auto", [f"{by_format[None]}: the name does not tell the format. Set input.format"]
    if len(by_format) > 1:
        examples = ", ".join(f"{url} ({name})" for name, url in by_format.items())
        return "auto", [f"files of several formats: {examples}. Set input.format, or name the files by a pattern"]
    return next(iter(by_format), "auto"), []


def _reader_maker(file_format: str, spec: Input, columns: Collection[str] | None) -> Callable[[DataFile], FileReader]:
    if file_format == "parquet":
        return lambda file: ParquetReader(file, columns, spec.decode_binary)
    kinds = {"jsonl": JsonlReader, "openai": OpenaiReader, "csv": CsvReader}
    return lambda file: kinds[file_format](file, columns, spec.max_line_bytes)


def _open_all(files: list[DataFile], make: Callable[[DataFile], FileReader]) -> tuple[list[FileReader], list[str]]:
    """A reader for each file, several at once since remote footers are slow, and what is wrong with the others."""

    def attempt(file: DataFile) -> FileReader | InputError:
        if storage.is_local(file.fs) and not os.access(file.path, os.R_OK):
            return InputError(f"{file.url}: no permission to read: change the rights of the file")
        try:
            reader = make(file)
            if reader.columns_are_known:
                _ = reader.columns
        except InputError as error:
            return error
        return reader

    with ThreadPoolExecutor(_OPEN_FILES) as pool:
        results = list(pool.map(attempt, files))
    readers = [result for result in results if not isinstance(result, InputError)]
    return readers, [str(result) for result in results if isinstance(result, InputError)]


def _problem_with(reader: FileReader, name: str) -> str | None:
    if not reader.columns_are_known or not reader.columns:
        return None
    if name not in reader.columns:
        return f"{reader.file.url}: no column {name!r}; columns: {', '.join(reader.columns)}"
    dtype = reader.types.get(name)
    if dtype is not None and is_binary(dtype):
        return (
            f"{reader.file.url}: column {name!r} holds binary values ({dtype}). "
            "If they are UTF-8 text, set input.decode_binary: true"
        )
    return None


def _is_empty(reader: FileReader) -> bool:
    return reader.file.size == 0 and not isinstance(reader, HfReader)


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _listed(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{len(problems)} problems with the input:", *(f"- {problem}" for problem in problems)])
