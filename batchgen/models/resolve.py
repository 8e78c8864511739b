"""From what a job file calls `model` to a folder or file on this machine. No torch here."""

import hashlib
import json
import logging
import os
import re
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from batchgen.env import cache_folder
from batchgen.errors import JobFileError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+|[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]
_COPIES = ["consolidated*", "original/*", "onnx/*"]  # the same weights again, in other formats
_STAMPS = ("ETag", "LastModified", "mtime", "created")  # what file systems know of a file's version
_HUB_SECONDS = 1.2
_log = logging.getLogger(__name__)


def resolve_model(name: str, folder: Path) -> Path:
    """Return the folder or .gguf file that `name` means: a path (relative ones from `folder`), a URL or a hub id.

    A hub id is downloaded unless it is in the Hugging Face cache; a URL (`s3://bucket/model/`) is copied into the cache
    folder. Raises JobFileError saying what was tried.
    """
    if "://" in name:
        return _copy_of_url(name.rstrip("/"))
    path = folder / Path(name).expanduser()
    if path.is_dir():
        if (path / "config.json").exists():
            return path
        raise JobFileError(f"model {name!r}: the folder {path} has no config.json{_gguf_hint(path)}")
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise JobFileError(f"model {name!r}: {path} is no .gguf file; give a model folder, a .gguf file or a hub id")
    if path.suffix == ".gguf" or name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise JobFileError(f"model {name!r}: {path} does not exist")
    return _snapshot(name, path)


def _gguf_hint(path: Path) -> str:
    files = sorted(file.name for file in path.glob("*.gguf"))
    return f"; name the file itself, {path / files[0]}" if files else ""


def _snapshot(name: str, path: Path) -> Path:
    """The hub's files of a model: the cached ones when the hub does not answer."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    tried = f"model {name!r}: there is no folder {path}, and"
    offline = constants.HF_HUB_OFFLINE or not _answers(constants.ENDPOINT)
    try:
        found = snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_COPIES, local_files_only=offline)
        return Path(found)
    except LocalEntryNotFoundError as error:
        raise JobFileError(
            f"{tried} the Hugging Face hub can't be reached and its cache has no {name}; "
            "download the model where there is a network, and give its folder"
        ) from error
    except HFValidationError as error:
        raise JobFileError(f"{tried} it is no valid hub id: {error}") from error
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise JobFileError(f"{tried} the Hugging Face hub says: {reason}") from error


def _answers(url: str) -> bool:
    """Ask once, for a short time: huggingface_hub would retry for minutes on a machine without a network."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_HUB_SECONDS).close()
        except urllib.error.HTTPError:
            answered.set()
        except OSError as error:  # a certificate that only huggingface_hub's own client accepts is an answer too
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                answered.set()
        else:
            answered.set()

    threading.Thread(target=ask, daemon=True).start()  # the name look-up knows no timeout
    return answered.wait(_HUB_SECONDS)


def _copy_of_url(url: str) -> Path:
    """Copy a remote model folder, or one remote .gguf file, into the cache, once for each state of its files."""
    import fsspec

    try:
        files, root = fsspec.core.url_to_fs(url)
        found = {path: info for path, info in files.find(root, detail=True).items() if info["type"] == "file"}
        state = [[path, info["size"], *(str(info.get(name)) for name in _STAMPS)] for path, info in found.items()]
        target = cache_folder() / "models" / hashlib.sha256(json.dumps([url, state]).encode()).hexdigest()[:32]
        for path, info in found.items():
            relative = os.path.basename(path) if path == root else os.path.relpath(path, root)
            _copy_file(files, path, info["size"], target / relative)
    except (OSError, ValueError, ImportError) as error:
        raise JobFileError(f"model {url}: can't be read: {error}") from error
    if not found:
        raise JobFileError(f"model {url}: no such folder or file")
    if url.endswith(".gguf"):
        return target / os.path.basename(url)
    if not (target / "config.json").exists():
        raise JobFileError(f"model {url}: the folder has no config.json")
    return target


def _copy_file(files: Any, source: str, size: int, target: Path) -> None:
    if target.exists() and target.stat().st_size == size:
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    _log.info("copying %s", source)
    files.get_file(source, str(part))
    os.replace(part, target)
