"""The claim of an output folder on an object store that has neither flock nor conditional requests."""

import json
import time
from dataclasses import asdict

import fsspec

from batchgen.data.lock import Claim, Decide, parse_claim
from batchgen.data.storage import read_bytes, remove, write_bytes
from batchgen.errors import StorageError

_SETTLE_S = 1.0  # between writing a claim and reading it back


class RemoteClaim:
    """The claim as an object. Best effort: of two claims written at once, the later one wins, and both look again."""

    def __init__(self, fs: fsspec.AbstractFileSystem, path: str) -> None:
        self._fs = fs
        self._path = path

    def read(self) -> Claim | None:
        """The claim that holds now."""
        try:
            return parse_claim(read_bytes(self._fs, self._path))
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def change(self, decide: Decide, *, create: bool = False) -> None:
        """Replace the claim by what `decide` makes of it; None removes it. Nothing changes when `decide` raises."""
        old = self.read()
        new = decide(old)
        if new is None:
            remove(self._fs, self._path)
            return
        write_bytes(self._fs, self._path, json.dumps(asdict(new)).encode())
        if old is None or old.token != new.token:
            time.sleep(_SETTLE_S)
