"""Every environment variable that batchgen itself reads. Nothing else in the package looks into the environment."""

import os
from pathlib import Path


def job_variable(name: str) -> str | None:
    """The value for `${NAME}` in a job file; None when it is not set."""
    return os.environ.get(name)


def cache_folder() -> Path:
    """Where batchgen keeps what it can make again, such as converted weights, and rows that a store did not take.

    `$BATCHGEN_CACHE`, else `$XDG_CACHE_HOME/batchgen`, else `~/.cache/batchgen`.
    """
    own = os.environ.get("BATCHGEN_CACHE", "")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(shared) if os.path.isabs(shared) else Path.home() / ".cache") / "batchgen"


def dumb_terminal() -> bool:
    """Whether TERM=dumb: such a terminal can't move its cursor, and a progress bar would fill it with lines."""
    return os.environ.get("TERM") == "dumb"


def let_idle_threads_sleep() -> None:
    """Have OpenMP's threads sleep after a short spin while they wait for one another, unless the user says otherwise.

    By default they spin on. On cores that others use too, the spinning thread then keeps the one it waits for from
    running, and a step takes five times as long. Must be called before torch is loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # some 20 microseconds: most waits of an idle machine are shorter


def with_python_path(folder: str | None) -> dict[str, str]:
    """The environment of another Python process, with `folder` in front of its module path."""
    if folder is None:
        return dict(os.environ)
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))}


def let_libraries_show_no_bars() -> None:
    """Keep the progress bars of other libraries (downloads, data sets) off stderr. Must be called before they load."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
