"""filter_logits: top-k, top-p and min-p. Each cut is a threshold on the logits, so equal logits stay or go together."""

import torch
from torch import Tensor

from batchgen_kernels._triton import runs_kernels
from batchgen_kernels.filter_gpu import gpu_filter, gpu_filtered_sample
from batchgen_kernels.sample import GREEDY_BELOW, gumbel_sample

CANDIDATES = 1024
"""The CPU path looks at this many of the largest logits first, and sorts a whole row only where they don't decide."""


def thresholds(
    ordered: Tensor, total: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Smallest logit [S, 1] that each row keeps, from its largest logits in descending order, [S, C].

    top-k keeps what is at least the k-th largest. Of that, top-p keeps every token for which the tokens above it hold
    less than top_p of the probability. min-p keeps what has at least min_p of the largest probability. All but
    `ordered` are [S, 1]; `total` is the logsumexp of the whole row over its temperature, for rows without top-k.
    """
    kth = ordered.gather(1, (top_k.long().clamp(1, ordered.shape[1]) - 1)).where(top_k > 0, -torch.inf)
    scaled = (ordered / temperature).masked_fill(ordered < kth, -torch.inf)
    total = scaled.logsumexp(-1, keepdim=True).where(top_k > 0, total)
    probs = (scaled - total).exp().double()
    inside = probs.cumsum(-1) - probs < top_p
    border = ordered.gather(1, (inside.sum(-1, keepdim=True) - 1).clamp(min=0)).where(top_p < 1, -torch.inf)
    least = ordered[:, :1] + temperature * min_p.log()
    return torch.maximum(kth, torch.maximum(border, least))


def reference(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Sorts every row. The parameters are [S, 1], the temperatures not greedy."""
    ordered = logits.sort(dim=-1, descending=True).values
    total = (logits / temperature).logsumexp(-1, keepdim=True)
    return logits.masked_fill(logits < thresholds(ordered, total, temperature, top_k, top_p, min_p), -torch.inf)


def _by_candidates(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The reference's result, from the largest logits of each row where they decide."""
    ordered = logits.topk(min(CANDIDATES, logits.shape[1]), dim=-1).values
    total = (logits / temperature).logsumexp(-1, keepdim=True)
    cut = thresholds(ordered, total, temperature, top_k, top_p, min_p)
    result = logits.masked_fill(logits < cut, -torch.inf)
    # Where the last candidate may still be among the kept, those behind it may be, too.
    size = ordered.shape[1]
    reach = torch.where(top_k > 0, ordered.gather(1, (top_k.long() - 1).clamp(0, size - 1)), cut)
    undecided = ((ordered[:, -1:] >= reach) | (top_k > size)) & ((top_k > 0) | (top_p < 1))
    open_rows = undecided.squeeze(1).nonzero().squeeze(1)
    if open_rows.numel() and size < logits.shape[1]:
        args = (logits, temperature, top_k, top_p, min_p)
        result[open_rows] = reference(*(arg[open_rows] for arg in args))
    return result


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Float32 logits [S, V], unscaled, with -inf where top-k, top-p or min-p cuts. The largest logit always stays.

    temperature, top_p and min_p are float32 [S], top_k int32 [S]. A top_k of 0, below, or V and more is off, as are a
    top_p of 1 and a min_p of 0. Greedy rows come back as they are.
    """
    if runs_kernels(logits):
        return gpu_filter(logits, temperature, top_k, top_p, min_p)
    top_k = top_k.where(top_k < logits.shape[1], 0)
    rows = ((temperature >= GREEDY_BELOW) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero().squeeze(1)
    result = logits.float().clone()
    if rows.numel():
        params = (arg[rows].unsqueeze(1) for arg in (temperature, top_k, top_p, min_p))
        result[rows] = _by_candidates(result[rows], *params)
    return result


def filtered_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """gumbel_sample of filter_logits, without writing the filtered logits: one pass to find the cut, one to draw."""
    if runs_kernels(logits):
        return gpu_filtered_sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return gumbel_sample(filter_logits(logits, temperature, top_k, top_p, min_p), temperature, seeds, positions)
