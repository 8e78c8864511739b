"""top-k, top-p and min-p in Triton without a sort: one pass over the logits, then a search among few candidates.

The first kernel takes the maximum of every group of 128 logits. The k-th largest of these is a lower bound of the k-th
largest logit, and only groups that reach it can hold a candidate: the second kernel reads those alone, and finds the
exact threshold by bisection over the bits of the candidates. Rows whose candidates don't decide (a flat distribution
under top-p) are bisected over all their logits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, next_power_of_2, tl
from batchgen_kernels.filter_search import (
    find_border,
    find_kth,
    find_row_border,
    find_row_kth,
    gather_candidates,
    key_of,
    load_groups,
    logit_of,
    reached_groups,
    row_mass,
)
from batchgen_kernels.sample import perturbed, row_keys_of

GROUP = 128
BLOCK = 4096  # logits of a program of the first kernel, and of a step of the full search
CANDIDATES = 2048
TILE = 32  # groups of a step
GUESS = 1024  # groups that a flat row looks into, at most


@jit()
def group_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    group_max,
    block_max,
    block_mass,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (rows, blocks of the vocabulary): maximum of each group and of the block. Of the block's sum of
    exponentials, only where it counts: under top-p without top-k."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    most = tl.max(value, axis=1)
    top = tl.max(most, axis=0)
    blocks = tl.num_programs(1)
    tl.store(group_max + row * blocks * (BLOCK // GROUP) + group, most)
    tl.store(block_max + row * blocks + block, top)
    k = tl.load(top_k + row)
    if (tl.load(top_p + row) < 1.0) & ((k <= 0) | (k >= VOCAB)):
        heat = tl.maximum(tl.load(temperature + row), 1e-5)
        base = tl.where(top == float("-inf"), 0.0, top)
        mass = tl.sum(tl.sum(tl.exp((value - base) / heat), axis=1), axis=0)
        tl.store(block_mass + row * blocks + block, mass)


@jit()
def threshold_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    group_max,
    block_max,
    block_mass,
    groups_list,
    found,
    least,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_B: tl.constexpr,
    CANDIDATES: tl.constexpr,
    GUESS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows): the smallest logit that a row keeps."""
    row = tl.program_id(0).to(tl.int64)
    heat, p, m, k = tl.load(temperature + row), tl.load(top_p + row), tl.load(min_p + row), tl.load(top_k + row)
    k = tl.where(k >= VOCAB, 0, k)
    if (heat < 1e-5) | ((k <= 0) & (p >= 1.0) & (m <= 0.0)):
        tl.store(least + row, float("-inf"))
        return
    block = tl.arange(0, BLOCK_B)
    tops = tl.load(block_max + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=float("-inf"))
    top = tl.max(tops, axis=0)
    high = key_of(top).to(tl.int64)
    lowest = high * 0 - 2139095040  # the key of the smallest finite number
    cut = lowest - 1  # of -inf
    if (k > 0) | (p < 1.0):
        group = tl.arange(0, BLOCK_G)
        group_max += row * NUM_GROUPS
        maxima = tl.load(group_max + group, mask=group < NUM_GROUPS, other=float("-inf"))
        wanted = tl.minimum(k, (VOCAB + GROUP - 1) // GROUP)
        total = 0.0
        if k <= 0:
            masses = tl.load(block_mass + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0.0)
            total = tl.sum(masses * tl.exp((tops - top) / heat), axis=0)
            wanted = tl.minimum((VOCAB + GROUP - 1) // GROUP * 3 // 4, GUESS)
        pivot = find_kth(key_of(maxima), wanted, lowest, high)
        if k <= 0:
            # Where the maxima alone hold the mass that top-p wants, the candidates do, too: often with a few groups.
            mass = tl.exp((maxima - top) / heat)
            if tl.sum(mass, axis=0) >= p * total:
                pivot = find_border(key_of(maxima), mass, p * total, lowest, high)
        logits += row * VOCAB
        found += row * CANDIDATES
        groups_list += row * NUM_GROUPS
        count = gather_candidates(
            logits, group_max, groups_list, found, pivot, VOCAB, GROUP, NUM_GROUPS, BLOCK_G, CANDIDATES, TILE
        )
        index = tl.arange(0, CANDIDATES)
        value = tl.load(found + index, mask=index < count, other=float("-inf"))
        keys = tl.where(index < count, key_of(value), -2147483648)
        mass = tl.where(index < count, tl.exp((value - top) / heat), 0.0)
        complete = count <= CANDIDATES
        if k > 0:
            complete = complete & ((count >= k) | (pivot == lowest))
            if complete:
                if count >= k:
                    cut = find_kth(keys, k, pivot, high)
                total = tl.sum(tl.where(keys >= cut, mass, 0.0), axis=0)
            else:
                cut = find_row_kth(logits, top, heat, k, cut, high, VOCAB, BLOCK)
                _, total = row_mass(logits, top, heat, cut, VOCAB, BLOCK)
        if p < 1.0:
            target = p * total
            low = tl.maximum(cut, pivot)
            complete = complete & ((k > 0) | (tl.sum(mass, axis=0) >= target) | (pivot == lowest))
            if complete:
                cut = find_border(keys, mass, target, low, high)
            else:
                cut = find_row_border(logits, top, heat, target, cut, high, VOCAB, BLOCK)
    border = logit_of(cut.to(tl.int32))
    if m > 0.0:
        border = tl.maximum(border, top + heat * tl.log(m))
    tl.store(least + row, border)


@jit()
def draw_kernel(
    logits,
    temperature,
    seeds,
    positions,
    least,
    group_max,
    groups_list,
    ids,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows): gumbel_sample among the logits of at least `least`, from the groups that hold one."""
    row = tl.program_id(0).to(tl.int64)
    heat, border = tl.load(temperature + row), tl.load(least + row)
    group = tl.arange(0, BLOCK_G)
    group_max += row * NUM_GROUPS
    if heat < 1e-5:
        border = tl.max(tl.load(group_max + group, mask=group < NUM_GROUPS, other=float("-inf")), axis=0)
    groups_list += row * NUM_GROUPS
    num_reached = reached_groups(group_max, groups_list, border, NUM_GROUPS, BLOCK_G)
    first, second = row_keys_of(seeds, positions, row)
    best = tl.full([TILE, GROUP], float("-inf"), dtype=tl.float32)
    best_token = tl.full([TILE, GROUP], VOCAB - 1, dtype=tl.int32)
    for start in range(0, num_reached, TILE):
        token, value = load_groups(logits + row * VOCAB, groups_list, start, num_reached, VOCAB, GROUP, TILE)
        score = tl.where(value >= border, value, float("-inf"))
        if heat >= 1e-5:
            score = perturbed(score, token, heat, first, second)
        better = score > best
        best, best_token = tl.where(better, score, best), tl.where(better, token, best_token)
    top = tl.max(tl.max(best, axis=1), axis=0)
    winner = tl.min(tl.min(tl.where(best == top, best_token, VOCAB - 1), axis=1), axis=0)
    tl.store(ids + row, winner.to(tl.int64))


@jit()
def cut_kernel(logits, least, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    value = tl.where(value >= tl.load(least + row), value, float("-inf"))
    tl.store(out + row * VOCAB + token, value, mask=token < VOCAB)


class Cut(NamedTuple):
    """The smallest logit, float32 [S, 1], that each row keeps (-inf where nothing is cut), and the groups' maxima."""

    least: Tensor
    group_max: Tensor
    groups_list: Tensor  # scratch of the kernels


def find_cut(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Cut:
    """Where top-k, top-p and min-p cut the logits. See filter_logits."""
    check("logits", logits, (None, None), FLOATS, contiguous=True)
    (rows, vocab), device = logits.shape, logits.device
    check("top_k", top_k, (rows,), (torch.int32,), device=device)
    for name, value in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check(name, value, (rows,), (torch.float32,), device=device)
    blocks = -(-vocab // BLOCK)
    groups = blocks * (BLOCK // GROUP)
    group_max, block_max, block_mass, found, least = (
        logits.new_empty((rows, n), dtype=torch.float32) for n in (groups, blocks, blocks, CANDIDATES, 1)
    )
    groups_list = torch.empty_like(group_max, dtype=torch.int32)
    if rows:
        sizes = {"VOCAB": vocab, "GROUP": GROUP, "BLOCK": BLOCK}
        params = (logits, temperature, top_k, top_p)
        group_kernel[rows, blocks](*params, group_max, block_max, block_mass, **sizes, num_warps=8)
        sizes |= {"NUM_GROUPS": groups, "NUM_BLOCKS": blocks, "CANDIDATES": CANDIDATES, "GUESS": GUESS, "TILE": TILE}
        sizes |= {"BLOCK_G": next_power_of_2(groups), "BLOCK_B": next_power_of_2(blocks)}
        scratch = (group_max, block_max, block_mass, groups_list, found, least)
        threshold_kernel[(rows,)](*params, min_p, *scratch, **sizes, num_warps=8)
    return Cut(least, group_max, groups_list)


def gpu_filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See filter_logits."""
    least = find_cut(logits, temperature, top_k, top_p, min_p).least
    rows, vocab = logits.shape
    out = torch.empty_like(logits, dtype=torch.float32)
    if rows:
        cut_kernel[rows, -(-vocab // BLOCK)](logits, least, out, VOCAB=vocab, BLOCK=BLOCK, num_warps=8)
    return out


def gpu_filtered_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """See filtered_sample."""
    (rows, vocab), device = logits.shape, logits.device
    check("seeds", seeds, (rows,), (torch.int64,), device=device)
    check("positions", positions, (rows,), (torch.int64,), device=device)
    cut, ids = find_cut(logits, temperature, top_k, top_p, min_p), torch.empty_like(seeds)
    groups = cut.group_max.shape[1]
    if rows:
        sizes = {"VOCAB": vocab, "GROUP": GROUP, "NUM_GROUPS": groups, "BLOCK_G": next_power_of_2(groups), "TILE": TILE}
        draw_kernel[(rows,)](logits, temperature, seeds, positions, *cut, ids, **sizes, num_warps=8)
    return ids
