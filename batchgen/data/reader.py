"""What every format gives to the source: one reader for one file."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from batchgen.data.expand import DataFile
from batchgen.data.schema import Survey
from batchgen.errors import RowError


class Record(NamedTuple):
    """One row as a reader finds it. `place` is where in its file: `line 17`, `row 12`."""

    values: Mapping[str, Any]
    place: str
    error: RowError | None = None


class Scan(NamedTuple):
    """What one pass over a file tells. `fingerprint` changes when the content of the rows does."""

    num_rows: int
    fingerprint: str


class FileReader(Protocol):
    """Reads one file, from any row on and as often as asked."""

    file: DataFile

    @property
    def types(self) -> Mapping[str, pa.DataType]:
        """Types of the columns, where the format has types."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of columns: all of them when `columns_are_known`, else those of the first rows."""

    @property
    def columns_are_known(self) -> bool:
        """Whether the format names its columns (Parquet, CSV), or each row its own (JSONL)."""

    def all_columns(self, limit: int | None) -> set[str]:
        """Names of all columns in the first `limit` rows; a whole pass where rows name their own."""

    def scan(self, limit: int | None, survey: Survey | None) -> Scan:
        """Counts and fingerprints the first `limit` rows, and shows their values to `survey`. Raises InputError."""

    def read(self, start: int, stop: int | None) -> Iterator[Record]:
        """The records of rows [start, stop). Raises InputError."""
