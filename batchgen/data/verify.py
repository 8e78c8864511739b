"""Proves an output whole: manifest, parts and input against one another; and lists the rows that failed."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from batchgen.data.files import OutputFiles
from batchgen.data.layout import PartRange
from batchgen.data.manifest import Manifest
from batchgen.data.part_files import PartFormat, part_format
from batchgen.data.parts import DamagedPart
from batchgen.data.resume import num_failed
from batchgen.data.rows import FAILED
from batchgen.data.source import open_source
from batchgen.errors import InputError, StorageError
from batchgen.job.spec import Input

_SHOWN = 20  # problems
_MEND = "Remove the parts that are damaged, and run the job again: it makes anew what is missing."


class Verified(NamedTuple):
    """What was proved."""

    num_rows: int
    num_parts: int
    rows_by_status: dict[str, int]


class FailedRow(NamedTuple):
    """An output row that is not ok, and why."""

    row: int
    sample: int
    status: str
    kind: str
    message: str


def verify_output(url: str, *, with_input: bool = True) -> Verified:
    """Read every part of the job in the folder `url`, and its input, and compare them with its manifest.

    Proves that each output row is there once and in order, that every byte of the parts is as it was written, that
    columns and counts are those of the manifest, and that the input is the one that was read. Raises StorageError with
    all that differs.
    """
    files = OutputFiles(url)
    manifest = _manifest(files)
    problems = [] if manifest.state == "finished" else ["the job is not finished"]
    sizes = files.sizes()
    parts = [manifest.layout.part(number) for number in range(manifest.layout.num_parts)]
    strangers = {name for name in sizes if name.startswith("part-")} - {part.name for part in parts}
    problems += [f"{name} is no part of this job" for name in sorted(strangers)]
    format_ = part_format(files, manifest)
    for part in parts:
        problems += _problems_of_part(format_, sizes, part, manifest)
    problems += _problems_of_input(manifest) if with_input else []
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise StorageError(f"{files.url} is not whole:\n{listed}{more}\n{_MEND}")
    return Verified(manifest.num_rows * manifest.n, len(parts), manifest.rows_by_status)


def failed_rows(url: str) -> Iterator[FailedRow]:
    """The rows that failed, of all parts that are written. Raises StorageError."""
    files = OutputFiles(url)
    manifest, sizes = _manifest(files), files.sizes()
    format_ = part_format(files, manifest)
    for part in map(manifest.layout.part, range(manifest.layout.num_parts)):
        if part.name not in sizes:
            continue
        try:
            info = format_.info(part, sizes)
            if not num_failed(info.rows_by_status):
                continue
            table = format_.read(info)
        except DamagedPart as damage:
            raise StorageError(f"{files.url}/{part.name}: {damage}. {_MEND}") from damage
        for found in table.select(["row", "sample", "status", "error"]).to_pylist():
            if found["status"] in FAILED:
                error = found["error"] or {"kind": found["status"], "message": ""}
                yield FailedRow(found["row"], found["sample"], found["status"], error["kind"], error["message"])


def describe_failures(rows: Iterable[FailedRow], most: int) -> str:
    """The failed rows as lines for people: for each kind how many, the first message, and the first row numbers."""
    by_kind: dict[str, list[FailedRow]] = {}
    counts: Counter[str] = Counter()
    for row in rows:
        counts[row.kind] += 1
        if counts[row.kind] <= most:
            by_kind.setdefault(row.kind, []).append(row)
    lines = []
    for kind, first in by_kind.items():
        more = ", ..." if counts[kind] > most else ""
        lines += [f"{kind}: {counts[kind]:,}", f"  {first[0].message}"]
        lines.append("  rows " + ", ".join(str(row.row) for row in first) + more)
    return "\n".join(lines) or "no row failed"


def _manifest(files: OutputFiles) -> Manifest:
    manifest = files.stored_manifest()
    if manifest is None:
        raise StorageError(f"{files.url} has no output of batchgen: no job wrote to it yet.")
    return manifest


_IN_LIST = re.compile(r"list<[^:<>]+: ")


def _problems_of_part(format_: PartFormat, sizes: dict[str, int], part: PartRange, manifest: Manifest) -> Iterator[str]:
    if part.name not in sizes:
        yield f"{part.name} is missing: input rows {part.start} to {part.stop - 1}"
        return
    try:
        info = format_.info(part, sizes)
        table = format_.read(info)
    except DamagedPart as damage:
        yield f"{part.name}: {damage}"
        return
    if manifest.state == "finished" and info != manifest.parts[part.number]:
        yield f"{part.name} is another one than the manifest names"
    columns = {field.name: _type_name(str(field.type)) for field in table.schema}
    wanted = {name: _type_name(type_) for name, type_ in manifest.columns.items()}
    if manifest.part_format == "parquet" and columns != wanted:  # text has no types
        yield f"{part.name} has other columns than the manifest: {sorted(columns.items() ^ wanted.items())}"
    yield from _problems_of_rows(part, table)


def _problems_of_rows(part: PartRange, table: pa.Table) -> Iterator[str]:
    wanted = np.arange(part.start * part.n, part.stop * part.n)
    places = table["row"].to_numpy() * part.n + table["sample"].to_numpy()
    if len(places) != len(wanted):
        yield f"{part.name} has {len(places)} rows instead of {len(wanted)}"
    elif (wrong := np.flatnonzero(places != wanted)).size:
        row, sample = divmod(int(wanted[wrong[0]]), part.n)
        yield f"{part.name}: where row {row} sample {sample} has to be there is row {table['row'][int(wrong[0])]}"


def _problems_of_input(manifest: Manifest) -> Iterator[str]:
    spec = Input.model_validate(manifest.spec["input"])
    try:
        files = open_source(spec, base=Path.cwd(), columns=None, carried=[]).files
    except InputError as error:
        yield f"the input can't be read: {error}"
        return
    for record, file in zip(manifest.inputs, files, strict=False):
        if (record.num_rows, record.fingerprint) != (file.num_rows, file.fingerprint):
            yield f"{file.path} has changed since it was read: it had {record.num_rows} rows and has {file.num_rows}"
    if len(files) != len(manifest.inputs):
        yield f"the input has {len(files)} files, and {len(manifest.inputs)} were read"


def _type_name(name: str) -> str:
    """The name of a type, whatever it calls what is in its lists: Parquet has a word of its own for that."""
    return _IN_LIST.sub("list<element: ", name)
