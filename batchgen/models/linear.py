"""The linear layer, and the layout of its weight that a CPU multiplies fastest."""

from collections.abc import Sequence

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
        self._sizes: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        """Multiply `[T, inputs]` to `[T, outputs]`."""
        if self._sizes:
            return self._in_blocks(x)
        if self._packed is not None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def fix_sizes(self, sizes: Sequence[int]) -> None:
        """Multiply blocks of these numbers of rows alone, ascending. What is shorter is padded."""
        self._sizes = sizes

    def _in_blocks(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        largest = self._sizes[-1]
        out = x.new_empty(x.shape[0], self.weight.shape[0])
        for start in range(0, x.shape[0], largest):
            block, target = x[start : start + largest], out[start : start + largest]
            rows = block.shape[0]
            size = next(size for size in self._sizes if size >= rows)
            if size == rows:
                self._multiply(block, target)
            else:
                padded = out.new_empty(size, out.shape[1])
                self._multiply(F.pad(block, (0, 0, 0, size - rows)), padded)
                target.copy_(padded[:rows])
        return out

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        assert self.weight is not None
        if self.bias is None:
            torch.mm(x, self.weight.T, out=out)
        else:
            torch.addmm(self.bias, x, self.weight.T, out=out)

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
