"""qkv_rope_store: split q, k and v, normalise q and k, rotate them, and write k and v to their pages, in one pass."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, next_power_of_2, runs_kernels, tl
from batchgen_kernels.norm import NORM_ORDERS, NormOrder, normalize, scale_unit

TOKENS = 16  # of a program


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


@jit(varying=("num_tokens",))
def qkv_rope_store_kernel(
    qkv,
    cos_sin,
    positions,
    slots,
    k_pages,
    v_pages,
    q_norm,
    k_norm,
    q,
    k,
    v,
    num_tokens,
    eps,
    NUM_Q: tl.constexpr,
    NUM_KV: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Grid (blocks of tokens, heads). A head is two rotated halves and a rest, often empty, that isn't."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    real = token < num_tokens
    token = token.to(tl.int64)
    half, rest = tl.arange(0, BLOCK_H), 2 * HALF + tl.arange(0, BLOCK_R)
    in_half, in_rest = half < HALF, rest < DIM
    halves, rests = real[:, None] & in_half[None, :], real[:, None] & in_rest[None, :]
    source = qkv + (token * (NUM_Q + 2 * NUM_KV) + head)[:, None] * DIM
    first = tl.load(source + half[None, :], mask=halves, other=0.0)
    second = tl.load(source + HALF + half[None, :], mask=halves, other=0.0)
    tail = tl.load(source + rest[None, :], mask=rests, other=0.0)
    if head < NUM_Q + NUM_KV:
        if NORM:
            a, b, c = first.to(tl.float32), second.to(tl.float32), tail.to(tl.float32)
            unit = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)) / DIM + eps)
            weight = q_norm if head < NUM_Q else k_norm
            u, w = (
                tl.load(weight + half, mask=in_half, other=0.0),
                tl.load(weight + HALF + half, mask=in_half, other=0.0),
            )
            z = tl.load(weight + rest, mask=in_rest, other=0.0)
            first = scale_unit(a * unit[:, None], u.to(tl.float32)[None, :], qkv.dtype.element_ty, ORDER)
            second = scale_unit(b * unit[:, None], w.to(tl.float32)[None, :], qkv.dtype.element_ty, ORDER)
            tail = scale_unit(c * unit[:, None], z.to(tl.float32)[None, :], qkv.dtype.element_ty, ORDER)
        angle = tl.load(positions + token, mask=real, other=0)[:, None] * (2 * HALF) + half[None, :]
        cos = tl.load(cos_sin + angle, mask=halves, other=0.0).to(first.dtype).to(tl.float32)
        sin = tl.load(cos_sin + HALF + angle, mask=halves, other=0.0).to(first.dtype).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        first, second = (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)
    if head < NUM_Q:
        target = q + (token * NUM_Q + head)[:, None] * DIM
    elif head < NUM_Q + NUM_KV:
        target = k + (token * NUM_KV + head - NUM_Q)[:, None] * DIM
    else:
        target = v + (token * NUM_KV + head - NUM_Q - NUM_KV)[:, None] * DIM
    tl.store(target + half[None, :], first, mask=halves)
    tl.store(target + HALF + half[None, :], second, mask=halves)
    tl.store(target + rest[None, :], tail, mask=rests)
    if head >= NUM_Q:
        slot = tl.load(slots + token, mask=real, other=0)
        kv_head = (head - NUM_Q) % NUM_KV
        pages = k_pages if head < NUM_Q + NUM_KV else v_pages
        stored = pages + ((slot // PAGE * NUM_KV + kv_head) * PAGE + slot % PAGE)[:, None] * DIM
        kind = pages.dtype.element_ty
        tl.store(stored + half[None, :], first.to(kind), mask=halves)
        tl.store(stored + HALF + half[None, :], second.to(kind), mask=halves)
        tl.store(stored + rest[None, :], tail.to(kind), mask=rests)


def _launch(
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
    (num_q, num_kv, dim), tokens, device = heads, qkv.shape[0], qkv.device
    check("qkv", qkv, (None, (num_q + 2 * num_kv) * dim), FLOATS, contiguous=True)
    check("cos_sin", cos_sin, (None, 2, None), (torch.float32,), device=device, contiguous=True)
    check("positions", positions, (tokens,), (torch.int64,), device=device)
    check("slots", slots, (tokens,), (torch.int64,), device=device)
    check("k_pages", k_pages, (None, num_kv, None, dim), FLOATS, device=device, contiguous=True)
    check("v_pages", v_pages, k_pages.shape, (k_pages.dtype,), device=device, contiguous=True)
    for name, weight in zip(("q_norm", "k_norm"), norms, strict=True):
        if weight is not None:
            check(name, weight, (dim,), FLOATS, device=device)
    if (norms[0] is None) != (norms[1] is None):
        raise ValueError("q_norm and k_norm: one is given without the other")
    half = cos_sin.shape[2]
    if 2 * half > dim:
        raise ValueError(f"cos_sin: {half} angles rotate {2 * half} dimensions, but head_dim is {dim}")
    result = QKV(*(qkv.new_empty((tokens, n, dim)) for n in (num_q, num_kv, num_kv)))
    q_norm, k_norm = (qkv if weight is None else weight for weight in norms)
    constants = {"NUM_Q": num_q, "NUM_KV": num_kv, "DIM": dim, "HALF": half, "PAGE": k_pages.shape[2]}
    constants |= {"NORM": norms[0] is not None, "ORDER": NORM_ORDERS.index(norm_order), "BLOCK_T": TOKENS}
    constants |= {"BLOCK_H": next_power_of_2(half), "BLOCK_R": next_power_of_2(max(1, dim - 2 * half))}
    if tokens:
        args = (qkv, cos_sin, positions, slots, k_pages, v_pages, q_norm, k_norm, *result, tokens, eps)
        qkv_rope_store_kernel[-(-tokens // TOKENS), num_q + 2 * num_kv](*args, **constants)
    return result


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
    run = _launch if runs_kernels(qkv) else reference
    return run(qkv, cos_sin, positions, slots, k_pages, v_pages, heads, norms, eps, norm_order)
