"""act_mul: the gated activation of an MLP, act(gate) * up, in one pass."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, silu

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, runs_kernels, tl

Activation = Literal["silu", "gelu_tanh"]


def reference(gate_up: Tensor, act: Activation) -> Tensor:
    """act(gate) is rounded to the tensor's dtype before it is multiplied, as transformers does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) if act == "silu" else gelu(gate, approximate="tanh")) * up


@jit()
def act_mul_kernel(gate_up, out, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of the width)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        active = gate * tl.sigmoid(gate)
    else:  # 1 + tanh(x) = 2 sigmoid(2 x)
        active = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    active = active.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * WIDTH + column, (active * up).to(out.dtype.element_ty), mask=inside)


def _launch(gate_up: Tensor, act: Activation) -> Tensor:
    check("gate_up", gate_up, (None, None), FLOATS, contiguous=True)
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((tokens, width))
    block = 1024 if width <= 8192 else 2048
    if tokens:
        act_mul_kernel[tokens, -(-width // block)](gate_up, out, WIDTH=width, SILU=act == "silu", BLOCK=block)
    return out


def act_mul(gate_up: Tensor, act: Activation) -> Tensor:
    """act(gate) * up, where gate_up[T, 2I] holds gate in its first half and up in its second. Returns [T, I]."""
    if act not in ("silu", "gelu_tanh"):
        raise ValueError(f"act_mul: activation {act!r}, expected 'silu' or 'gelu_tanh'")
    if gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: shape {tuple(gate_up.shape)}, expected an even last dimension")
    return _launch(gate_up, act) if runs_kernels(gate_up) else reference(gate_up, act)
