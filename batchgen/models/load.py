"""From a model's name to a model with weights in it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from batchgen.models.config import ModelConfig
from batchgen.models.decoder import Model
from batchgen.models.gguf_weights import open_gguf
from batchgen.models.linear import can_pack
from batchgen.models.resolve import resolve_model
from batchgen.models.weights import SafetensorsCheckpoint, fill_random, load_weights


@torch.no_grad()
def load_model(
    path: str | Path,
    *,
    device: torch.device,
    dtype: torch.dtype,
    dummy: bool = False,
    max_length: int | None = None,
) -> Model:
    """Load a model folder, a .gguf file or a hub id, ready to run.

    `dummy` reads the config alone and makes the weights up, for benchmarks. `max_length` is the longest sequence that
    will run, when it is not the model's own limit. Raises JobFileError or EngineError saying what is wrong and where.
    """
    where = resolve_model(str(path), Path.cwd())
    config = read_config(where)
    with _one_thread():
        model = Model(config, device=device, dtype=dtype, max_length=max_length)
        if dummy:
            fill_random(model)
        elif where.is_file():
            load_weights(model, open_gguf(where, dtype))
        else:
            load_weights(model, SafetensorsCheckpoint(where))
        if can_pack(device, dtype):
            model.pack()
    return model.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copies are bound by memory: more threads gain little, and wait for one another on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def read_config(path: Path) -> ModelConfig:
    """Read the config of a folder or a GGUF file, without loading weights. Raises JobFileError."""
    return ModelConfig.from_gguf(path) if path.is_file() else ModelConfig.from_folder(path)
