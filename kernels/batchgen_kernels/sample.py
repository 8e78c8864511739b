"""gumbel_sample: greedy and temperature sampling in one pass over the logits, without a softmax.

A token is drawn as the argmax of logit / temperature + Gumbel noise. The noise is a hash of (seed, position, token id),
so a row's draw depends on nothing else: neither on its batch, nor its place in it, nor the device.
"""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy."""

_MASK = 0xFFFFFFFF
_TOKEN, _MIX1, _MIX2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
_U32 = 2.0**-32


def _mul32(a: Tensor, b: int) -> Tensor:
    """Low 32 bits of a product, in int64 without overflow (a < 2^32)."""
    return (a * (b & 0xFFFF) + (((a * (b >> 16)) & 0xFFFF) << 16)) & _MASK


def _mix(x: Tensor, key: Tensor) -> Tensor:
    """A 32-bit mix of x (murmur3's finalizer) with a second key inside."""
    x = _mul32(x ^ (x >> 16), _MIX1)
    x = _mul32(x ^ (x >> 13) ^ key, _MIX2)
    return x ^ (x >> 16)


def row_keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Two 32-bit keys (int64) of each row from its 64-bit seed and its position."""
    low, high = seeds & _MASK, (seeds >> 32) & _MASK
    first = _mix(_mul32(positions & _MASK, _TOKEN) ^ low, high)
    second = _mix((first + _TOKEN) & _MASK, (low ^ high) & _MASK)
    return first, second


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Gumbel noise float32 [S, vocab_size]. -log(-log(1 - v)) keeps its resolution where it matters, at small v."""
    first, second = row_keys(seeds, positions)
    tokens = _mul32(torch.arange(vocab_size, device=seeds.device), _TOKEN)
    bits = _mix(tokens ^ first.unsqueeze(1), second.unsqueeze(1))
    uniform = ((bits.float() + 0.5) * _U32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token id (int64 [S]) a row of logits[S, V], with temperature float32 [S], seeds and positions int64 [S].

    A temperature below 1e-5 takes the largest logit, and of equal ones the lowest id.
    """
    ids = logits.argmax(-1)
    rows = (temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if rows.numel():
        scaled = logits[rows].float() / temperature[rows].unsqueeze(1)
        ids[rows] = (scaled + gumbel_noise(seeds[rows], positions[rows], logits.shape[1])).argmax(-1)
    return ids
