"""Which files an input names: files, folders, patterns and lists of them become one sorted list of data files."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import fsspec
from fsspec.core import has_magic

from batchgen.data import storage
from batchgen.errors import InputError

SUFFIXES = {
    "parquet": (".parquet", ".pq", ".parq"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "csv": (".csv", ".tsv"),
    "openai": (".jsonl", ".ndjson"),
}
_BY_NAME = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv"} | dict.fromkeys(
    SUFFIXES["parquet"], "parquet"
)
_COMPRESSED = (".gz", ".zst")
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of rows. `name` is short and for messages; `partitions` are columns that its folders name (hive).

    `size` is in bytes, None where a server does not tell.
    """

    fs: fsspec.AbstractFileSystem
    path: str
    size: int | None
    name: str = ""
    partitions: tuple[tuple[str, str | None], ...] = ()

    @property
    def url(self) -> str:
        """The whole path or URL."""
        return storage.url_of(self.fs, self.path)


def plain_suffix(name: str) -> str:
    """Suffix of a file name in lower case, without that of a compression."""
    name = name.lower()
    for compressed in _COMPRESSED:
        name = name.removesuffix(compressed)
    return os.path.splitext(name)[1]


def format_of(name: str) -> str | None:
    """The format that a file name tells, if it does."""
    return _BY_NAME.get(plain_suffix(name))


def expand(paths: Iterable[str], base: Path, file_format: str) -> tuple[list[DataFile], list[str]]:
    """The data files of an input sorted by path, each once, and what is wrong with the paths (all of it).

    A file that is named is taken as it is. In folders and patterns, names that begin with `_` or `.` are no data;
    folders are searched to the bottom, for names of the wanted format only.
    """
    suffixes = SUFFIXES.get(file_format, tuple(_BY_NAME))
    files: dict[str, DataFile] = {}
    problems: list[str] = []
    for path in paths:
        try:
            found = _expand_one(storage.absolute(path, base), suffixes)
        except InputError as error:
            problems.append(str(error))
            continue
        for file in found:
            known = files.get(file.url)
            if known is None or len(known.partitions) < len(file.partitions):
                files[file.url] = file
    return _with_names(sorted(files.values(), key=lambda file: file.url)), problems


def _expand_one(url: str, suffixes: tuple[str, ...]) -> list[DataFile]:
    fs, path = storage.filesystem(url, InputError)
    with storage.errors_as(InputError, url):
        fs.invalidate_cache()
        try:
            info = fs.info(path)
        except FileNotFoundError:
            info = None
    if info is not None and info["type"] == "file":
        return [DataFile(fs, info["name"], info["size"])]
    if info is not None and info["type"] == "directory":
        return _expand_folder(fs, path, path, suffixes, url)
    if info is None and has_magic(path):
        return _expand_pattern(fs, path, suffixes, url)
    what = "no such file or folder" if info is None else "neither a file nor a folder"
    raise InputError(f"{storage.redact(url)}: {what}")


def _expand_folder(
    fs: fsspec.AbstractFileSystem, folder: str, root: str, suffixes: tuple[str, ...], url: str
) -> list[DataFile]:
    files = [
        DataFile(fs, stored.path, stored.size, partitions=_partitions(stored.path, root))
        for stored in storage.list_files(fs, folder, InputError)
        if not _is_hidden(stored.path, root) and plain_suffix(stored.path) in suffixes
    ]
    if not files:
        wanted = ", ".join(suffixes)
        raise InputError(
            f"{storage.redact(url)}: no data file in this folder (names that end in {wanted}, also with .gz or .zst). "
            "For other names set input.format and give a pattern such as folder/*"
        )
    return files


def _expand_pattern(fs: fsspec.AbstractFileSystem, pattern: str, suffixes: tuple[str, ...], url: str) -> list[DataFile]:
    parts = pattern.split("/")
    root = "/".join(parts[: next(i for i, part in enumerate(parts) if has_magic(part))])
    with storage.errors_as(InputError, url):
        matches: dict[str, Any] = fs.glob(pattern, detail=True)
    files: list[DataFile] = []
    for path, info in matches.items():
        if _is_hidden(path, root):
            continue
        if info["type"] == "file":
            files.append(DataFile(fs, path, info["size"], partitions=_partitions(path, root)))
        elif info["type"] == "directory" and "**" not in pattern:
            files += _expand_folder(fs, path, root, suffixes, storage.url_of(fs, path))
    if not files:
        raise InputError(f"{storage.redact(url)}: no file matches this pattern")
    return files


def _below(path: str, root: str) -> list[str]:
    return path[len(root) :].strip("/").split("/")


def _is_hidden(path: str, root: str) -> bool:
    return any(part.startswith(("_", ".")) and "=" not in part for part in _below(path, root))


def _partitions(path: str, root: str) -> tuple[tuple[str, str | None], ...]:
    pairs = [part.split("=", 1) for part in _below(path, root)[:-1] if "=" in part]
    return tuple((unquote(key), None if value == _HIVE_NULL else unquote(value)) for key, value in pairs)


def _with_names(files: list[DataFile]) -> list[DataFile]:
    """Gives each file the shortest name that tells it from the others: its path below their common folder."""
    folders = [file.path.split("/")[:-1] for file in files]
    shared = 0
    while len({tuple(folder[: shared + 1]) for folder in folders}) == 1 and all(len(f) > shared for f in folders):
        shared += 1
    return [replace(file, name="/".join(file.path.split("/")[shared:])) for file in files]
