"""Ids that come more than once in the input: counted, in bounded memory."""

from array import array

import numpy as np
import xxhash


class RepeatedIds:
    """Counts repeats among the first `most` ids. An id is kept as a 64-bit hash, so a million take 8 MB."""

    def __init__(self, most: int = 2**20) -> None:
        self._most = most
        self._hashes = array("Q")

    def add(self, value: object) -> None:
        """Take the next row's id. A row without one (null) repeats nothing; the number 1 is not the text "1"."""
        if value is not None and len(self._hashes) < self._most:
            self._hashes.append(xxhash.xxh3_64_intdigest(repr(value).encode()))

    def count(self) -> int:
        """How many of the ids had come before."""
        return len(self._hashes) - len(np.unique(np.frombuffer(self._hashes, np.uint64)))

    def warning(self, column: str) -> str | None:
        """What the user should know, or None."""
        count = self.count()
        if not count:
            return None
        among = f" among the first {self._most:,}" if len(self._hashes) == self._most else ""
        return (
            f"{count:,} values of {column!r}{among} repeat an earlier one: every row has its answer, found by its "
            "position; the ids alone do not tell them apart"
        )
