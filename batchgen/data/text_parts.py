"""One part of the output as lines of JSON: plain rows, or those of an OpenAI batch output. Both are read back whole.

Numbers that JSON lacks (NaN, infinities) are null.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Any

import pyarrow as pa

from batchgen.data.columns import FOUND_BY
from batchgen.data.manifest import Manifest
from batchgen.data.openai_lines import OpenaiLines

_ROWS_AT_ONCE = 256  # as Python objects, log-probabilities take a hundred times what they take in Arrow


def _zstd_compress(data: bytes) -> bytes:
    import zstandard  # for jobs that ask for it

    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _zstd_decompress(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(data)


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": lambda data: gzip.compress(data, mtime=0),  # the same rows are the same bytes
    "zstd": _zstd_compress,
}
_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "none": bytes,
    "gzip": gzip.decompress,
    "zstd": _zstd_decompress,
}


def encode_lines(table: pa.Table, manifest: Manifest) -> bytes:
    """The file of a part's rows, which come in order."""
    rows = _rows(table)
    if manifest.part_format != "jsonl":
        lines = OpenaiLines(manifest)
        rows = (lines.line(list(samples)) for _, samples in groupby(rows, key=lambda row: row["row"]))
    return _COMPRESS[manifest.part_compression]("".join(map(_line, rows)).encode())


def decode_lines(data: bytes, manifest: Manifest, schema: pa.Schema | None) -> pa.Table:
    """The rows in a part's file; without `schema` only the columns by which rows are found and judged."""
    text = _DECOMPRESS[manifest.part_compression](data)
    rows: Iterator[dict[str, Any]] = map(json.loads, text.splitlines())
    if manifest.part_format != "jsonl":
        lines = OpenaiLines(manifest)
        rows = (row for line in rows for row in lines.rows(line))
    schema = schema or FOUND_BY
    tables = [schema.empty_table()]
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        tables.append(pa.Table.from_pylist(some, schema=schema))
    return pa.concat_tables(tables).combine_chunks()


def _rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    for start in range(0, table.num_rows, _ROWS_AT_ONCE):
        yield from table.slice(start, _ROWS_AT_ONCE).to_pylist()


def _line(row: dict[str, Any]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False)
    return text + "\n"


def _finite(value: Any) -> Any:
    """The value with null for every number that JSON lacks."""
    match value:
        case dict():
            return {name: _finite(inner) for name, inner in value.items()}
        case list():
            return [_finite(inner) for inner in value]
        case float() if not math.isfinite(value):
            return None
    return value
