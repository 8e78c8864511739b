"""How far the job in an output folder is, seen from outside: from its parts, its journal and the note of its run."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from pydantic import ValidationError

from batchgen.data.files import OutputFiles
from batchgen.data.journal import is_segment, read_counts
from batchgen.data.lock import LOCK_NAME, OutputLock
from batchgen.data.manifest import Record
from batchgen.data.part_files import find_parts, part_format
from batchgen.data.resume import num_failed
from batchgen.errors import StorageError

STATUS_NAME = ".batchgen.status.json"
WINDOW_S = 60.0
"""Rates are those of the last minute."""


class Note(Record):
    """What a run writes down now and then for `batchgen status`."""

    time: str
    """When, UTC."""
    rows_per_second: float
    """Output rows a second, over the last minute."""


class Notes:
    """Makes notes of a run, from the number of its finished output rows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    def note(self, num_rows: int) -> bytes:
        """The note's file, when this run has finished so many rows."""
        now = self._clock()
        self._marks.append((now, num_rows))
        while len(self._marks) > 2 and now - self._marks[1][0] >= WINDOW_S:
            self._marks.popleft()
        since, before = self._marks[0]
        rate = (num_rows - before) / max(now - since, 1e-9)
        return Note(time=_now(), rows_per_second=round(rate, 3)).model_dump_json().encode() + b"\n"


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is. Rows are output rows; times are UTC; None where nothing is known.

    `holder` names the process that writes to the folder. A job is finished, running, or stopped.
    """

    state: str
    total: int
    done: int
    failed: int
    rows_per_second: float | None
    seconds_left: float | None
    last_activity: str | None
    holder: str | None


def job_status(url: str) -> JobStatus:
    """The status of the job in the folder `url`. Raises StorageError when there is none, or it can't be read."""
    files = OutputFiles(url)
    manifest = files.stored_manifest()
    if manifest is None:
        raise StorageError(f"{files.url} has no output of batchgen: no job wrote to it yet.")
    total = manifest.num_rows * manifest.n
    if manifest.state == "finished":
        failed = num_failed(manifest.rows_by_status)
        return JobStatus("finished", total, total, failed, None, 0.0, manifest.finished, None)
    sizes = files.sizes()
    parts = find_parts(files, sizes, manifest, part_format(files, manifest))
    done = sum(sum(part.rows_by_status.values()) for part in parts.values())
    failed = sum(num_failed(part.rows_by_status) for part in parts.values())
    for name in filter(is_segment, sizes):
        for counts in read_counts(_read(files, name), manifest.job_id):
            if counts.part not in parts:
                done, failed = done + counts.num_rows, failed + counts.num_failed
    holder = OutputLock.holder(url) if LOCK_NAME in sizes else None
    note = _note(files) if STATUS_NAME in sizes else None
    rate = note.rows_per_second if note and holder else None
    return JobStatus(
        state="running" if holder else "stopped",
        total=total,
        done=min(done, total),
        failed=failed,
        rows_per_second=rate,
        seconds_left=(total - done) / rate if rate else None,
        last_activity=note.time if note else None,
        holder=holder,
    )


def describe(status: JobStatus) -> str:
    """The status as lines for people."""
    share = status.done / status.total if status.total else 1.0
    lines = [f"state   {status.state}" + (f", {status.holder}" if status.holder else "")]
    lines.append(f"rows    {status.done:,} of {status.total:,} done ({share:.1%}), {status.failed:,} failed")
    if status.rows_per_second is not None:
        left = "" if status.seconds_left is None else f", {timedelta(seconds=round(status.seconds_left))} left"
        lines.append(f"speed   {status.rows_per_second:,.1f} rows/s{left}")
    if status.last_activity is not None:
        lines.append(f"last    {status.last_activity}")
    return "\n".join(lines)


def _note(files: OutputFiles) -> Note | None:
    try:
        return Note.model_validate_json(_read(files, STATUS_NAME))
    except ValidationError:
        return None


def _read(files: OutputFiles, name: str) -> bytes:
    """A file's content; none when the run has removed it since it was listed."""
    try:
        return files.read(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return b""
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
