"""gumbel_sample: greedy and temperature sampling in one pass over the logits, without a softmax.

A token is drawn as the argmax of logit / temperature + Gumbel noise. The noise is a hash of (seed, position, token id),
so a row's draw depends on nothing else: neither on its batch, nor its place in it, nor the device.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import fast_log2, jit, next_power_of_2, runs_kernels, tl

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy."""

NOISE_RANGE = 26.0
"""The noise lies between -2.9 and 22.9: a token that is further behind the best one can't win."""

BLOCK = 4096

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


def gumbel_noise(first: Tensor, second: Tensor, tokens: Tensor) -> Tensor:
    """Float32 noise of each token id under its row's keys. -log(-log(1 - v)) keeps resolution at small v."""
    bits = _mix(_mul32(tokens, _TOKEN) ^ first, second)
    uniform = ((bits.float() + 0.5) * _U32).clamp_(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-uniform))


def reference(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The definition."""
    first, second = (key.unsqueeze(1) for key in row_keys(seeds, positions))
    noise = gumbel_noise(first, second, torch.arange(logits.shape[1], device=logits.device))
    greedy = temperature < GREEDY_BELOW
    scaled = logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    return torch.where(greedy, logits.argmax(-1), (scaled + noise).argmax(-1))


def _cpu(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The reference's result, with noise only for tokens that any noise could make win."""
    ids = logits.argmax(-1)
    rows = (temperature >= GREEDY_BELOW).nonzero().squeeze(1)
    if not rows.numel():
        return ids
    scaled = logits[rows].float() / temperature[rows].unsqueeze(1)
    reachable = scaled > scaled.amax(-1, keepdim=True) - NOISE_RANGE
    row, token = reachable.nonzero().unbind(1)
    first, second = row_keys(seeds[rows], positions[rows])
    noisy = torch.full_like(scaled, -torch.inf)
    noisy[row, token] = scaled[row, token] + gumbel_noise(first[row], second[row], token)
    ids[rows] = noisy.argmax(-1)
    return ids


@jit()
def _mix_bits(x, key):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13) ^ key) * 0xC2B2AE35
    return x ^ (x >> 16)


@jit()
def row_keys_of(seeds, positions, row):
    """`row_keys` of one row."""
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _mix_bits((position & 0xFFFFFFFF).to(tl.uint32) * 0x9E3779B9 ^ low, high)
    return first, _mix_bits(first + 0x9E3779B9, low ^ high)


@jit()
def perturbed(value, token, heat, first, second):
    """(value / heat + Gumbel noise) * log2(e). At small u, the series of -log(1 - u) keeps the resolution."""
    bits = _mix_bits(token.to(tl.uint32) * 0x9E3779B9 ^ first, second)
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1 - 5.960464477539063e-08)
    series = 0.25 + u * (0.2 + u * 0.16666666666666666)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * series)))
    noise = fast_log2(tl.where(u < 0.0625, series, -0.6931471805599453 * fast_log2(1.0 - u)))
    return value * (1.4426950408889634 / heat) - noise


@jit()
def sample_block_kernel(
    logits, temperature, seeds, positions, best, best_ids, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks of the vocabulary): the best token of a block."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    heat = tl.load(temperature + row)
    if heat >= 1e-5:
        first, second = row_keys_of(seeds, positions, row)
        value = perturbed(value, token, heat, first, second)
    top = tl.max(value, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at, top)
    tl.store(best_ids + at, tl.min(tl.where(value == top, token, VOCAB - 1), axis=0))


@jit()
def sample_row_kernel(best, best_ids, ids, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows): the best of the blocks."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    value = tl.load(best + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    _, index = tl.max(value, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(ids + row, tl.load(best_ids + row * BLOCKS + index).to(tl.int64))


def _launch(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    check("logits", logits, (None, None), FLOATS, contiguous=True)
    (rows, vocab), device = logits.shape, logits.device
    check("temperature", temperature, (rows,), (torch.float32,), device=device)
    check("seeds", seeds, (rows,), (torch.int64,), device=device)
    check("positions", positions, (rows,), (torch.int64,), device=device)
    blocks, ids = -(-vocab // BLOCK), torch.empty_like(seeds)
    best = logits.new_empty((rows, blocks), dtype=torch.float32)
    best_ids = logits.new_empty((rows, blocks), dtype=torch.int32)
    if rows:
        args = (logits, temperature, seeds, positions, best, best_ids)
        sample_block_kernel[rows, blocks](*args, VOCAB=vocab, BLOCK=BLOCK, num_warps=8)
        sample_row_kernel[(rows,)](best, best_ids, ids, BLOCKS=blocks, BLOCK=next_power_of_2(blocks), num_warps=1)
    return ids


def gumbel_sample(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token id (int64 [S]) a row of logits[S, V], with temperature float32 [S], seeds and positions int64 [S].

    A temperature below 1e-5 takes the largest logit, and of equal ones the lowest id.
    """
    if runs_kernels(logits):
        return _launch(logits, temperature, seeds, positions)
    return _cpu(logits, temperature, seeds, positions)
