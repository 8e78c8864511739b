"""Data sets of the `datasets` library, streamed: a hub name or a folder that `load_dataset` understands."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash
from fsspec.implementations.local import LocalFileSystem

from batchgen.data import storage
from batchgen.data.expand import DataFile
from batchgen.data.reader import Record, Scan
from batchgen.data.schema import Survey
from batchgen.errors import InputError


class HfReader:
    """One split of a data set, read as a stream. Counting its rows takes a whole pass."""

    columns_are_known = True

    def __init__(self, name: str, base: Path, split: str, wanted: Collection[str] | None) -> None:
        local = Path(storage.absolute(name, base))
        self._path = str(local) if local.exists() else name
        self._split = split
        self.file = DataFile(LocalFileSystem(), self._path, 0, f"{name}[{split}]")
        self._dataset = self._load()
        features = self._dataset.features
        self.types: Mapping[str, pa.DataType] = {} if features is None else _types(features)
        self.columns = tuple(self.types) or tuple(next(iter(self._dataset), {}))
        self._wanted = [column for column in self.columns if wanted is None or column in wanted]

    def all_columns(self, limit: int | None) -> set[str]:
        """Names of all columns."""
        return set(self.columns)

    def scan(self, limit: int | None, survey: Survey | None) -> Scan:
        """Counts and fingerprints the first `limit` rows, and shows their values to `survey`."""
        digest = xxhash.xxh3_128()
        num_rows = 0
        for record in self.read(0, limit):
            digest.update(repr(sorted(record.values.items())).encode("utf-8", "backslashreplace"))
            num_rows += 1
            if survey is not None:
                survey.add(record.values)
        return Scan(num_rows, f"xxh3:{digest.hexdigest()}")

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """The records of rows [start, stop)."""
        rows = self._dataset.select_columns(self._wanted).skip(start)
        try:
            for index, values in enumerate(islice(rows, None if stop is None else stop - start), start=start):
                yield Record(values, f"row {index}")
        except self._troubles as error:
            raise InputError(f"data set {self.file.name}: {storage.explain(error, self._path)}") from error

    def _load(self) -> Any:
        import datasets  # a second to import, and seldom needed

        try:
            return datasets.load_dataset(self._path, split=self._split, streaming=True)
        except self._troubles as error:
            raise InputError(
                f"data set {self.file.name} can't be loaded: {' '.join(str(error).split())}. "
                "Check input.path (a hub name or a folder), input.split and the network"
            ) from error

    @cached_property
    def _troubles(self) -> tuple[type[BaseException], ...]:
        import datasets

        return (OSError, ValueError, datasets.exceptions.DatasetsError, pa.ArrowException)


def _types(features: Any) -> dict[str, pa.DataType]:
    schema: pa.Schema = features.arrow_schema
    return {field.name: field.type for field in schema}
