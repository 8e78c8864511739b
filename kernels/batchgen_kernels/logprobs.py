"""token_logprobs: log-probability of chosen tokens, and of the likeliest ones at their place."""

from typing import NamedTuple

from torch import Tensor


class TokenLogprobs(NamedTuple):
    """Log-probabilities of S chosen tokens, float32 [S], and of the k likeliest at each place, [S, k], best first."""

    chosen: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def token_logprobs(logits: Tensor, ids: Tensor, k: int) -> TokenLogprobs:
    """Log-softmax of logits[S, V] at ids (int64 [S]) and at the k largest logits, equal ones by lowest id."""
    wide = logits.float()
    total = wide.logsumexp(-1, keepdim=True)
    chosen = (wide.gather(1, ids.unsqueeze(1)) - total).squeeze(1)
    values, top_ids = wide.topk(k, dim=-1)
    by_id = top_ids.argsort(dim=-1)
    values, top_ids = values.gather(1, by_id), top_ids.gather(1, by_id)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return TokenLogprobs(chosen, top_ids.gather(1, order), values - total)
