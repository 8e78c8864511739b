"""Finished rows that a store did not take, kept on this machine until the next run of the job here sends them.

They lie in a folder of batchgen's cache that is named for the job.
"""

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from batchgen import env
from batchgen.data.journal import Journal
from batchgen.data.layout import Layout
from batchgen.data.storage import write_atomic
from batchgen.errors import StorageError

log = logging.getLogger(__name__)


def keep_unsent(job_id: str, rows: pa.Table) -> None:
    """Keep rows here, as well as it goes: the job ends anyway, for a reason that is told."""
    path = _folder(job_id) / f"{uuid.uuid4().hex}.parquet"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(LocalFileSystem(), str(path), lambda file: pq.write_table(rows, file))
    except (OSError, StorageError) as error:
        log.warning("%d finished rows could be kept neither there nor here: %s", rows.num_rows, error)
    else:
        log.warning("%d finished rows are kept in %s: the next run on this machine sends them", rows.num_rows, path)


def send_unsent(journal: Journal, job_id: str, schema: pa.Schema, layout: Layout) -> Iterator[tuple[int, pa.Table]]:
    """Journal the rows that earlier runs of the job kept here: the numbers of their parts, and their rows.

    Raises StorageError.
    """
    for path in sorted(_folder(job_id).glob("*.parquet")):
        try:
            rows = pq.read_table(path, schema=schema)
        except (OSError, pa.ArrowException) as error:
            log.warning("%s can't be read, its rows are done again: %s", path, error)
            continue
        numbers = pa.array(map(layout.number_of, rows["row"].to_pylist()), pa.int64())
        batches = [(number, rows.filter(pc.equal(numbers, number))) for number in pc.unique(numbers).to_pylist()]
        journal.append(batches)
        path.unlink()
        log.warning("%d finished rows that an earlier run kept in %s were sent", rows.num_rows, path)
        yield from batches


def forget_unsent(job_id: str) -> None:
    """The job is done: what is kept for it is of no use any more."""
    with suppress(FileNotFoundError):
        shutil.rmtree(_folder(job_id))


def _folder(job_id: str) -> Path:
    return env.cache_folder() / "unsent" / job_id
