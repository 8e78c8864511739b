"""Files on any file system: local paths and every URL that fsspec knows, with errors that say what to do.

A file that is written here has its name only when it is whole.
"""

import errno
import os
import re
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple

import fsspec
from fsspec.implementations.local import LocalFileSystem

from batchgen.errors import BatchgenError, StorageError

Writer = Callable[[IO[bytes]], None]
"""Called with an open binary file to fill it."""

_ADVICE = {
    errno.ENOSPC: "the disk is full: free some space and run again",
    errno.EDQUOT: "the quota is used up: free some space and run again",
    errno.EROFS: "this file system is read-only: choose another place",
    errno.EACCES: "no permission: change the rights of the file or folder, or run as a user who may",
    errno.EPERM: "no permission: change the rights of the file or folder, or run as a user who may",
    errno.ENOENT: "no such file or folder",
    errno.EISDIR: "this is a folder, not a file",
    errno.ENOTDIR: "a part of this path is a file, not a folder",
    errno.ENAMETOOLONG: "the name is too long for this file system",
    errno.EMFILE: "too many open files: raise the limit (`ulimit -n`)",
}


# A name, so that s3fs is loaded when the first such URL is opened, and by whoever opens it.
for _protocol in ("s3", "s3a"):
    fsspec.register_implementation(_protocol, "batchgen.data.s3.S3FileSystem", clobber=True)


def configure(*, endpoint: str | None, region: str | None, profile: str | None, anonymous: bool) -> None:
    """Set how S3 is reached by this process from now on, for listing, reading and writing alike.

    What is None comes from the environment and the AWS configuration files, as every AWS program finds it.
    """
    given = {"endpoint_url": endpoint, "profile": profile, "anon": anonymous or None}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if region is not None:
        options["client_kwargs"] = {"region_name": region}
    for protocol in ("s3", "s3a"):
        fsspec.config.conf[protocol] = options


_MOST_UPLOAD = 5 * 2**30  # what S3 takes in one request


class StoredFile(NamedTuple):
    """A file in a listing: its path in its file system, and its size in bytes."""

    path: str
    size: int


def filesystem(url: str, kind: type[BatchgenError] = StorageError) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system of a URL or local path, and the path in it. Raises `kind` for an unknown or uninstalled one."""
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except ValueError as error:
        raise kind(f"{redact(url)}: {error}. Write a local path, or a URL such as s3://bucket/folder") from error
    except ImportError as error:
        raise kind(f"{redact(url)}: {error}. Install the package that reads such URLs") from error
    if "s3" in fs.protocol and not path.strip("/"):
        raise kind(f"{redact(url)} names no bucket. Write s3://bucket/folder")
    return fs, path


def is_remote(url: str) -> bool:
    """Whether this is a URL of another file system than the local one."""
    return "://" in url and not url.startswith(("file://", "local://"))


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether the files of this file system are those of the operating system."""
    return isinstance(fs, LocalFileSystem)


def absolute(url: str, base: Path) -> str:
    """The URL itself, or a local path as seen from the folder `base`."""
    if is_remote(url):
        return url
    return str(base / Path(url.removeprefix("file://").removeprefix("local://")).expanduser())


def join(folder: str, *names: str) -> str:
    """Path or URL of a file in a folder."""
    return "/".join([folder.rstrip("/"), *names])


def url_of(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """How to name a path in messages: the local path, or the URL."""
    return path if is_local(fs) else redact(fs.unstrip_protocol(path))


def redact(url: str) -> str:
    """The URL without user names, passwords and signatures: fit for messages and files."""
    url = re.sub(r"//[^/@]*@", "//", url)
    return re.sub(r"\?[^*/]*=.*$", "", url) if "://" in url else url


@contextmanager
def errors_as(kind: type[BatchgenError], url: str) -> Iterator[None]:
    """Turns errors of the file system into `kind`, with the path and what to do."""
    try:
        yield
    except storage_troubles() as error:
        raise kind(explain(error, url)) from error


def explain(error: BaseException, url: str) -> str:
    """One line about an error of a file system: path, what happened, what to do."""
    name = type(error).__name__
    text = " ".join(str(error).split()) or name
    if name in ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "ProfileNotFound"):
        advice = f"{text}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or storage.anonymous: true"
    elif isinstance(error, FileNotFoundError):
        advice = _ADVICE[errno.ENOENT]
    elif isinstance(error, PermissionError) and is_remote(url):
        advice = f"no permission ({text}): check the credentials, and what they may do there"
    elif isinstance(error, PermissionError):
        advice = _ADVICE[errno.EACCES]
    elif isinstance(error, OSError) and error.errno in _ADVICE:
        advice = _ADVICE[error.errno]
    else:
        advice = text if name in ("OSError", "StorageError") else f"{text} ({name})"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        advice += _free_bytes(url)
    return f"{redact(url)}: {advice}"


def read_bytes(fs: fsspec.AbstractFileSystem, path: str, kind: type[BatchgenError] = StorageError) -> bytes:
    """The whole content of a file, never an older one from a cache."""
    with errors_as(kind, url_of(fs, path)):
        fs.invalidate_cache()
        content: bytes = fs.cat_file(path)
        return content


def exists(fs: fsspec.AbstractFileSystem, path: str, kind: type[BatchgenError] = StorageError) -> bool:
    """Whether there is such a file or folder now, whatever an older listing said."""
    with errors_as(kind, url_of(fs, path)):
        fs.invalidate_cache()
        return bool(fs.exists(path))


def list_files(
    fs: fsspec.AbstractFileSystem, folder: str, kind: type[BatchgenError] = StorageError
) -> list[StoredFile]:
    """All files below a folder, sorted by path; none when there is no such folder. An unreadable folder raises."""
    with errors_as(kind, url_of(fs, folder)):
        if is_local(fs):
            return sorted(_walk(folder))
        fs.invalidate_cache()
        try:
            found = fs.find(folder, detail=True)
        except FileNotFoundError:
            return []
        return sorted(StoredFile(i["name"], i["size"] or 0) for i in found.values() if i["type"] == "file")


def write_atomic(fs: fsspec.AbstractFileSystem, path: str, writer: Writer) -> None:
    """Writes a file that appears under its name only when it is whole and safe; after a failure there is nothing new.

    Local: a temporary name in the same folder, fsync of file and folder, rename. Elsewhere: written in memory,
    then one upload. Raises StorageError.
    """
    with errors_as(StorageError, url_of(fs, path)):
        if is_local(fs):
            _write_local(Path(path), writer)
            return
        whole = BytesIO()
        writer(whole)
        _upload(fs, path, whole.getvalue())


def write_bytes(fs: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    """Writes or replaces a small file, atomically. Raises StorageError."""
    if is_local(fs):
        write_atomic(fs, path, lambda file: _write_all(file, content))
        return
    with errors_as(StorageError, url_of(fs, path)):
        _upload(fs, path, content)


def remove(fs: fsspec.AbstractFileSystem, path: str) -> None:
    """Removes a file; it is no error when it is gone already. Raises StorageError."""
    with errors_as(StorageError, url_of(fs, path)), suppress(FileNotFoundError):
        fs.rm_file(path)


def sync(file: IO[bytes]) -> None:
    """Makes the content of an open local file safe against a power failure."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes the names in a local folder safe against a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _upload(fs: fsspec.AbstractFileSystem, path: str, content: bytes) -> None:
    """One request on S3, whatever the size: there is no multipart upload that a kill could leave open."""
    if "s3" in fs.protocol:
        fs.pipe_file(path, content, chunksize=_MOST_UPLOAD)
    else:
        fs.pipe_file(path, content)


def _write_local(path: Path, writer: Writer) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name[:200]}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        with temporary.open("xb") as file:
            writer(file)
            sync(file)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_all(file: IO[bytes], content: bytes) -> None:
    file.write(content)


def _walk(folder: str) -> Iterator[StoredFile]:
    def fail(error: OSError) -> None:
        if not (isinstance(error, FileNotFoundError) and error.filename == folder):
            raise error

    for parent, _, names in os.walk(folder, onerror=fail):
        for name in names:
            path = f"{parent.rstrip('/')}/{name}"
            try:
                size = os.stat(path).st_size
            except FileNotFoundError:
                if os.path.islink(path):
                    raise
                continue  # removed since it was listed
            yield StoredFile(path, size)


def _free_bytes(url: str) -> str:
    folder = Path(tempfile.gettempdir() if is_remote(url) else url.removeprefix("file://"))
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f" ({shutil.disk_usage(folder).free:,} bytes free in {folder})"


def storage_troubles() -> tuple[type[BaseException], ...]:
    """Errors of reading and writing; those of botocore only when it is loaded, since it is slow to load."""
    botocore = sys.modules.get("botocore.exceptions")
    return (OSError, botocore.BotoCoreError, botocore.ClientError) if botocore else (OSError,)
