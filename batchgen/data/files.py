"""The files of an output folder, on any file system."""

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from batchgen.data.lock import LOCK_NAME, OutputLock
from batchgen.data.manifest import MANIFEST_NAME, Manifest, parse_manifest
from batchgen.data.storage import (
    errors_as,
    filesystem,
    is_local,
    join,
    list_files,
    read_bytes,
    redact,
    remove,
    write_atomic,
)
from batchgen.errors import StorageError

NOTES = "journal"
"""Where the notes about parts of text lie, until the manifest has them."""
TEMPORARY = re.compile(
    rf"({NOTES}/)?\.(part-\d{{5,}}-of-\d{{5,}}\.(parquet|jsonl)[.a-z]*|manifest\.json|\.batchgen\.status\.json)"
    r"\.[0-9a-f]{12}\.tmp"
)
_NAMED = 5  # files named in a message


class OutputFiles:
    """Reads and writes by name inside the folder `url`."""

    def __init__(self, url: str) -> None:
        self.url = redact(url)
        self._fs, self._folder = filesystem(url)

    @property
    def is_local(self) -> bool:
        """Whether the folder lies on a file system of this machine."""
        return is_local(self._fs)

    def local_path(self, name: str) -> Path:
        """Where a file of a local folder lies."""
        return Path(self._folder) / name

    def make_folder(self) -> None:
        """Make the folder where the file system has such a thing."""
        if self.is_local:
            with errors_as(StorageError, self.url):
                Path(self._folder).mkdir(parents=True, exist_ok=True)

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by name; a file in a subfolder is named with it."""
        start = len(self._folder.rstrip("/")) + 1
        return {file.path[start:]: file.size for file in list_files(self._fs, self._folder)}

    def stored_manifest(self) -> Manifest | None:
        """The folder's manifest; None for a folder in which no row was ever finished: another job may have it.

        Raises StorageError for a folder with other files and no manifest.
        """
        names = self.sizes().keys()
        if all(name in (MANIFEST_NAME, LOCK_NAME) or TEMPORARY.fullmatch(name) for name in names):
            return None
        if MANIFEST_NAME in names:
            return parse_manifest(self.read(MANIFEST_NAME), join(self.url, MANIFEST_NAME))
        foreign = sorted(name for name in names if name != LOCK_NAME and not TEMPORARY.fullmatch(name))
        if foreign:
            more = f" and {len(foreign) - _NAMED} more" if len(foreign) > _NAMED else ""
            raise StorageError(
                f"{self.url} is no output of batchgen, and not empty: it has {', '.join(foreign[:_NAMED])}{more}. "
                "Give the job an output.path of its own."
            )
        return None

    def read(self, name: str) -> bytes:
        """The whole content of a file."""
        return read_bytes(self._fs, join(self._folder, name))

    def reader(self, name: str) -> Callable[[int, int], bytes]:
        """A function that reads bytes [start, stop) of a file."""

        def read(start: int, stop: int) -> bytes:
            with errors_as(StorageError, join(self.url, name)):
                content: bytes = self._fs.cat_file(join(self._folder, name), start=start, end=stop)
                return content

        return read

    def write(self, name: str, content: bytes, lock: OutputLock) -> None:
        """Publish a file while `lock` is held."""

        def fill(file: IO[bytes]) -> None:
            file.write(content)
            lock.check()  # as late as can be: what comes after is the rename or the upload

        lock.check()
        try:
            write_atomic(self._fs, join(self._folder, name), fill)
        except StorageError:
            lock.check()  # a run that takes the folder over removes what is half written
            raise

    def remove(self, name: str) -> None:
        """Remove a file; it is no error when it is gone already."""
        remove(self._fs, join(self._folder, name))

    def remove_empty_folder(self, name: str) -> None:
        """Remove a folder inside this one, where the file system has such a thing and nothing is in it."""
        if self.is_local:
            with suppress(OSError):  # a folder that somebody keeps a file in
                self.local_path(name).rmdir()
