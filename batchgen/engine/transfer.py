"""Arrays to the device and results back, without ever waiting for the device in between.

On a GPU both go through pinned memory. PyTorch's allocator hands a pinned buffer out again only when the copy that
reads or fills it has run, so no buffer is written while a step in flight still needs it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]
_ALIGNMENT = 16

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device: one copy for all of them, which this does not wait for."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed = pack(arrays)
    return unpack(torch.empty(packed.shape, dtype=torch.uint8, device=device).copy_(packed, non_blocking=True), arrays)


def pack(arrays: Sequence[Array]) -> Tensor:
    """The bytes of the arrays, one after another in one buffer, pinned where there is a GPU."""
    packed = torch.empty(sum(map(_room, arrays)), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    target, start = packed.numpy(), 0
    for array in arrays:
        target[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
        start += _room(array)
    return packed


def unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Views of `packed`, which has the layout of `pack`, with the shapes and dtypes of the arrays."""
    tensors, start = [], 0
    for array in arrays:
        tensors.append(packed[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape))
        start += _room(array)
    return tensors


def _room(array: Array) -> int:
    return -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT


class Download:
    """Tensors on their way to the host.

    `.tolist()` of a tensor on a GPU would wait for every step launched until then; this waits for its own alone.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensors = list(tensors)
        if any(tensor.device.type == "cuda" for tensor in tensors):
            self._tensors = [_to_pinned(tensor) for tensor in tensors]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[Array]:
        """The tensors' values."""
        if self._event is not None:
            self._event.synchronize()
        return [tensor.numpy() for tensor in self._tensors]


def _to_pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
