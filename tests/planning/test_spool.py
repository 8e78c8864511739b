"""Prompts that wait on disk come back as they went in."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from batchgen.errors import StorageError
from batchgen.planning.spool import WINDOW, Spool


def test_prompts_and_records_come_back() -> None:
    with Spool() as spool:
        prompts = [np.array(ids, np.int32) for ids in ([1, 2, 3], [], [2**31 - 1])]
        for number, prompt in enumerate(prompts):
            spool.append(prompt, b"record" * number, outputs=number, merge_key=number - 1)
        assert len(spool) == 3
        assert spool.num_tokens == 4
        assert [spool.token_ids(i).tolist() for i in range(3)] == [p.tolist() for p in prompts]
        assert [spool.record(i) for i in range(3)] == [b"", b"record", b"recordrecord"]
        tokens = spool.tokens()
        assert tokens.starts.tolist() == [0, 3, 3]
        assert tokens.lengths.tolist() == [3, 0, 1]
        assert len(tokens.tokens) == 4 + WINDOW
        assert (spool.outputs.tolist(), spool.merge_keys.tolist()) == ([0, 1, 2], [-1, 0, 1])


def test_nothing_is_left_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when the process is killed: the files have no names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spool = Spool()
    spool.append(np.arange(1000, dtype=np.int32), b"record")
    spool.tokens()
    assert os.listdir(tmp_path) == []
    spool.close()


def test_a_folder_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(StorageError, match=r"missing.*Set TMPDIR to a folder with room"):
        Spool()


def test_a_full_disk_is_a_storage_error() -> None:
    with Spool() as spool, open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), spool._tokens._file.fileno())
        with pytest.raises(StorageError, match="No space left"):
            spool.append(np.zeros(2**19, np.int32), b"")


def test_announced_prompts_are_what_is_then_read(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: set[tuple[int, int]] = set()
    read: set[tuple[int, int]] = set()
    pread = os.pread

    def watched(file: int, size: int, start: int) -> bytes:
        read.add((start, size))
        return pread(file, size, start)

    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, advice: asked.add((start, size)))
    monkeypatch.setattr(os, "pread", watched)
    with Spool() as spool:
        for number in range(5):
            spool.append(np.arange(number, dtype=np.int32), b"record" * number)
        spool.announce([3, 1])
        for number in (3, 1):
            spool.record(number)
            spool.token_ids(number)
    assert asked == read
    assert len(read) == 4
