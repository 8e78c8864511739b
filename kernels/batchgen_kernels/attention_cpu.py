"""Paged attention on the CPU: torch's flash kernel over the pieces of a plan, merged by log-sum-exp."""

import torch
from torch import Tensor

from batchgen_kernels.attention_plan import Piece, Plan, make_plan
from batchgen_kernels.metadata import AttentionMetadata

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class _PlanCache:
    """The plans of the step at hand: all layers ask for the same one, or for two."""

    def __init__(self) -> None:
        self._meta: tuple[Tensor, ...] = ()
        self._plans: dict[tuple[int, int | None], Plan] = {}

    def get(self, meta: AttentionMetadata, page_size: int, window: int | None) -> Plan:
        tensors = (*meta[:3], *(meta.tree or ()))
        if not (len(self._meta) == len(tensors) and all(map(torch.equal, self._meta, tensors))):
            self._meta = tuple(tensor.clone() for tensor in tensors)
            self._plans = {}
        key = (page_size, window)
        if key not in self._plans:
            self._plans[key] = make_plan(meta, page_size, window)
        return self._plans[key]


class _Buffers:
    """Memory for gathered keys and values that is kept: fresh memory costs a page fault for every 4 KiB."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, rows: int, like: Tensor) -> Tensor:
        """[rows, like.shape[1]], of any content. Valid until the next take of this name."""
        size, key = rows * like.shape[1], (name, like.dtype)
        if key not in self._flat or self._flat[key].numel() < size:
            with torch.inference_mode(False):  # to be written to in any mode
                self._flat[key] = torch.empty(size, dtype=like.dtype)
        return self._flat[key][:size].view(rows, -1)


_plans = _PlanCache()
_buffers = _Buffers()


def _softcap_attention(
    q: Tensor, k: Tensor, v: Tensor, piece: Piece, scale: float, cap: float
) -> tuple[Tensor, Tensor]:
    """Like torch's kernel, with scores bounded by tanh; whole score matrices in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = cap * torch.tanh((q.to(wide) @ k.to(wide).mT) * (scale / cap))
    if piece.causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf).triu(1)
    elif piece.mask is not None:
        scores = scores + piece.mask
    return (scores.softmax(-1) @ v.to(wide)).to(q.dtype), scores.logsumexp(-1)


def _gather(name: str, pages: Tensor, piece: Piece) -> Tensor:
    """Keys or values [N, Hkv, num_keys, D] of a piece. One copy: a page's head is one contiguous row of the pool."""
    _, heads, page_size, dim = pages.shape
    rows = piece.pages.unsqueeze(1) * heads + torch.arange(heads).view(1, -1, 1)
    pool, index = pages.view(-1, page_size * dim), rows.flatten()
    found = torch.index_select(pool, 0, index, out=_buffers.take(name, len(index), pool))
    found = found.view(rows.shape[0], heads, -1, dim)[:, :, piece.skip : piece.skip + piece.num_keys]
    if piece.unwritten is not None:
        found[piece.unwritten[0], :, piece.unwritten[1]] = 0.0
    return found


def _attend(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, piece: Piece, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """A piece's output [N * m, Hq, D] and log-sum-exp [N * m, Hq]."""
    (n, m), (num_q, dim), num_kv = piece.tokens.shape, q.shape[1:], k_pages.shape[1]
    group = num_q // num_kv
    k, v = _gather("k", k_pages, piece), _gather("v", v_pages, piece)
    packed = q[piece.tokens.flatten()].view(n, m, num_kv, group, dim)
    if piece.causal:  # one sequence: the query heads of a KV head are a batch over the same keys
        packed = packed[0].permute(2, 1, 0, 3)
        k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
    else:  # the query heads of a KV head are further queries
        packed = packed.transpose(1, 2).reshape(n, num_kv, m * group, dim)
    mask = piece.mask
    if mask is not None:  # torch's kernel misreads a float32 mask beside float64 queries
        mask = mask.to(torch.promote_types(q.dtype, mask.dtype))
        mask = mask if m == 1 else mask.repeat_interleave(group, dim=2)
    if softcap is not None:
        out, lse = _softcap_attention(packed, k, v, piece._replace(mask=mask), scale, softcap)
    else:
        out, lse = _flash(packed, k, v, 0.0, piece.causal, attn_mask=mask, scale=scale)
    if piece.causal:
        return out.permute(2, 1, 0, 3).reshape(m, num_q, dim), lse.permute(2, 1, 0).reshape(m, num_q)
    out = out.view(n, num_kv, m, group, dim).transpose(1, 2).reshape(n * m, num_q, dim)
    return out, lse.view(n, num_kv, m, group).transpose(1, 2).reshape(n * m, num_q)


def cpu_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    meta: AttentionMetadata,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See paged_attention."""
    if window is not None and window >= meta.max_kv_len:
        window = None
    plan = _plans.get(meta, k_pages.shape[2], window)
    wide = torch.promote_types(q.dtype, torch.float32)
    merged = plan.shared or sinks is not None
    result = q.new_empty(q.shape, dtype=wide if merged else q.dtype)
    total = q.new_empty(q.shape[:2], dtype=wide)
    for piece in plan.base:
        out, lse = _attend(q, k_pages, v_pages, piece, scale, softcap)
        tokens = piece.tokens.flatten()
        result[tokens], total[tokens] = out.to(result.dtype), lse
    for piece in plan.shared:
        out, lse = _attend(q, k_pages, v_pages, piece, scale, softcap)
        tokens = piece.tokens.flatten()
        before = total[tokens]
        both = torch.logaddexp(before, lse)
        old, new = (before - both).exp().unsqueeze(-1), (lse - both).exp().unsqueeze(-1)
        result[tokens] = result[tokens] * old + out * new
        total[tokens] = both
    if sinks is not None:
        result *= torch.sigmoid(total - sinks.to(wide)).unsqueeze(-1)
    return result.to(q.dtype)
