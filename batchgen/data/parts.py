"""One part of the output: what it says about itself, and its rows as the bytes of a Parquet file.

The footer of such a file carries PartInfo, with a hash of every byte before it: a file cut, grown or swapped is known.
"""

import struct
from collections.abc import Callable, Sequence
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from batchgen.data.layout import PartRange
from batchgen.data.rows import FAILED
from batchgen.errors import InternalError

_FOOTER_KEY = b"batchgen"
_MAGIC = b"PAR1"
_TAIL_BYTES = 64 * 1024  # read first; most footers fit


class PartInfo(BaseModel):
    """What a part says about itself, and what the manifest lists once the job is finished.

    It lies in the footer of a Parquet file, and beside a text file until the manifest has it.
    """

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
    """Size of all that comes before the footer; of the whole file when it is text."""
    xxhash: str
    """xxh3-64 of those bytes."""


class DamagedPart(Exception):  # noqa: N818 - never leaves the data layer
    """A file under a part's name that is not that part, whole. The message says why."""


def whole_part(part: PartRange, tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of `tables`, in any order, as those of the part in order; of a row that is there twice, the last.

    Raises InternalError when they are not all of the part's rows.
    """
    rows = pa.concat_tables(tables)
    places = (rows["row"].to_numpy() - part.start) * part.n + rows["sample"].to_numpy()
    there, from_end = np.unique(places[::-1], return_index=True)
    if not np.array_equal(there, np.arange(part.num_output_rows)):
        raise InternalError(f"{part.name} was to be written, but has {len(there)} of {part.num_output_rows} rows")
    return rows.take(pa.array(len(places) - 1 - from_end))


def without_failed(rows: pa.Table) -> pa.Table:
    """The rows that did not fail."""
    return rows.filter(pc.invert(pc.is_in(rows["status"], pa.array(FAILED))))


def describe_part(part: PartRange, table: pa.Table, data: bytes | memoryview, *, job_id: str, version: str) -> PartInfo:
    """What a part says about itself: `table` are its rows, `data` the bytes of its file that are not a footer."""
    prompts = table.filter(pc.equal(table["sample"], 0))
    return PartInfo(
        name=part.name,
        batchgen_version=version,
        job_id=job_id,
        start=part.start,
        stop=part.stop,
        n=part.n,
        rows_by_status={count["values"]: count["counts"] for count in table["status"].value_counts().to_pylist()},
        prompt_tokens=_total(prompts["prompt_tokens"]),
        cached_tokens=_total(prompts["cached_tokens"]),
        output_tokens=_total(table["output_tokens"]),
        data_bytes=len(data),
        xxhash=xxhash.xxh3_64_hexdigest(data),
    )


def encode_part(
    part: PartRange, table: pa.Table, *, job_id: str, version: str, compression: str
) -> tuple[bytes, PartInfo]:
    """The Parquet file of `table`, which holds the part's rows in order, and what its footer says."""
    sink = BytesIO()
    writer = pq.ParquetWriter(sink, table.schema, compression=compression)
    writer.write_table(table)
    data = sink.getbuffer()
    info = describe_part(part, table, data, job_id=job_id, version=version)
    data.release()  # a BytesIO can't grow while a view of it lives
    writer.add_key_value_metadata({_FOOTER_KEY: info.model_dump_json()})
    writer.close()
    return sink.getvalue(), info


def _total(column: pa.ChunkedArray) -> int:
    return pc.sum(column).as_py() or 0


def read_part(
    read: Callable[[int, int], bytes], size: int, schema: pa.Schema | None, part: PartRange, *, job_id: str
) -> PartInfo:
    """What the footer of a file says, after checking that the file is this part of this job, and whole by its size.

    `read(start, stop)` gives bytes of the file, which has `size` of them; only the end is read. Columns are
    compared with `schema`, when there is one. Raises DamagedPart.
    """
    footer = _read_footer(read, size)
    try:
        metadata = pq.read_metadata(BytesIO(_MAGIC + footer))
        info = PartInfo.model_validate_json((metadata.metadata or {})[_FOOTER_KEY])
        found = metadata.schema.to_arrow_schema()
    except KeyError:
        raise DamagedPart("batchgen did not write it") from None
    except (pa.ArrowException, OSError, ValidationError) as error:  # Arrow raises OSError for a broken footer
        raise DamagedPart(f"its footer can't be read ({str(error).splitlines()[0]})") from error
    check_part_range(info, part, job_id)
    if not metadata.num_rows == part.num_output_rows == sum(info.rows_by_status.values()):
        raise DamagedPart(f"it holds {metadata.num_rows} output rows instead of {part.num_output_rows}")
    if info.data_bytes + len(footer) != size:
        raise DamagedPart(f"its size is {size} bytes, not {info.data_bytes + len(footer)}")
    if schema is not None and not found.remove_metadata().equals(schema):
        raise DamagedPart("its columns are others")
    return info


def check_part_range(info: PartInfo, part: PartRange, job_id: str) -> None:
    """Compare what a part says about itself with what it has to be. Raises DamagedPart."""
    if info.job_id != job_id:
        raise DamagedPart("it belongs to another job")
    if (info.start, info.stop, info.n) != (part.start, part.stop, part.n):
        raise DamagedPart(
            f"it holds rows {info.start} to {info.stop} times {info.n}, not {part.start} to {part.stop} times {part.n}"
        )


def decode_part(data: bytes, info: PartInfo) -> pa.Table:
    """The rows of a part, checked by its hash. Raises DamagedPart."""
    check_part_bytes(data, info)
    return pq.read_table(BytesIO(data))


def check_part_bytes(data: bytes, info: PartInfo) -> None:
    """Compare a whole part with its hash. Raises DamagedPart."""
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
