"""Prompts on local disk, waiting for their turn: token ids to plan with, and a record of bytes for each."""

import mmap
import os
import tempfile
from array import array
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from batchgen.errors import StorageError

Tokens = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

WINDOW = 32
"""Tokens that may be read behind any prompt: the token array is longer than all prompts by so many."""
_MOST_MAPPED = 2**29


@dataclass(slots=True)
class PromptTokens:
    """Prompt i is `tokens[starts[i] : starts[i] + lengths[i]]`. With a `mapping`, tokens are pages of a file."""

    tokens: Tokens
    starts: Ints
    lengths: Tokens
    mapping: mmap.mmap | None = None

    def release(self) -> None:
        """Let the system have mapped pages back when they are many: it keeps them in its cache, not in this process."""
        if self.mapping is not None and len(self.mapping) > _MOST_MAPPED and _mapped_bytes() > _MOST_MAPPED:
            self.mapping.madvise(mmap.MADV_DONTNEED)


def _mapped_bytes() -> int:
    """Bytes of files that this process holds in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[2]) * mmap.PAGESIZE


class Spool:
    """A growing list of prompts in two files without names: they are gone with the process, however it ends.

    `outputs` are the tokens that a prompt's answer may have. Prompts with equal token ids and equal `merge_key` have
    equal answers; a negative key equals no other. Raises StorageError when the disk is full.
    """

    def __init__(self) -> None:
        self._tokens = _File()
        self._records = _File()
        self._starts, self._lengths = array("q"), array("i")
        self._outputs, self._merge_keys = array("i"), array("q")
        self._record_ends = array("q", [0])

    def __len__(self) -> int:
        return len(self._lengths)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, token_ids: Tokens, record: bytes, *, outputs: int = 0, merge_key: int = -1) -> None:
        """Add a prompt."""
        self._starts.append(self._tokens.size // 4)
        self._lengths.append(len(token_ids))
        self._outputs.append(min(outputs, 2**31 - 1))
        self._merge_keys.append(merge_key)
        self._tokens.write(token_ids.astype(np.int32, copy=False).tobytes())
        self._records.write(record)
        self._record_ends.append(self._records.size)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return self._tokens.size // 4

    @property
    def outputs(self) -> Tokens:
        """Expected tokens of each answer."""
        return np.frombuffer(self._outputs, np.int32) if self._outputs else np.empty(0, np.int32)

    @property
    def merge_keys(self) -> Ints:
        """The merge key of each prompt."""
        return np.frombuffer(self._merge_keys, np.int64) if self._merge_keys else np.empty(0, np.int64)

    def tokens(self) -> PromptTokens:
        """All prompts, as pages of the file. Nothing may be added as long as they are in use."""
        mapping = self._tokens.map(4 * WINDOW)
        starts = np.array(self._starts, np.int64)
        lengths = np.array(self._lengths, np.int32)
        return PromptTokens(np.frombuffer(mapping, np.int32), starts, lengths, mapping)

    def token_ids(self, number: int) -> Tokens:
        """Token ids of one prompt."""
        data = self._tokens.read(self._starts[number] * 4, self._lengths[number] * 4)
        return np.frombuffer(data, np.int32)

    def record(self, number: int) -> bytes:
        """The record of one prompt."""
        start, end = self._record_ends[number : number + 2]
        return self._records.read(start, end - start)

    def announce(self, numbers: Iterable[int]) -> None:
        """Say that these prompts are wanted soon: the disk reads many at a time, and not each when its turn comes."""
        for number in numbers:
            start, end = self._record_ends[number : number + 2]
            self._records.announce(start, end - start)
            self._tokens.announce(self._starts[number] * 4, self._lengths[number] * 4)

    def close(self) -> None:
        """Give the disk space back."""
        self._tokens.close()
        self._records.close()


class _File:
    """A file without a name that grows at its end."""

    def __init__(self) -> None:
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="batchgen-", buffering=2**20)  # noqa: SIM115 - close()
        except OSError as error:
            raise _disk_error(error) from error
        self.size = 0

    def write(self, data: bytes) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise _disk_error(error) from error
        self.size += len(data)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            raise _disk_error(error) from error

    def read(self, start: int, size: int) -> bytes:
        self.flush()
        return os.pread(self._file.fileno(), size, start)

    def announce(self, start: int, size: int) -> None:
        os.posix_fadvise(self._file.fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def map(self, padding: int) -> mmap.mmap:
        """The whole file in memory, with `padding` bytes more than were written."""
        self.flush()
        try:
            os.ftruncate(self._file.fileno(), self.size + padding)
        except OSError as error:
            raise _disk_error(error) from error
        return mmap.mmap(self._file.fileno(), self.size + padding, access=mmap.ACCESS_READ)

    def close(self) -> None:
        with suppress(OSError):  # a full disk: what is left in the buffer is of no use to anybody
            self._file.close()


def _disk_error(error: OSError) -> StorageError:
    return StorageError(
        f"prompts can't be kept on local disk, in {tempfile.gettempdir()}: {error.strerror or error}. "
        "Set TMPDIR to a folder with room, or a smaller plan.window in the job file"
    )
