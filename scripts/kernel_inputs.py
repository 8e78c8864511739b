"""Inputs of the kernel checks and benchmarks: random steps, pages and logits on the GPU."""

import itertools

import torch
from torch import Tensor

import batchgen_kernels as ops

BF16 = torch.bfloat16


def step(
    query_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int, int],
    page_size: int = 64,
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor, Tensor, ops.AttentionMetadata]:
    """Random queries and pages; what lies behind a sequence's end is NaN."""
    num_q, num_kv, dim = heads
    counts = [-(-length // page_size) for length in kv_lens]
    ids = torch.randperm(sum(counts)).int() + 1
    table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
    shape = (sum(counts) + 1, num_kv, page_size, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    for i, (run, length) in enumerate(zip(ids.split(counts), kv_lens, strict=True)):
        table[i, : len(run)] = run
        if length % page_size:
            k[run[-1], :, length % page_size :] = torch.nan
            v[run[-1], :, length % page_size :] = torch.nan
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    meta = ops.AttentionMetadata(table.cuda(), starts.cuda(), lengths.cuda(), max(query_lens), max(kv_lens))
    return torch.randn(sum(query_lens), num_q, dim, device="cuda", dtype=dtype), k, v, meta


def rope_inputs(tokens: int, heads: tuple[int, int, int], half: int, normed: bool) -> tuple:
    num_q, num_kv, dim = heads
    qkv = torch.randn(tokens, (num_q + 2 * num_kv) * dim, device="cuda", dtype=BF16)
    angles = torch.rand(5000, half, device="cuda") * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    num_pages = -(-tokens // 64) + 1
    args = (
        qkv,
        cos_sin,
        torch.randint(5000, (tokens,), device="cuda"),
        torch.randperm(num_pages * 64, device="cuda")[:tokens],
    )
    pages = tuple(torch.zeros(num_pages, num_kv, 64, dim, device="cuda", dtype=BF16) for _ in range(2))
    weight = torch.randn(dim, device="cuda", dtype=BF16) if normed else None
    kwargs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": dim, "q_norm": weight, "k_norm": weight}
    return args, kwargs, pages


def zipf(rows: int, vocab: int, exponent: float = 1.5) -> Tensor:
    """Logits like a language model's: probabilities by a power law of the rank, over shuffled ids, with noise."""
    ranks = torch.rand(rows, vocab, device="cuda").argsort(-1) + 1.0
    return -exponent * ranks.log() + torch.randn(rows, vocab, device="cuda") * 0.5


def sampling_params(rows: int) -> dict[str, Tensor]:
    full = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.0}
    params = {name: torch.full((rows,), value, device="cuda") for name, value in full.items()}
    return params | {"top_k": torch.full((rows,), 50, device="cuda", dtype=torch.int32)}
