"""Argument checks of the launchers: a wrong tensor is named with its numbers before a kernel can read out of bounds."""

from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def check(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype] = (),
    *,
    device: torch.device | None = None,
    contiguous: bool = False,
) -> None:
    """Raise ValueError unless `tensor` has this shape (None: any), one of these dtypes (if any) and this device."""
    if tensor.dim() != len(shape) or any(map(_differs, shape, tensor.shape)):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: shape {tuple(tensor.shape)}, expected ({wanted})")
    if dtypes and tensor.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, expected {device}")
    if contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} of shape {tuple(tensor.shape)}, expected contiguous")
    if not contiguous and tensor.dim() and tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise ValueError(f"{name}: last stride {tensor.stride(-1)}, expected 1")


def _differs(wanted: int | None, size: int) -> bool:
    return wanted is not None and wanted != size
