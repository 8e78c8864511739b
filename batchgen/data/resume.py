"""Going on with the job in an output folder, and the ways in which a new run may differ from it on purpose."""

from dataclasses import dataclass

from batchgen.data.files import TEMPORARY, OutputFiles
from batchgen.data.lock import LOCK_NAME
from batchgen.data.manifest import Manifest, check_same_job
from batchgen.data.rows import FAILED
from batchgen.errors import StorageError


@dataclass(frozen=True, slots=True)
class Resume:
    """What to do with what is in the output folder already, other than going on with the same job.

    fresh: refuse to go on: the folder has to be empty.
    extend: the input has new files at its end; run only their rows.
    retry_failed: run the rows that failed once more.
    takeover: take the folder from a run that holds it, and is alive as far as one can see.
    """

    fresh: bool = False
    extend: bool = False
    retry_failed: bool = False
    takeover: bool = False

    def stored(self, files: OutputFiles, manifest: Manifest) -> Manifest | None:
        """The manifest to go on with, None for an empty folder.

        Raises JobFileError when the folder holds another job, StorageError for a folder that has to be empty.
        """
        if self.fresh:
            _refuse_files(files)
        stored = files.stored_manifest()
        if stored is not None and self.extend:
            return stored.extend(manifest)
        if stored is not None:
            check_same_job(stored, manifest, files.url)
        return stored

    def is_done(self, stored: Manifest) -> bool:
        """Whether there is nothing to do for this job, as far as its manifest knows."""
        return stored.state == "finished" and not (self.retry_failed and num_failed(stored.rows_by_status))


def num_failed(rows_by_status: dict[str, int]) -> int:
    """How many rows failed."""
    return sum(rows_by_status.get(status, 0) for status in FAILED)


def _refuse_files(files: OutputFiles) -> None:
    there = [name for name in files.sizes() if name != LOCK_NAME and not TEMPORARY.fullmatch(name)]
    if there:
        raise StorageError(
            f"{files.url} has {len(there)} files, and --fresh starts in an empty folder only. "
            "Nothing was removed: remove them yourself, or give the job another output.path."
        )
