"""Which device and number format to run on, and what fits there."""

import torch

from batchgen.engine.config import EngineConfig, KVShape, Limits
from batchgen.engine.model_runner import CausalModel
from batchgen.errors import EngineError

_GPU_SHARE = 0.9
"""Of the memory that is free once the weights are loaded."""


def choose_device(device: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda`. Raises EngineError when the GPU that is asked for is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("engine.device is cuda, but torch finds no GPU here: use a machine with one, or device: cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number format of `auto`, `bfloat16` or `float32`: bfloat16 where the hardware multiplies it fast."""
    if dtype == "auto":
        fast = device.type == "cuda" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def resolve_limits(config: EngineConfig, model: CausalModel) -> Limits:
    """The sizes that the engine of a loaded model runs with. Raises EngineError when nothing fits."""
    on_gpu = model.device.type == "cuda"
    return Limits.resolve(
        config,
        KVShape(model.config.max_positions, model.kv_bytes_per_token),
        on_gpu=on_gpu,
        free_gpu_bytes=int(torch.cuda.mem_get_info(model.device)[0] * _GPU_SHARE) if on_gpu else 0,
    )
