"""Cosines and sines of every position, as transformers computes them."""

import math

import torch
from torch import Tensor

from batchgen.models.rope import RopeConfig


def cos_sin_table(rope: RopeConfig, length: int, device: torch.device) -> Tensor:
    """Return float32 `[length, 2, rotary_dim / 2]`.

    Two kinds depend on the length of the sequence. A cache is rotated once, so the longest possible sequence, `length`,
    decides for all: longrope takes its long factors above the original length, and dynamic stretches its base.
    """
    inv_freq, scale = inverse_frequencies(rope, length)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * inv_freq
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=1).to(device)


def inverse_frequencies(rope: RopeConfig, length: int) -> tuple[Tensor, float]:
    """Return the float32 frequencies `[rotary_dim / 2]` and the factor on cosines and sines."""
    match rope.kind:
        case "linear":
            return _plain(rope.theta, rope.rotary_dim) / _factor(rope), 1.0
        case "dynamic":
            return _dynamic(rope, length), 1.0
        case "yarn":
            return _yarn(rope), _yarn_scale(rope)
        case "llama3":
            return _llama3(rope), 1.0
        case "longrope":
            return _longrope(rope, length), _longrope_scale(rope)
        case _:
            return _plain(rope.theta, rope.rotary_dim), 1.0


def _powers(theta: float, dim: int) -> Tensor:
    return theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _plain(theta: float, dim: int) -> Tensor:
    return 1.0 / _powers(theta, dim)


def _factor(rope: RopeConfig) -> float:
    return 1.0 if rope.factor is None else rope.factor


def _dynamic(rope: RopeConfig, length: int) -> Tensor:
    dim, factor = rope.rotary_dim, _factor(rope)
    stretch = factor * max(length, rope.max_positions) / rope.max_positions - (factor - 1)
    return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim)


def _llama3(rope: RopeConfig) -> Tensor:
    """Long waves are slowed by the factor, short ones stay, those between are mixed."""
    factor, low, high = _factor(rope), rope.low_freq_factor or 1.0, rope.high_freq_factor or 4.0
    original = rope.original_positions
    inv_freq = _plain(rope.theta, rope.rotary_dim)
    wavelength = 2 * math.pi / inv_freq
    slowed = torch.where(wavelength > original / low, inv_freq / factor, inv_freq)
    share = (original / wavelength - low) / (high - low)
    mixed = (1 - share) * slowed / factor + share * slowed
    between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(between, mixed, slowed)


def _yarn(rope: RopeConfig) -> Tensor:
    """Frequencies that turn often within the original length stay, those that turn rarely are slowed by the factor."""
    dim = rope.rotary_dim

    def dim_of(rotations: float) -> float:
        turns = math.log(rope.original_positions / (rotations * 2 * math.pi))
        return dim * turns / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast or 32), dim_of(rope.beta_slow or 1)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    kept = 1 - ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    powers = _powers(rope.theta, dim)
    return 1.0 / (_factor(rope) * powers) * (1 - kept) + 1.0 / powers * kept


def _yarn_scale(rope: RopeConfig) -> float:
    def magnitude(mscale: float) -> float:
        factor = _factor(rope)
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)


def _longrope(rope: RopeConfig, length: int) -> Tensor:
    factors = rope.long_factor if length > rope.original_positions else rope.short_factor
    return 1.0 / (torch.tensor(factors, dtype=torch.float32) * _powers(rope.theta, rope.rotary_dim))


def _longrope_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    factor = rope.max_positions / rope.original_positions if rope.factor is None else rope.factor
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(rope.original_positions))
