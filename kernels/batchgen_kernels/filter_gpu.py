"""top-k, top-p and min-p in Triton without a sort: one pass over the logits, then a search among few candidates.

The first kernel takes the maximum of every group of 128 logits. The k-th largest of these is a lower bound of the k-th
largest logit, and only groups that reach it can hold a candidate: the second kernel reads those alone, and finds the
exact threshold by bisection over the bits of the candidates. Rows whose candidates don't decide (a flat distribution
under top-p) are bisected over all their logits.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from batchgen_kernels._check import check
from batchgen_kernels._triton import jit, next_power_of_2, tl

GROUP = 128
BLOCK = 4096  # logits of a program of the first kernel, and of a step of the full search
CANDIDATES = 2048
GUESS = 512  # groups that a row without top-k looks into


@jit()
def _key(x):
    """An int32 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def _unkey(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def group_kernel(
    logits, temperature, group_max, block_max, block_mass, VOCAB: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks of the vocabulary): maximum of each group; maximum and sum of exponentials of the block."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    group = block * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    most = tl.max(value, axis=1)
    top = tl.max(most, axis=0)
    heat = tl.maximum(tl.load(temperature + row), 1e-5)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.sum(tl.exp((value - base) / heat), axis=1), axis=0)
    blocks = tl.num_programs(1)
    tl.store(group_max + row * blocks * (BLOCK // GROUP) + group, most)
    tl.store(block_max + row * blocks + block, top)
    tl.store(block_mass + row * blocks + block, mass)


@jit()
def _kth(keys, k, low, high):
    """The largest key that at least k of `keys` reach, between low and high (int64 scalars)."""
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _row_mass(logits, top, heat, at_least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of the row have a key of at least `at_least`, and their sum of exponentials."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        kept = (_key(value) >= at_least) & (token < VOCAB)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((value - top) / heat), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@jit()
def _row_kth(logits, top, heat, k, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`_kth` over the whole row."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count, _ = _row_mass(logits, top, heat, middle, VOCAB, BLOCK)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def _candidates(
    logits,
    group_max,
    groups_list,
    found,
    pivot,
    VOCAB: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write the row's logits with a key of at least `pivot` to `found`, in order; returns how many there are."""
    group = tl.arange(0, BLOCK_G)
    reached = (group < NUM_GROUPS) & (
        _key(tl.load(group_max + group, mask=group < NUM_GROUPS, other=float("-inf"))) >= pivot
    )
    place = tl.cumsum(reached.to(tl.int32), axis=0) - 1
    tl.store(groups_list + place, group, mask=reached)
    num_reached = tl.sum(reached.to(tl.int32), axis=0)
    tl.debug_barrier()
    count = 0
    for start in range(0, num_reached, 16):
        index = start + tl.arange(0, 16)
        chosen = tl.load(groups_list + index, mask=index < num_reached, other=0)
        token = tl.reshape(chosen[:, None] * GROUP + tl.arange(0, GROUP)[None, :], [16 * GROUP])
        real = tl.reshape((index < num_reached)[:, None] & (tl.arange(0, GROUP) < GROUP)[None, :], [16 * GROUP])
        real = real & (token < VOCAB)
        value = tl.load(logits + token, mask=real, other=float("-inf")).to(tl.float32)
        kept = real & (_key(value) >= pivot)
        at = count + tl.cumsum(kept.to(tl.int32), axis=0) - 1
        tl.store(found + at, value, mask=kept & (at < CANDIDATES))
        count += tl.sum(kept.to(tl.int32), axis=0)
    tl.debug_barrier()
    return count


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
    masses = tl.load(block_mass + row * NUM_BLOCKS + block, mask=block < NUM_BLOCKS, other=0.0)
    top = tl.max(tops, axis=0)
    total = tl.sum(masses * tl.exp((tops - top) / heat), axis=0)
    high = _key(top).to(tl.int64)
    lowest = high * 0 - 2139095040  # the key of the smallest finite number
    cut = lowest - 1  # of -inf
    if (k > 0) | (p < 1.0):
        group = tl.arange(0, BLOCK_G)
        group_max += row * NUM_GROUPS
        maxima = tl.load(group_max + group, mask=group < NUM_GROUPS, other=float("-inf"))
        wanted = tl.minimum(tl.where(k > 0, k, GUESS), (VOCAB + GROUP - 1) // GROUP)
        pivot = _kth(_key(maxima), wanted, lowest, high)
        logits += row * VOCAB
        found += row * CANDIDATES
        groups_list += row * NUM_GROUPS
        count = _candidates(logits, group_max, groups_list, found, pivot, VOCAB, GROUP, NUM_GROUPS, BLOCK_G, CANDIDATES)
        index = tl.arange(0, CANDIDATES)
        value = tl.load(found + index, mask=index < count, other=float("-inf"))
        keys = tl.where(index < count, _key(value), -2147483648)
        mass = tl.where(index < count, tl.exp((value - top) / heat), 0.0)
        complete = count <= CANDIDATES
        if k > 0:
            complete = complete & ((count >= k) | (pivot == lowest))
            if complete:
                if count >= k:
                    cut = _kth(keys, k, pivot, high)
                    total = tl.sum(tl.where(keys >= cut, mass, 0.0), axis=0)
            else:
                cut = _row_kth(logits, top, heat, k, cut, high, VOCAB, BLOCK)
                _, total = _row_mass(logits, top, heat, cut, VOCAB, BLOCK)
        if p < 1.0:
            target = p * total
            low = tl.maximum(cut, pivot)
            complete = complete & ((k > 0) | (tl.sum(mass, axis=0) >= target) | (pivot == lowest))
            if complete:
                while low < high:
                    middle = low + (high - low) // 2
                    if tl.sum(tl.where(keys > middle.to(tl.int32), mass, 0.0), axis=0) < target:
                        high = middle
                    else:
                        low = middle + 1
            else:
                low = cut
                while low < high:
                    middle = low + (high - low) // 2
                    _, above = _row_mass(logits, top, heat, middle + 1, VOCAB, BLOCK)
                    if above < target:
                        high = middle
                    else:
                        low = middle + 1
            cut = low
    border = _unkey(cut.to(tl.int32))
    if m > 0.0:
        border = tl.maximum(border, top + heat * tl.log(m))
    tl.store(least + row, border)


@jit()
def cut_kernel(logits, least, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    value = tl.where(value >= tl.load(least + row), value, float("-inf"))
    tl.store(out + row * VOCAB + token, value, mask=token < VOCAB)


def gpu_thresholds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit, float32 [S], that each row keeps; -inf where nothing is cut. See filter_logits."""
    check("logits", logits, (None, None), contiguous=True)
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
        group_kernel[rows, blocks](logits, temperature, group_max, block_max, block_mass, **sizes, num_warps=8)
        sizes |= {"NUM_GROUPS": groups, "NUM_BLOCKS": blocks, "CANDIDATES": CANDIDATES, "GUESS": GUESS}
        sizes |= {"BLOCK_G": next_power_of_2(groups), "BLOCK_B": next_power_of_2(blocks)}
        args = (logits, temperature, top_k, top_p, min_p, group_max, block_max, block_mass, groups_list, found, least)
        threshold_kernel[(rows,)](*args, **sizes, num_warps=8)
    return least.squeeze(1)


def gpu_filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """See filter_logits."""
    least = gpu_thresholds(logits, temperature, top_k, top_p, min_p)
    rows, vocab = logits.shape
    out = torch.empty_like(logits, dtype=torch.float32)
    if rows:
        cut_kernel[rows, -(-vocab // BLOCK)](logits, least, out, VOCAB=vocab, BLOCK=BLOCK, num_warps=8)
    return out
