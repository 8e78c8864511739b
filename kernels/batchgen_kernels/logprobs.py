"""token_logprobs: log-probability of a chosen token in each row, and of the likeliest. chosen_logprobs: of many."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, runs_kernels, tl

BLOCK = 4096


class TokenLogprobs(NamedTuple):
    """Log-probabilities of S chosen tokens, float32 [S], and of the k likeliest at each place, [S, k], best first."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


@jit()
def logsumexp_kernel(logits, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        new_peak = tl.maximum(peak, value)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        mass = mass * tl.exp(peak - base) + tl.exp(value - base)
        peak = new_peak
    top = tl.max(peak, axis=0)
    tl.store(out + row, top + tl.log(tl.sum(mass * tl.exp(peak - top), axis=0)))


def logsumexp(logits: Tensor) -> Tensor:
    """Float32 [S, 1] of logits[S, V]."""
    if not runs_kernels(logits):
        return logits.float().logsumexp(-1, keepdim=True)
    check("logits", logits, (None, None), FLOATS, contiguous=True)
    out = logits.new_empty((logits.shape[0], 1), dtype=torch.float32)
    if len(logits):
        logsumexp_kernel[(logits.shape[0],)](logits, out, VOCAB=logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


def reference(logits: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
    """Sorts every row; in the dtype of the logits: give it float64 for an oracle."""
    logprobs = logits.log_softmax(-1)
    values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    return TokenLogprobs(logprobs.gather(1, ids.unsqueeze(1)).squeeze(1), order[:, :k], values[:, :k])


def chosen_logprobs(logits: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """Float32 [K]: the log-softmax of logits[S, V] at (rows[K], ids[K]), both int64: several tokens of a row."""
    check("rows", rows, ids.shape, (torch.int64,), device=logits.device)
    check("ids", ids, (None,), (torch.int64,), device=logits.device)
    return logits[rows, ids].float() - logsumexp(logits)[rows, 0]


def token_logprobs(logits: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
    """Log-softmax of logits[S, V] at ids (int64 [S]) and at the k largest logits, in order, equal ones by lowest id."""
    check("ids", ids, (logits.shape[0],), (torch.int64,), device=logits.device)
    total = logsumexp(logits)
    chosen = (logits.gather(1, ids.unsqueeze(1)).float() - total).squeeze(1)
    values, top_ids = logits.topk(k, dim=-1)
    by_id = top_ids.argsort(dim=-1)
    values, top_ids = values.gather(1, by_id), top_ids.gather(1, by_id)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return TokenLogprobs(chosen, top_ids.gather(1, order), values.float() - total)
