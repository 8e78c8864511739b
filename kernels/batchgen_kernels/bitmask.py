"""apply_bitmask: forbid tokens by a packed bitmask, the format that grammar libraries fill."""

import torch
from torch import Tensor


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """Bool [S, vocab_size] of the int32 words [S, ceil(vocab_size / 32)]; token t is bit t % 32 of word t // 32."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """logits[S, V] with -inf where the token's bit in mask (int32 [S, ceil(V / 32)]) is 0."""
    return logits.masked_fill(~unpack(mask, logits.shape[1]), -torch.inf)
