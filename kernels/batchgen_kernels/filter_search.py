"""Searches of the filter kernels: by bisection over the bits of the logits, exact and without a sort."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from batchgen_kernels._triton import jit, tl


@jit()
def key_of(x):
    """An int32 that orders as the float32 does."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit()
def logit_of(key):
    """The inverse of key_of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit()
def find_kth(keys, k, low, high):
    """The largest key that at least k of `keys` reach, between low and high (int64 scalars)."""
    while low < high:
        middle = low + (high - low + 1) // 2
        if tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def find_border(keys, mass, target, low, high):
    """The smallest key above which the mass of `keys` is less than the target, between low and high (int64 scalars)."""
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(keys > middle.to(tl.int32), mass, 0.0), axis=0) < target:
            high = middle
        else:
            low = middle + 1
    return low


@jit()
def row_mass(logits, top, heat, at_least, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of the row have a key of at least `at_least`, and their sum of exponentials."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        value = tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        kept = (key_of(value) >= at_least) & (token < VOCAB)
        count += kept.to(tl.int32)
        mass += tl.where(kept, tl.exp((value - top) / heat), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@jit()
def find_row_kth(logits, top, heat, k, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`find_kth` over the whole row."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count, _ = row_mass(logits, top, heat, middle, VOCAB, BLOCK)
        if count >= k:
            low = middle
        else:
            high = middle - 1
    return low


@jit()
def find_row_border(logits, top, heat, target, low, high, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """`find_border` over the whole row."""
    while low < high:
        middle = low + (high - low) // 2
        _, above = row_mass(logits, top, heat, middle + 1, VOCAB, BLOCK)
        if above < target:
            high = middle
        else:
            low = middle + 1
    return low


@jit()
def reached_groups(group_max, groups_list, least, NUM_GROUPS: tl.constexpr, BLOCK_G: tl.constexpr):
    """List the groups with a maximum of at least `least`, in order; returns how many there are."""
    group = tl.arange(0, BLOCK_G)
    maxima = tl.load(group_max + group, mask=group < NUM_GROUPS, other=float("-inf"))
    reached = (maxima >= least) & (group < NUM_GROUPS)
    tl.store(groups_list + tl.cumsum(reached.to(tl.int32), axis=0) - 1, group, mask=reached)
    tl.debug_barrier()
    return tl.sum(reached.to(tl.int32), axis=0)


@jit()
def load_groups(logits, groups_list, start, num_reached, VOCAB: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Token ids and logits [TILE, GROUP] of listed groups; -inf where there is none."""
    index = start + tl.arange(0, TILE)
    group = tl.load(groups_list + index, mask=index < num_reached, other=VOCAB)
    token = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return token, tl.load(logits + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)


@jit()
def gather_candidates(
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
    TILE: tl.constexpr,
):
    """Write the row's logits with a key of at least `pivot` to `found`, in order; returns how many there are."""
    num_reached = reached_groups(group_max, groups_list, logit_of(pivot.to(tl.int32)), NUM_GROUPS, BLOCK_G)
    count = 0
    for start in range(0, num_reached, TILE):
        token, value = load_groups(logits, groups_list, start, num_reached, VOCAB, GROUP, TILE)
        kept = ((token < VOCAB) & (key_of(value) >= pivot)).to(tl.int32)
        in_group = tl.sum(kept, axis=1)
        before = count + tl.cumsum(in_group, axis=0) - in_group
        at = before[:, None] + tl.cumsum(kept, axis=1) - 1
        tl.store(found + at, value, mask=(kept > 0) & (at < CANDIDATES))
        count += tl.sum(in_group, axis=0)
    tl.debug_barrier()
    return count
