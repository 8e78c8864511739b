"""rms_norm: residual addition and RMS normalisation in one pass, in the rounding orders of the model families."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from typing import Literal

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, next_power_of_2, runs_kernels, tl

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


@jit()
def scale_unit(unit, weight, dtype: tl.constexpr, ORDER: tl.constexpr):
    """Multiply a normalised float32 tile by the weight and round it to `dtype`, in the order NORM_ORDERS[ORDER]."""
    if ORDER == 0:
        y = unit.to(dtype).to(tl.float32) * weight
    elif ORDER == 1:
        y = unit * weight
    else:
        y = unit * (1.0 + weight)
    return y.to(dtype)


@jit()
def rms_norm_kernel(
    x, residual, weight, y, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ORDER: tl.constexpr, ADD: tl.constexpr
):
    """Grid (rows)."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = tl.program_id(0).to(tl.int64) * WIDTH + column
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(row.dtype)
        tl.store(total + at, row, mask=inside)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = row.to(tl.float32)
    unit = wide * tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    tl.store(y + at, scale_unit(unit, scale, y.dtype.element_ty, ORDER), mask=inside)


def _launch(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, order: NormOrder) -> tuple[Tensor, Tensor]:
    check("x", x, (None, None), FLOATS, contiguous=True)
    rows, width = x.shape
    check("weight", weight, (width,), FLOATS, device=x.device)
    if residual is not None:
        check("residual", residual, x.shape, (x.dtype,), device=x.device, contiguous=True)
    y, total = torch.empty_like(x), x if residual is None else torch.empty_like(x)
    block = next_power_of_2(width)
    constants = {"WIDTH": width, "BLOCK": block, "ORDER": NORM_ORDERS.index(order), "ADD": residual is not None}
    if rows:
        args = (x, x if residual is None else residual, weight, y, total, eps)
        rms_norm_kernel[(rows,)](*args, **constants, num_warps=min(16, max(1, block // 512)))
    return y, total


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, order: NormOrder = "cast_then_scale"
) -> tuple[Tensor, Tensor]:
    """Normalise x[T, H], or x + residual. Returns (normalised, their sum in x.dtype or x)."""
    if order not in NORM_ORDERS:
        raise ValueError(f"rms_norm: order {order!r}, expected one of {', '.join(NORM_ORDERS)}")
    if runs_kernels(x):
        return _launch(x, weight, eps, residual, order)
    if residual is not None:
        x = x + residual
    return normalize(x, weight, eps, order), x
