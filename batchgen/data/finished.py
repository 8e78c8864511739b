"""Which parts of a job are there and whole."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from batchgen.data.files import OutputFiles
from batchgen.data.layout import Layout, PartRange
from batchgen.data.parts import DamagedPart, PartInfo, read_part
from batchgen.data.storage import join

log = logging.getLogger(__name__)

_READERS = 8  # footers read at once


def find_parts(
    files: OutputFiles, sizes: Mapping[str, int], layout: Layout, schema: pa.Schema | None, job_id: str
) -> dict[int, PartInfo]:
    """The finished parts by number, by what their footers say. One that is damaged is left out, with a warning."""

    def read(part: PartRange) -> PartInfo | None:
        try:
            return read_part(files.reader(part.name), sizes[part.name], schema, part, job_id=job_id)
        except DamagedPart as damage:
            log.warning("%s is computed again: %s", join(files.url, part.name), damage)
            return None

    there = [part for part in map(layout.part, range(layout.num_parts)) if part.name in sizes]
    with ThreadPoolExecutor(_READERS, thread_name_prefix="batchgen-footers") as pool:
        infos = pool.map(read, there)
        return {part.number: info for part, info in zip(there, infos, strict=True) if info is not None}
