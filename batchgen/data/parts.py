"""One part of the output as the bytes of a Parquet file.

A part's footer carries PartInfo, with a hash of every byte before the footer: a file cut, grown or swapped is known.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from batchgen.data.columns import Columns, to_table
from batchgen.data.rows import OutputRow
from batchgen.errors import InternalError

_FOOTER_KEY = b"batchgen"
_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024  # read first; most footers fit


class PartRange(NamedTuple):
    """Which rows a part holds: part `number` of `num_parts`, input rows [start, stop), `n` samples each."""

    number: int
    num_parts: int
    start: int
    stop: int
    n: int

    @property
    def name(self) -> str:
        """The part's final file name."""
        return f"part-{self.number:05d}-of-{self.num_parts:05d}.parquet"

    @property
    def num_output_rows(self) -> int:
        """Rows in the file: one per input row and sample."""
        return (self.stop - self.start) * self.n


class PartBuffer:
    """The finished rows of a part that is not whole yet."""

    def __init__(self, part: PartRange) -> None:
        self.part = part
        self.num_missing = part.num_output_rows
        self._rows: list[OutputRow | None] = [None] * part.num_output_rows

    def add(self, row: OutputRow) -> None:
        """Take one row of the part. Raises InternalError when it came before."""
        place = (row.row - self.part.start) * self.part.n + row.sample
        if self._rows[place] is not None:
            raise InternalError(f"row {row.row} sample {row.sample} came back twice")
        self._rows[place] = row
        self.num_missing -= 1

    def rows(self) -> list[OutputRow]:
        """The rows that are there, in order."""
        return [row for row in self._rows if row is not None]

    def missing(self) -> Iterator[tuple[int, int]]:
        """(row, sample) of those that are not there, in order."""
        for place, row in enumerate(self._rows):
            if row is None:
                index, sample = divmod(place, self.part.n)
                yield self.part.start + index, sample


class PartInfo(BaseModel):
    """What a part says about itself in its footer, and what the manifest lists once the job is finished."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str
    """File name."""
    batchgen_version: str
    """The version that wrote it."""
    job_id: str
    """`job_id` of the manifest that it belongs to."""
    start: int
    """First input row."""
    stop: int
    """Input row after the last."""
    n: int
    """Output rows per input row."""
    rows_by_status: dict[str, int]
    """Output rows by status."""
    prompt_tokens: int
    """Tokens of all prompts; a prompt counts once however many samples it has."""
    cached_tokens: int
    """Prompt tokens that were not computed again."""
    output_tokens: int
    """Generated tokens."""
    data_bytes: int
    """Size of all that comes before the footer."""
    xxhash: str
    """xxh3-64 of those bytes."""


class DamagedPart(Exception):  # noqa: N818 - never leaves the data layer
    """A file under a part's name that is not that part, whole. The message says why."""


def encode_part(
    columns: Columns, part: PartRange, rows: Sequence[OutputRow], *, job_id: str, version: str, compression: str
) -> tuple[bytes, PartInfo]:
    """The Parquet file of `rows`, which are all the part's rows in order, and what its footer says."""
    table, rows_by_status = to_table(columns, rows)
    sink = BytesIO()
    writer = pq.ParquetWriter(sink, columns.schema, compression=compression)
    writer.write_table(table)
    data = sink.getbuffer()
    info = PartInfo(
        name=part.name,
        batchgen_version=version,
        job_id=job_id,
        start=part.start,
        stop=part.stop,
        n=part.n,
        rows_by_status=rows_by_status,
        prompt_tokens=sum(row.prompt_tokens for row in rows if row.sample == 0),
        cached_tokens=sum(row.cached_tokens for row in rows if row.sample == 0),
        output_tokens=sum(row.output_tokens for row in rows),
        data_bytes=len(data),
        xxhash=xxhash.xxh3_64_hexdigest(data),
    )
    data.release()  # a BytesIO can't grow while a view of it lives
    writer.add_key_value_metadata({_FOOTER_KEY: info.model_dump_json()})
    writer.close()
    return sink.getvalue(), info


def read_part(
    read: Callable[[int, int], bytes], size: int, columns: Columns, part: PartRange, *, job_id: str
) -> PartInfo:
    """What the footer of a file says, after checking that the file is this part of this job, and whole by its size.

    `read(start, stop)` gives bytes of the file, which has `size` of them; only the end is read. Raises DamagedPart.
    """
    footer = _read_footer(read, size)
    try:
        metadata = pq.read_metadata(BytesIO(_MAGIC + footer))
        info = PartInfo.model_validate_json((metadata.metadata or {})[_FOOTER_KEY])
        schema = metadata.schema.to_arrow_schema()
    except KeyError:
        raise DamagedPart("batchgen did not write it") from None
    except (pa.ArrowException, OSError, ValidationError) as error:  # Arrow raises OSError for a broken footer
        raise DamagedPart(f"its footer can't be read ({str(error).splitlines()[0]})") from error
    if info.job_id != job_id:
        raise DamagedPart("it belongs to another job")
    if (info.start, info.stop, info.n) != (part.start, part.stop, part.n):
        raise DamagedPart(
            f"it holds rows {info.start} to {info.stop} times {info.n}, not {part.start} to {part.stop} times {part.n}"
        )
    if not metadata.num_rows == part.num_output_rows == sum(info.rows_by_status.values()):
        raise DamagedPart(f"it holds {metadata.num_rows} output rows instead of {part.num_output_rows}")
    if info.data_bytes + len(footer) != size:
        raise DamagedPart(f"its size is {size} bytes, not {info.data_bytes + len(footer)}")
    if not schema.remove_metadata().equals(columns.schema):
        raise DamagedPart("its columns are others")
    return info


def check_part_bytes(data: bytes, info: PartInfo) -> None:
    """Compare a whole part with the hash in its footer. Raises DamagedPart."""
    if xxhash.xxh3_64_hexdigest(memoryview(data)[: info.data_bytes]) != info.xxhash:
        raise DamagedPart("its bytes are not those that were written (xxhash differs)")


def _read_footer(read: Callable[[int, int], bytes], size: int) -> bytes:
    """The end of a Parquet file: footer, its length, magic."""
    end = read(max(0, size - _TAIL_BYTES), size)
    if len(end) < 8 or not end.endswith(_MAGIC):
        raise DamagedPart("its end is missing")
    wanted = struct.unpack("<I", end[-8:-4])[0] + 8
    if wanted > size:
        raise DamagedPart("its beginning is missing")
    return end[-wanted:] if wanted <= len(end) else read(size - wanted, size)
