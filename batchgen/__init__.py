"""batchgen: batch offline generation over large tables. Names load lazily: importing batchgen loads no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams
    from batchgen.job.load import load_job
    from batchgen.job.spec import Job
    from batchgen.runner import run_job

_HOME = {
    "Completion": "batchgen.engine",
    "Engine": "batchgen.engine",
    "EngineConfig": "batchgen.engine",
    "Job": "batchgen.job.spec",
    "Request": "batchgen.engine",
    "SamplingParams": "batchgen.engine",
    "load_job": "batchgen.job.load",
    "run_job": "batchgen.runner",
}

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "Job",
    "Request",
    "SamplingParams",
    "load_job",
    "run_job",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("batchgen")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
