"""rms_norm: residual addition and RMS normalisation in one pass, in the rounding orders of the model families."""

from typing import Literal

import torch
from torch import Tensor

NormOrder = Literal["cast_then_scale", "scale_then_cast", "one_plus"]
"""Where the result is rounded to the model's dtype: before the weight (Llama, Qwen, Mistral), after it (OLMo 2,
gpt-oss), or after a float32 factor of 1 + weight (Gemma)."""

NORM_ORDERS = ("cast_then_scale", "scale_then_cast", "one_plus")


def normalize(x: Tensor, weight: Tensor, eps: float, order: NormOrder) -> Tensor:
    """RMS norm over the last dimension."""
    wide = x.float()
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if order == "cast_then_scale":
        return weight * unit.to(x.dtype)
    if order == "scale_then_cast":
        return (weight * unit).to(x.dtype)
    return (unit * (1.0 + weight.float())).to(x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, order: NormOrder = "cast_then_scale"
) -> tuple[Tensor, Tensor]:
    """Normalise x[T, H], or x + residual. Returns (normalised, their sum in x.dtype or x)."""
    if order not in NORM_ORDERS:
        raise ValueError(f"rms_norm: order {order!r}, expected one of {', '.join(NORM_ORDERS)}")
    if residual is not None:
        x = x + residual
    return normalize(x, weight, eps, order), x
