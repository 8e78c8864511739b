"""qkv_rope_store: split q, k and v, normalise q and k, rotate them, and write k and v to their pages, in one pass."""

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.norm import NormOrder, normalize


class QKV(NamedTuple):
    """Queries [T, Hq, D] and the step's own keys and values [T, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of x[T, heads, D]: dimension i pairs with i + half ("neox")."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def reference(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    heads: tuple[int, int, int],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    norm_order: NormOrder,
) -> QKV:
    """cos and sin are rounded to the dtype of qkv first, as transformers does. `heads` is (Hq, Hkv, D)."""
    num_q, num_kv, dim = heads
    q, k, v = qkv.view(-1, num_q + 2 * num_kv, dim).tensor_split((num_q, num_q + num_kv), dim=1)
    q, k = (x if w is None else normalize(x, w, eps, norm_order) for x, w in zip((q, k), norms, strict=True))
    cos, sin = cos_sin[positions].to(qkv.dtype).unsqueeze(2).unbind(1)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    page_size = k_pages.shape[2]
    page, offset = slots // page_size, slots % page_size
    k_pages[page, :, offset] = k.to(k_pages.dtype)
    v_pages[page, :, offset] = v.to(v_pages.dtype)
    return QKV(q, k, v)


def qkv_rope_store(
    qkv: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    norm_order: NormOrder = "cast_then_scale",
) -> QKV:
    """Split qkv[T, (Hq + 2 Hkv) * D], apply qk-norm and rope, and store k and v at `slots` (page * page_size + offset).

    cos_sin is float32 [max_position, 2, rot / 2], positions and slots int64 [T], pages [pages, Hkv, page_size, D].
    """
    heads = (num_q_heads, num_kv_heads, head_dim)
    norms = (q_norm, k_norm)
    return reference(qkv, cos_sin, positions, slots, k_pages, v_pages, heads, norms, eps, norm_order)
