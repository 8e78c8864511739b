"""The engine: requests of token ids in, completions out. It knows nothing of text, files or jobs.

Names are loaded on first use, so that whoever needs the plain data of request.py alone does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from batchgen.env import let_idle_threads_sleep

if TYPE_CHECKING:
    from batchgen.engine.config import EngineConfig
    from batchgen.engine.engine import Engine
    from batchgen.engine.request import Completion, Request, RequestError, SamplingParams, TokenLogprob
    from batchgen.engine.stats import EngineStats

__all__ = [
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenLogprob",
]

_MODULES = {"Engine": "engine", "EngineConfig": "config", "EngineStats": "stats"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    let_idle_threads_sleep()
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'request')}"), name)
