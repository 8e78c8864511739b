"""The claim of an output folder as an S3 object. Every change is conditional, so of two runs exactly one wins."""

import json
from dataclasses import asdict

from batchgen.data.lock import Claim, Decide, parse_claim
from batchgen.data.s3 import S3FileSystem, is_lost_race
from batchgen.data.storage import errors_as, url_of
from batchgen.errors import StorageError

_MOST_RACES = 10


class S3Claim:
    """Reads and changes the claim by its ETag."""

    def __init__(self, fs: S3FileSystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._url = url_of(fs, path)
        self._bucket, self._key, _ = fs.split_path(path)

    def read(self) -> Claim | None:
        """The claim that holds now."""
        return self._read()[0]

    def change(self, decide: Decide, *, create: bool = False) -> None:
        """Replace the claim by what `decide` makes of it; None removes it. Nothing changes when `decide` raises."""
        for _ in range(_MOST_RACES):
            old, etag = self._read()
            new = decide(old)
            if self._try(new, etag):
                return
            # Refused: somebody was faster. Or it was our own request, whose answer was lost, so that it was sent twice.
            if self._read()[0] == new:
                return
        raise StorageError(f"{self._url}: changed by somebody else {_MOST_RACES} times in a row. Run it again.")

    def _read(self) -> tuple[Claim | None, str | None]:
        with errors_as(StorageError, self._url):
            try:
                content, etag = self._fs.get_with_etag(self._path)
            except FileNotFoundError:
                return None, None
        return parse_claim(content), etag

    def _try(self, new: Claim | None, etag: str | None) -> bool:
        """Write or remove the claim if it is still the one with this ETag; whether it was."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        place = {"Bucket": self._bucket, "Key": self._key}
        with errors_as(StorageError, self._url):
            try:
                if new is None:
                    self._fs.call_s3("delete_object", **place, **condition)
                else:
                    self._fs.call_s3("put_object", **place, **condition, Body=json.dumps(asdict(new)).encode())
            except OSError as error:
                if isinstance(error, FileExistsError) or is_lost_race(error):
                    return False
                raise
        return True
