"""The standard workloads: token-id prompts made from a seed, and the model geometries that they run on.

A workload is a list of (prompt token ids, number of new tokens). Ends of sequence are ignored, so the work is fixed.
`scale` multiplies the rows: a small model wants 8 or more, so that a run is long against its start and its tail.
"""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Workload = list[tuple[Tokens, int]]
MAX_TOKEN_ID = 100_000

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

GEOMETRIES = {"llama-8b": LLAMA_8B, "qwen-0.5b": QWEN_05B}
"""Model configs by the name that `batchgen bench --model` takes."""


def _tokens(rng: Generator, count: int) -> Tokens:
    return rng.integers(1000, MAX_TOKEN_ID, count, dtype=np.int32)


def label(scale: float = 1, seed: int = 1) -> Workload:
    """4,096 rows: an instruction with few-shots of 2,048 tokens shared by all, 100 to 200 own tokens, 16 out."""
    rng = np.random.default_rng(seed)
    head = _tokens(rng, 2048)
    return [(np.concatenate([head, _tokens(rng, int(rng.integers(100, 201)))]), 16) for _ in range(_rows(4096, scale))]


def choices(scale: float = 1, seed: int = 1) -> Workload:
    """4,096 rows: the prompts of `label`, one of eight labels of 1 to 3 tokens for each. It counts as one token out."""
    return [(tokens, 1) for tokens, _ in label(scale, seed)]


def grouped(scale: float = 1, seed: int = 2) -> Workload:
    """4,000 rows: 500 tokens shared by all, 1,500 by each of 100 groups, 150 to 250 own, 64 out; shuffled."""
    rng = np.random.default_rng(seed)
    head = _tokens(rng, 500)
    groups = [np.concatenate([head, _tokens(rng, 1500)]) for _ in range(_rows(100, scale))]
    rows = [
        (np.concatenate([groups[i % len(groups)], _tokens(rng, int(rng.integers(150, 251)))]), 64)
        for i in range(_rows(4000, scale))
    ]
    return [rows[i] for i in rng.permutation(len(rows))]


def documents(scale: float = 1, seed: int = 6) -> Workload:
    """4,800 rows: 8 questions of 30 to 90 tokens on each of 600 documents of 2,500 tokens, 32 out; shuffled.

    The documents together outgrow the cache of one GPU, so a cache that keeps what it saw last loses them.
    """
    rng = np.random.default_rng(seed)
    texts = [_tokens(rng, 2500) for _ in range(_rows(600, scale))]
    order = rng.permutation(len(texts) * 8)
    return [(np.concatenate([texts[i % len(texts)], _tokens(rng, int(rng.integers(30, 91)))]), 32) for i in order]


def chat(scale: float = 1, seed: int = 3) -> Workload:
    """3,000 rows, nothing shared: log-normal lengths like public chat traces, mean about 220 in and 200 out."""
    rng = np.random.default_rng(seed)
    rows = _rows(3000, scale)
    lengths_in = np.clip(rng.lognormal(4.8, 1.1, rows), 4, 2048).astype(int)
    lengths_out = np.clip(rng.lognormal(4.9, 0.9, rows), 4, 1024).astype(int)
    return [(_tokens(rng, int(a)), int(b)) for a, b in zip(lengths_in, lengths_out, strict=True)]


def even(scale: float = 1, seed: int = 4) -> Workload:
    """2,048 rows, nothing shared: 512 in and 512 out."""
    rng = np.random.default_rng(seed)
    return [(_tokens(rng, 512), 512) for _ in range(_rows(2048, scale))]


def long_out(scale: float = 1, seed: int = 5) -> Workload:
    """1,024 rows, nothing shared: 128 in and 2,048 out."""
    rng = np.random.default_rng(seed)
    return [(_tokens(rng, 128), 2048) for _ in range(_rows(1024, scale))]


def _rows(rows: int, scale: float) -> int:
    return max(1, round(rows * scale))


WORKLOADS: dict[str, Callable[[float], Workload]] = {
    "label": label,
    "choices": choices,
    "grouped": grouped,
    "documents": documents,
    "chat": chat,
    "even": even,
    "long_out": long_out,
}
"""The workloads by name, in the order in which a bench runs them."""
