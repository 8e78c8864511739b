"""The no-overlap roofline of a workload: a GPU's seconds if every part of it ran at its ceiling, one after the other.

No engine that runs compute-bound and bandwidth-bound parts in turn can be faster.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from batchgen.bench.workloads import Tokens, Workload
from batchgen.models.config import ModelConfig

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a machine can do: dense bf16 FLOP/s of a large product, and bytes/s of a device copy, both measured."""

    flops: float
    bytes_s: float


H200 = Ceilings(flops=790e12, bytes_s=4.3e12)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds by part. `total` is their sum: nothing overlaps."""

    gemm: float
    attention: float
    kv: float
    weights: float
    elementwise: float

    @property
    def total(self) -> float:
        """Seconds of the whole workload."""
        return self.gemm + self.attention + self.kv + self.weights + self.elementwise


def roofline(work: Workload, config: ModelConfig, ceilings: Ceilings = H200, kv_bytes: float = 100e9) -> Roofline:
    """The roofline of `work` in bf16 with `kv_bytes` of KV cache; shared prefixes are computed and read once."""
    lengths = np.array([len(tokens) for tokens, _ in work])
    outs = np.array([out for _, out in work])
    computed, shared = _sharing([tokens for tokens, _ in work])
    return bound(lengths, shared, outs, computed, config, ceilings, kv_bytes)


def bound(
    lengths: Ints,
    shared: Ints,
    outs: Ints,
    computed: int,
    config: ModelConfig,
    ceilings: Ceilings = H200,
    kv_bytes: float = 100e9,
) -> Roofline:
    """The roofline of prompts of `lengths` tokens, of which `shared` are read with others, and `outs` new tokens each.

    `computed` prompt tokens are computed in all.
    """
    own = lengths - shared
    steps = outs - 1
    layer_params, head_params = _params(config)
    kv_token = kv_bytes_per_token(config)
    pair_flops = 4 * config.num_layers * config.num_q_heads * config.head_dim
    decode_reads = (steps * own + steps * (steps + 1) / 2).sum()
    decode_pairs = (steps * lengths + steps * (steps + 1) / 2).sum()
    prefill_pairs = (lengths * own - own * (own - 1) / 2).sum()
    tokens = computed + steps.sum()
    live_rows = min(len(lengths), kv_bytes / kv_token / (own + outs / 2).mean())
    num_steps = max(steps.max(), steps.sum() / live_rows, tokens / 8192)
    return Roofline(
        gemm=(2 * layer_params * tokens + 2 * head_params * outs.sum()) / ceilings.flops,
        attention=pair_flops * (prefill_pairs + decode_pairs) / ceilings.flops,
        kv=(decode_reads + tokens) * kv_token / ceilings.bytes_s,
        weights=weight_bytes(config) * num_steps / ceilings.bytes_s,
        elementwise=_elementwise_bytes(config) * tokens / ceilings.bytes_s,
    )


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of a model's weights in bf16, those of embeddings that are no output layer left out."""
    return 2 * sum(_params(config))


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Bytes of KV cache for each token, in bf16."""
    return 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim


def _params(config: ModelConfig) -> tuple[int, int]:
    heads = (config.num_q_heads * 2 + config.num_kv_heads * 2) * config.head_dim
    layer = config.hidden_size * (heads + 3 * config.intermediate_size)
    return layer * config.num_layers, config.hidden_size * config.vocab_size


def _elementwise_bytes(config: ModelConfig) -> int:
    """Bytes per token that fused norms, rotary embedding and activation must move, in bf16."""
    heads = (config.num_q_heads * 2 + config.num_kv_heads * 3) * config.head_dim
    return 2 * config.num_layers * (8 * config.hidden_size + heads + 3 * config.intermediate_size)


def _sharing(prompts: list[Tokens]) -> tuple[int, Ints]:
    """Tokens to compute when shared prefixes are computed once, and how much each prompt shares with some other."""
    order = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">i4").tobytes())
    common = np.zeros(len(prompts) + 1, dtype=np.int64)
    for k, (a, b) in enumerate(pairwise(order), start=1):
        common[k] = _common_prefix(prompts[a], prompts[b])
    shared = np.zeros(len(prompts), dtype=np.int64)
    shared[order] = np.maximum(common[:-1], common[1:])
    return int(sum(len(prompt) for prompt in prompts) - common.sum()), shared


def _common_prefix(a: Tokens, b: Tokens) -> int:
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size
