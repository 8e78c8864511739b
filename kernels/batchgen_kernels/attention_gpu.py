"""Paged attention on a GPU: which kernel runs, with what shape of tile."""

import torch
from torch import Tensor

from batchgen_kernels import attention_work
from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import next_power_of_2
from batchgen_kernels.attention_decode import decode_kernel, shared_kernel
from batchgen_kernels.attention_kernels import prefill_kernel
from batchgen_kernels.metadata import AttentionMetadata, DecodeWork

DEEP_STAGES, STAGES = 5, 3
"""Of loops over pages: two pages or one are on their way while one is computed, since a page's id is loaded first."""
SHARED_MEMORY = 160 * 1024  # bytes that a program with deep stages may take
PREFILL_ROWS = 64  # tokens times query heads of a KV head, of a program
WARPS = 4  # of a product of 64 rows: a warpgroup
PAGE_SIZES = (16, 32, 64, 128)

Constants = dict[str, int | float]
"""Constants of a kernel's compilation."""


def check_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, sinks: Tensor | None) -> None:
    """Raise ValueError with the numbers where a kernel would read out of bounds or at the wrong place."""
    num_sequences = meta.kv_lens.shape[0]
    check("q", q, (None, None, None), FLOATS, contiguous=True)
    check("k_pages", k_pages, (None, None, None, q.shape[2]), (q.dtype,), device=q.device, contiguous=True)
    check("v_pages", v_pages, k_pages.shape, (q.dtype,), device=q.device, contiguous=True)
    check("block_table", meta.block_table, (num_sequences, None), (torch.int32,), device=q.device)
    check("query_start", meta.query_start, (num_sequences + 1,), (torch.int32,), device=q.device)
    check("kv_lens", meta.kv_lens, (num_sequences,), (torch.int32,), device=q.device)
    if meta.tree is not None:
        check("tree.start", meta.tree.start, (num_sequences,), (torch.int32,), device=q.device)
        check("tree.until", meta.tree.until, (num_sequences, None), (torch.int32,), device=q.device, contiguous=True)
    if sinks is not None:
        check("sinks", sinks, (q.shape[1],), device=q.device)
    heads, page_size = k_pages.shape[1:3]
    if q.shape[1] % heads:
        raise ValueError(f"q has {q.shape[1]} heads, expected a multiple of the {heads} of k_pages")
    if page_size not in PAGE_SIZES:
        raise ValueError(f"k_pages: page size {page_size}, expected one of {', '.join(map(str, PAGE_SIZES))}")
    if meta.max_kv_len > meta.block_table.shape[1] * page_size:
        raise ValueError(f"max_kv_len {meta.max_kv_len}, but block_table holds {meta.block_table.shape[1] * page_size}")


def _decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, scale: float, sinks: Tensor, shape: Constants
) -> Tensor:
    (num_rows, num_q, dim), heads, out = q.shape, k_pages.shape[1], torch.empty_like(q)
    work = meta.work or attention_work.default_work(meta, heads)
    _check_work(work, num_rows, heads, q.device)
    parts = q.new_empty((max(1, work.num_parts), num_q, dim), dtype=torch.float32)
    lse = q.new_empty((max(1, work.num_parts), num_q), dtype=torch.float32)
    pages, stride = (q, k_pages, v_pages, meta.block_table), meta.block_table.stride(0)
    group_rows = max(16, next_power_of_2(num_q // heads))
    if len(work.shared_items):
        if shape["WINDOW"]:
            raise ValueError(f"work: {len(work.members)} rows share keys, but a window of {shape['WINDOW']} hides some")
        shared_shape = {name: shape[name] for name in ("HEADS", "GROUP", "DIM", "PAGE", "SOFTCAP", "BLOCK_D")}
        shared_kernel[(len(work.shared_items) * heads,)](
            *(*pages, work.shared_items, work.row_parts, work.members, parts, lse, scale, stride),
            **shared_shape,
            BLOCK_M=max(attention_work.SHARED_HEADS, group_rows),
            num_warps=WARPS,
            num_stages=_stages(attention_work.SHARED_HEADS, k_pages),
        )
    decode_kernel[(len(work.items) * heads,)](
        *(*pages, meta.kv_lens, work.items, work.row_parts, work.arrivals, sinks, out, parts, lse, scale, stride),
        **shape,
        BLOCK_M=group_rows,
        num_warps=max(1, next_power_of_2(dim) // 32),
        num_stages=_stages(group_rows, k_pages),
    )
    return out


def _check_work(work: DecodeWork, num_rows: int, num_kv_heads: int, device: torch.device) -> None:
    shapes = ((None, 4), (num_rows, 4), (None, 5), (None,), (num_rows, num_kv_heads))
    for name, tensor, shape in zip(work._fields, work, shapes, strict=False):
        assert isinstance(tensor, Tensor)
        check(f"work.{name}", tensor, shape, (torch.int32,), device=device, contiguous=True)


def _stages(rows: int, k_pages: Tensor) -> int:
    """Deep ones where `rows` queries and three pages of keys and values fit."""
    _, _, page_size, dim = k_pages.shape
    return DEEP_STAGES if (rows + 6 * page_size) * dim * k_pages.itemsize <= SHARED_MEMORY else STAGES


def _prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, scale: float, sinks: Tensor, shape: Constants
) -> Tensor:
    heads, num_sequences, out = k_pages.shape[1], len(meta.kv_lens), torch.empty_like(q)
    group = q.shape[1] // heads
    rows = max(PREFILL_ROWS, next_power_of_2(group))  # whatever the step: a row's bits depend on it
    shape |= {"BLOCK_Q": rows // group, "BLOCK_M": rows, "TREE": meta.tree is not None}
    tree_start, tree_until = meta.tree or (meta.kv_lens, meta.block_table)
    args = (q, k_pages, v_pages, meta.block_table, meta.query_start, meta.kv_lens, tree_start, tree_until, sinks, out)
    strides = (meta.block_table.stride(0), num_sequences, tree_until.shape[1])
    stages = _stages(rows, k_pages) if k_pages.shape[3] >= 128 else STAGES
    # A sequence may end inside a block: at most one more block for each.
    prefill_kernel[q.shape[0] // (rows // group) + num_sequences, heads](
        *args, scale, *strides, **shape, num_warps=WARPS, num_stages=stages
    )
    return out


def gpu_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See paged_attention. Nothing is read back from the device: max_kv_len and max_query_len may be upper bounds."""
    check_attention(q, k_pages, v_pages, meta, sinks)
    if scale <= 0:
        raise ValueError(f"scale {scale}, expected more than 0")
    if not len(q):
        return torch.empty_like(q)
    (num_q, dim), (heads, page_size) = q.shape[1:], k_pages.shape[1:3]
    shape: Constants = {"HEADS": heads, "GROUP": num_q // heads, "DIM": dim, "PAGE": page_size}
    shape |= {"BLOCK_D": max(16, next_power_of_2(dim)), "SINKS": sinks is not None, "SOFTCAP": softcap or 0.0}
    shape["WINDOW"] = window or 0
    run = _prefill if meta.max_query_len > 1 or meta.tree is not None else _decode
    return run(q, k_pages, v_pages, meta, scale, q if sinks is None else sinks, shape)
