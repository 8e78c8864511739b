"""Inputs of the kernel checks and benchmarks: random steps, pages and logits on the GPU."""

import itertools

import numpy as np
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


def listed(
    meta: ops.AttentionMetadata, heads: tuple[int, int, int], runs: ops.SharedRuns | None = None
) -> ops.AttentionMetadata:
    """The step with its list of work, as the engine makes it."""
    work = ops.decode_work(meta.kv_lens.cpu().numpy(), runs, *heads[:2]).to_device(heads[1], meta.kv_lens.device)
    return meta._replace(work=work)


def shared_step(
    groups: list[tuple[int, int]], own: list[int], heads: tuple[int, int, int]
) -> tuple[Tensor, Tensor, Tensor, ops.AttentionMetadata]:
    """A decode step with groups of (rows, shared keys), whose rows have `own` further keys; other rows come last."""
    sizes, keys = (np.array(column, np.int32) for column in zip(*groups, strict=True))
    ends = np.cumsum(sizes)
    lengths = np.array(own, np.int32)
    lengths[: ends[-1]] += np.repeat(keys, sizes)
    tails = [-(-length // 64) for length in own]
    first_tail = 1 + int(keys.sum()) // 64
    table = np.zeros((len(own), -(-int(lengths.max()) // 64)), np.int32)
    for row, (tail, start) in enumerate(zip(tails, itertools.accumulate(tails, initial=first_tail), strict=False)):
        group = int(np.searchsorted(ends, row, side="right"))
        head = keys[group] // 64 if group < len(keys) else 0
        table[row, :head] = np.arange(head) + 1 + keys[:group].sum() // 64
        table[row, head : head + tail] = start + np.arange(tail)
    num_pages = first_tail + sum(tails)
    pages = torch.cat((torch.zeros(1, dtype=torch.int64), torch.randperm(num_pages - 1) + 1)).int()
    k, v = (torch.randn(num_pages, heads[1], 64, heads[2], device="cuda", dtype=BF16) for _ in range(2))
    q = torch.randn(len(own), heads[0], heads[2], device="cuda", dtype=BF16)
    starts = torch.arange(len(own) + 1, dtype=torch.int32, device="cuda")
    block_table = pages[torch.from_numpy(table).long()].cuda()
    meta = ops.AttentionMetadata(block_table, starts, torch.from_numpy(lengths).cuda(), 1, int(lengths.max()))
    runs = ops.SharedRuns(np.arange(ends[-1], dtype=np.int32), sizes, keys)
    return q, k, v, listed(meta, heads, runs)


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
