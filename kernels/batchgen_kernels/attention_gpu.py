"""Paged attention on a GPU: which kernel runs, with what shape of tile.

The decode kernel cuts every sequence at multiples of SPLIT_KEYS, whatever its batch, so that a row's result depends on
nothing but itself.
"""

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import next_power_of_2
from batchgen_kernels.attention_kernels import combine_kernel, decode_kernel, prefill_kernel
from batchgen_kernels.metadata import AttentionMetadata

SPLIT_KEYS = 1024
DECODE_WARPS, DECODE_STAGES = 2, 3
PREFILL_ROWS = 64  # tokens times query heads of a KV head, of a program
PREFILL_WARPS, PREFILL_STAGES = 4, 3
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
    (num_sequences, num_q, dim), heads = q.shape, k_pages.shape[1]
    out, num_splits = torch.empty_like(q), -(-meta.max_kv_len // SPLIT_KEYS)
    whole = num_splits == 1
    parts = out if whole else q.new_empty((num_sequences, num_splits, num_q, dim), dtype=torch.float32)
    lse = out if whole else q.new_empty((num_sequences, num_splits, num_q), dtype=torch.float32)
    shape |= {"BLOCK_M": max(16, next_power_of_2(num_q // heads)), "SPLIT": SPLIT_KEYS}
    args = (q, k_pages, v_pages, meta.block_table, meta.kv_lens, sinks, out, parts, lse, scale)
    constants = shape | {"WHOLE": whole, "num_warps": DECODE_WARPS, "num_stages": DECODE_STAGES}
    decode_kernel[num_sequences, heads, num_splits](*args, meta.block_table.stride(0), num_splits, **constants)
    if not whole:
        combine_kernel[num_sequences, heads](parts, lse, meta.kv_lens, sinks, out, num_splits, **shape)
    return out


def _prefill(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, meta: AttentionMetadata, scale: float, sinks: Tensor, shape: Constants
) -> Tensor:
    heads, num_sequences, out = k_pages.shape[1], len(meta.kv_lens), torch.empty_like(q)
    group = q.shape[1] // heads
    rows = min(PREFILL_ROWS, next_power_of_2(meta.max_query_len * group))
    rows = max(16, rows, next_power_of_2(group))
    shape |= {"BLOCK_Q": rows // group, "BLOCK_M": rows}
    args = (q, k_pages, v_pages, meta.block_table, meta.query_start, meta.kv_lens, sinks, out, scale)
    warps = PREFILL_WARPS if rows > 64 else 4
    # A sequence may end inside a block: at most one more block for each.
    prefill_kernel[q.shape[0] // (rows // group) + num_sequences, heads](
        *args, meta.block_table.stride(0), num_sequences, **shape, num_warps=warps, num_stages=PREFILL_STAGES
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
    if not len(q):
        return torch.empty_like(q)
    (num_q, dim), (heads, page_size) = q.shape[1:], k_pages.shape[1:3]
    shape: Constants = {"HEADS": heads, "GROUP": num_q // heads, "DIM": dim, "PAGE": page_size}
    shape |= {"BLOCK_D": max(16, next_power_of_2(dim)), "SINKS": sinks is not None, "SOFTCAP": softcap or 0.0}
    shape["WINDOW"] = window if window is not None and window < meta.max_kv_len else 0
    run = _prefill if meta.max_query_len > 1 else _decode
    return run(q, k_pages, v_pages, meta, scale, q if sinks is None else sinks, shape)
