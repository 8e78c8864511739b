"""act_mul: the gated activation of an MLP, act(gate) * up, in one pass."""

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["silu", "gelu_tanh"]


def reference(gate_up: Tensor, act: Activation) -> Tensor:
    """act(gate) is rounded to the tensor's dtype before it is multiplied, as transformers does."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(gate) if act == "silu" else gelu(gate, approximate="tanh")) * up


def act_mul(gate_up: Tensor, act: Activation) -> Tensor:
    """act(gate) * up, where gate_up[T, 2I] holds gate in its first half and up in its second. Returns [T, I]."""
    if act not in ("silu", "gelu_tanh"):
        raise ValueError(f"act_mul: activation {act!r}, expected 'silu' or 'gelu_tanh'")
    return reference(gate_up, act)
