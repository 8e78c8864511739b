"""The linear layer, and the layout of its weight that a CPU multiplies fastest."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor, nn

_LIKELY_ROWS = 64  # oneDNN chooses its layout for a number of rows; any number may come


class NewParameter:
    """Makes parameters of one device and dtype, with no values yet and none that are trained."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def __call__(self, *shape: int) -> nn.Parameter:
        """Make one of this shape."""
        return nn.Parameter(torch.empty(shape, device=self._device, dtype=self._dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b, with W `[outputs, inputs]`."""

    def __init__(self, new: NewParameter, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: nn.Parameter | None = new(outputs, inputs)
        self.bias = new(outputs) if bias else None
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `[T, inputs]` to `[T, outputs]`."""
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def pack(self) -> None:
        """Let go of the weight and keep oneDNN's own layout of it, which F.linear would make anew in every call."""
        assert self.weight is not None
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.data, _LIKELY_ROWS)
        self.weight = None


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Say whether `Linear.pack` is of use: for bfloat16 on a CPU that multiplies it."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch._C._has_mkldnn:
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
