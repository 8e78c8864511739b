"""The parts of a job as files: written, found by later runs, and read back, whatever their format."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pyarrow as pa
from pydantic import ValidationError

from batchgen.data.files import NOTES, OutputFiles
from batchgen.data.layout import PartRange
from batchgen.data.lock import OutputLock
from batchgen.data.manifest import Manifest
from batchgen.data.parts import (
    DamagedPart,
    PartInfo,
    check_part_bytes,
    check_part_range,
    decode_part,
    describe_part,
    encode_part,
    read_part,
)
from batchgen.data.storage import join
from batchgen.data.text_parts import decode_lines, encode_lines

log = logging.getLogger(__name__)

_READERS = 8  # files looked at at once


class PartFormat(Protocol):
    """Knows how the parts of one job are written. All of it may raise StorageError."""

    def info(self, part: PartRange, sizes: Mapping[str, int]) -> PartInfo:
        """What a part says about itself, after checking that it is this one, and whole by its size.

        Little is read. `sizes` are those of the folder's files. Raises DamagedPart.
        """

    def read(self, info: PartInfo) -> pa.Table:
        """The rows of a part, all bytes checked. Raises DamagedPart."""

    def write(self, part: PartRange, table: pa.Table, lock: OutputLock, version: str, compression: str) -> PartInfo:
        """Publish a part, whose rows come in order."""


def part_format(files: OutputFiles, manifest: Manifest, schema: pa.Schema | None = None) -> PartFormat:
    """How the parts of a job are written. Without `schema`, `read` may leave columns out."""
    kind = _ParquetParts if manifest.part_format == "parquet" else _TextParts
    return kind(files, manifest, schema)


def find_parts(
    files: OutputFiles, sizes: Mapping[str, int], manifest: Manifest, format_: PartFormat
) -> dict[int, PartInfo]:
    """The finished parts by number. One that is damaged is left out, with a warning."""

    def look(part: PartRange) -> PartInfo | None:
        try:
            return format_.info(part, sizes)
        except DamagedPart as damage:
            log.warning("%s is computed again: %s", join(files.url, part.name), damage)
            return None

    layout = manifest.layout
    there = [part for part in map(layout.part, range(layout.num_parts)) if part.name in sizes]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="batchgen-parts") as pool:
        infos = pool.map(look, there)
        return {part.number: info for part, info in zip(there, infos, strict=True) if info is not None}


def are_whole(files: OutputFiles, manifest: Manifest) -> bool:
    """Whether all parts of a finished job are there and whole, as far as their ends and sizes tell."""
    found = find_parts(files, files.sizes(), manifest, part_format(files, manifest))
    return tuple(found[number] for number in sorted(found)) == manifest.parts


class _ParquetParts:
    """Each file says in its footer what it is."""

    def __init__(self, files: OutputFiles, manifest: Manifest, schema: pa.Schema | None) -> None:
        self._files = files
        self._job_id = manifest.job_id
        self._schema = schema

    def info(self, part: PartRange, sizes: Mapping[str, int]) -> PartInfo:
        return read_part(self._files.reader(part.name), sizes[part.name], self._schema, part, job_id=self._job_id)

    def read(self, info: PartInfo) -> pa.Table:
        return decode_part(self._files.read(info.name), info)

    def write(self, part: PartRange, table: pa.Table, lock: OutputLock, version: str, compression: str) -> PartInfo:
        data, info = encode_part(part, table, job_id=self._job_id, version=version, compression=compression)
        self._files.write(part.name, data, lock)
        return info


class _TextParts:
    """A text file can't say what it is: a note beside the journal does, written first, and later the manifest."""

    def __init__(self, files: OutputFiles, manifest: Manifest, schema: pa.Schema | None) -> None:
        self._files = files
        self._manifest = manifest
        self._schema = schema
        self._finished = {info.name: info for info in manifest.parts}

    def info(self, part: PartRange, sizes: Mapping[str, int]) -> PartInfo:
        note = note_of(part.name)
        info = self._note(note) if note in sizes else self._finished.get(part.name)
        if info is None:
            raise DamagedPart("batchgen did not write it, or its note is lost")
        check_part_range(info, part, self._manifest.job_id)
        if sizes[part.name] != info.data_bytes:
            raise DamagedPart(f"its size is {sizes[part.name]} bytes, not {info.data_bytes}")
        return info

    def read(self, info: PartInfo) -> pa.Table:
        data = self._files.read(info.name)
        check_part_bytes(data, info)
        return decode_lines(data, self._manifest, self._schema)

    def write(self, part: PartRange, table: pa.Table, lock: OutputLock, version: str, compression: str) -> PartInfo:
        data = encode_lines(table, self._manifest)
        info = describe_part(part, table, data, job_id=self._manifest.job_id, version=version)
        self._files.write(note_of(part.name), info.model_dump_json().encode(), lock)
        self._files.write(part.name, data, lock)
        return info

    def _note(self, name: str) -> PartInfo:
        try:
            return PartInfo.model_validate_json(self._files.read(name))
        except ValidationError as error:
            raise DamagedPart(f"{name}, which says what it has to be, can't be read") from error


def note_of(name: str) -> str:
    """Where the note about a part of text lies."""
    return f"{NOTES}/{name}.json"


def remove_notes(files: OutputFiles) -> None:
    """Remove what was noted about parts of text: the manifest has it now."""
    for name in files.sizes():
        if name.startswith(f"{NOTES}/part-"):
            files.remove(name)
    files.remove_empty_folder(NOTES)
