"""Every environment variable that batchgen itself reads. Nothing else in the package looks into the environment."""

import os
from pathlib import Path


def job_variable(name: str) -> str | None:
    """The value for `${NAME}` in a job file; None when it is not set."""
    return os.environ.get(name)


def cache_folder() -> Path:
    """Where converted weights and fetched models are kept: BATCHGEN_CACHE, or `batchgen` in the user's cache folder."""
    own = os.environ.get("BATCHGEN_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "batchgen"


def debug() -> bool:
    """BATCHGEN_DEBUG=1: check invariants at every step, which is slow."""
    return os.environ.get("BATCHGEN_DEBUG", "0") not in ("", "0")


def dumb_terminal() -> bool:
    """TERM=dumb: the terminal can't move its cursor, so a progress bar would only fill it with lines."""
    return os.environ.get("TERM") == "dumb"
