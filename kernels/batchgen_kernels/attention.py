"""paged_attention: causal attention of a step's tokens over keys and values that lie in pages."""

import torch
from torch import Tensor

from batchgen_kernels._triton import runs_kernels
from batchgen_kernels.attention_cpu import cpu_attention
from batchgen_kernels.attention_gpu import gpu_attention
from batchgen_kernels.metadata import AttentionMetadata


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence after the other, in the dtype of q: give it float64 for an oracle."""
    result, (num_q, num_kv) = torch.empty_like(q), (q.shape[1], k_pages.shape[1])
    starts, lengths = meta.query_start.tolist(), meta.kv_lens.tolist()
    for i, (first, last, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        pages = meta.block_table[i, : -(-length // k_pages.shape[2])].long()
        k, v = (x[pages].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype) for x in (k_pages, v_pages))
        k, v = (x.repeat_interleave(num_q // num_kv, dim=0) for x in (k, v))
        scores = torch.einsum("mhd,hld->hml", q[first:last], k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        query_at = torch.arange(length - (last - first), length, device=q.device).unsqueeze(1)
        key_at = torch.arange(length, device=q.device).unsqueeze(0)
        hidden = (query_at < key_at) | (query_at - key_at >= (window or length))
        if meta.tree is not None:
            hidden = hidden | (query_at >= meta.tree.seen_until(torch.tensor([i], device=q.device), key_at))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(q.dtype).view(-1, 1, 1).expand(-1, last - first, 1)), dim=-1)
        result[first:last] = torch.einsum("hml,hld->mhd", scores.softmax(-1)[..., :length], v)
    return result


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of q[T, Hq, D] over pages [pages, Hkv, page_size, D]. Returns [T, Hq, D].

    Token j of a sequence with m query tokens sits at position kv_len - m + j and sees the positions up to its own, at
    most `window` of them; where the sequence ends in a tree (see TokenTree), at those of its ancestors there alone.
    `softcap` bounds the scores by tanh; `sinks` [Hq] are logits that take part in the softmax
    and have no value.
    """
    attention = gpu_attention if runs_kernels(q) else cpu_attention
    return attention(q, k_pages, v_pages, meta, scale, window, softcap, sinks)
