"""Atomic writes, listings and errors of file systems."""

import errno
import os
from pathlib import Path
from typing import IO

import fsspec
import pytest

from batchgen.data import storage
from batchgen.errors import InputError, StorageError


def test_a_url_without_a_bucket_is_refused() -> None:
    for url in ("s3://", "s3:///", "s3a://"):
        with pytest.raises(InputError, match=r"names no bucket\. Write s3://bucket/folder"):
            storage.filesystem(url, InputError)


def test_an_endpoint_that_is_no_url_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.config, "conf", {})
    storage.configure(endpoint="127.0.0.1:9000", region=None, profile=None, anonymous=True)
    fs, path = storage.filesystem("s3://bucket/key")
    with pytest.raises(StorageError, match=r"Invalid endpoint: 127\.0\.0\.1:9000: write http://host:port"):
        storage.read_bytes(fs, path)


def test_a_local_file_appears_whole(tmp_path: Path) -> None:
    fs, path = storage.filesystem(str(tmp_path / "new" / "a.bin"))

    def writer(file: IO[bytes]) -> None:
        file.write(b"half")
        file.flush()
        assert not os.path.exists(path)
        file.write(b" and half")

    storage.write_atomic(fs, path, writer)
    assert storage.read_bytes(fs, path) == b"half and half"
    assert os.listdir(tmp_path / "new") == ["a.bin"]


@pytest.mark.parametrize("url", ["{}/a.bin", "memory://D06-failed/a.bin"])
def test_D06_a_failed_write_leaves_nothing_and_keeps_the_old_file(tmp_path: Path, url: str) -> None:
    fs, path = storage.filesystem(url.format(tmp_path))
    storage.write_bytes(fs, path, b"old")

    def writer(file: IO[bytes]) -> None:
        file.write(b"new")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match=r"a\.bin: the disk is full.*bytes free"):
        storage.write_atomic(fs, path, writer)
    assert storage.read_bytes(fs, path) == b"old"
    assert [file.path for file in storage.list_files(fs, fs._parent(path))] == [path]


def test_local_files_are_synced_before_and_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle))[1])
    monkeypatch.setattr(Path, "replace", lambda self, target: (calls.append("rename"), replace(self, target))[1])
    fs, path = storage.filesystem(str(tmp_path / "a.bin"))
    storage.write_bytes(fs, path, b"x")
    assert calls == ["fsync", "rename", "fsync"]


def test_a_write_to_another_file_system_is_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = storage.filesystem("memory://D06-upload/part.bin")
    uploads: list[str] = []
    pipe_file = fs.pipe_file
    monkeypatch.setattr(fs, "pipe_file", lambda remote, data: (uploads.append(remote), pipe_file(remote, data))[1])
    storage.write_atomic(fs, path, lambda file: [file.write(b"abc") for _ in range(3)] and None)
    assert uploads == [path]
    assert storage.read_bytes(fs, path) == b"abcabcabc"


def test_listing_is_sorted_complete_and_empty_without_a_folder(tmp_path: Path) -> None:
    for url in (str(tmp_path / "list"), "memory://listing"):
        fs, folder = storage.filesystem(url)
        assert storage.list_files(fs, folder) == []
        for name in ("b", "c/d", "a"):
            storage.write_bytes(fs, f"{folder}/{name}", name.encode())
        assert storage.list_files(fs, folder) == [(f"{folder}/a", 1), (f"{folder}/b", 1), (f"{folder}/c/d", 3)]
        storage.remove(fs, f"{folder}/b")
        storage.remove(fs, f"{folder}/b")
        assert not storage.exists(fs, f"{folder}/b")


def test_an_unreadable_folder_is_an_error_and_never_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    fs, folder = storage.filesystem(str(tmp_path))
    with pytest.raises(InputError, match="no permission"):
        storage.list_files(fs, folder, InputError)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (PermissionError(errno.EACCES, "x"), "no permission"),
        (PermissionError("Forbidden"), "no permission"),
        (OSError(errno.EROFS, "x"), "read-only"),
        (FileNotFoundError("bucket"), "no such file or folder"),
        (OSError("something else"), "something else"),
        (type("NoCredentialsError", (Exception,), {})("Unable to locate credentials"), "AWS_PROFILE"),
    ],
)
def test_errors_say_what_to_do(error: Exception, advice: str) -> None:
    message = storage.explain(error, "s3://bucket/x")
    assert message.startswith("s3://bucket/x: ")
    assert advice in message


def test_D06_secrets_are_not_in_messages() -> None:
    for url in ("s3://key:secret@bucket/x", "https://user:secret@host/x", "https://host/x?X-Amz-Signature=secret"):
        assert "secret" not in storage.redact(url)
        assert "secret" not in storage.explain(FileNotFoundError(), url)
    assert storage.redact("s3://bucket/*?.parquet") == "s3://bucket/*?.parquet"


def test_unknown_protocols_are_refused() -> None:
    with pytest.raises(StorageError, match="nope://bucket/x: Protocol not known"):
        storage.filesystem("nope://bucket/x")


def test_names_of_paths(tmp_path: Path) -> None:
    assert storage.absolute("a/b", tmp_path) == str(tmp_path / "a/b")
    assert storage.absolute("/a/b", tmp_path) == "/a/b"
    assert storage.absolute("s3://b/c", tmp_path) == "s3://b/c"
    assert storage.join("s3://b/c/", "d", "e") == "s3://b/c/d/e"
    assert storage.is_remote("s3://b")
    assert not storage.is_remote("file:///b")
    assert storage.is_local(fsspec.filesystem("file"))
    assert not storage.is_local(fsspec.filesystem("memory"))
