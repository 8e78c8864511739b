"""The Triton kernels of paged decode attention: a step's list of work (see attention_work.py) in one or two launches.

A program takes one item of the list for one KV head. Keys that several rows share come first, in a launch of their own:
a block of rows goes through one product, and each gets a part of its result. Then come the rows' own keys; where a row
has several parts, the program that is done last merges them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from batchgen_kernels._triton import jit, tl
from batchgen_kernels.attention_kernels import attend_page, with_sink


@jit(varying=("table_stride",))
def shared_kernel(
    q,
    k_pages,
    v_pages,
    block_table,
    items,
    row_parts,
    members,
    parts,
    lse,
    score_scale,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (shared items * KV heads,): a range of whole pages for a block of rows that have them in common."""
    head = tl.program_id(0) % HEADS
    item = items + tl.program_id(0) // HEADS * 5
    first, num_rows = tl.load(item), tl.load(item + 1)
    begin, end, part = tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    if begin >= end:
        return
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    mine = offs_m < num_rows * GROUP
    row = tl.load(members + first + offs_m // GROUP, mask=mine, other=0)
    q_head = head * GROUP + offs_m % GROUP
    in_dim = (offs_d < DIM)[None, :]
    inside = mine[:, None] & in_dim
    q_at = (row.to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + offs_d[None, :]
    q_tile = tl.load(q + q_at, mask=inside, other=0.0)
    table = block_table + tl.load(members + first).to(tl.int64) * table_stride
    in_page = offs_n[:, None] * DIM + offs_d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(begin, end, PAGE):
        at = (tl.load(table + start // PAGE).to(tl.int64) * HEADS + head) * (PAGE * DIM) + in_page
        if DIM == BLOCK_D:
            k, v = tl.load(k_pages + at), tl.load(v_pages + at)
        else:
            k, v = tl.load(k_pages + at, mask=in_dim, other=0.0), tl.load(v_pages + at, mask=in_dim, other=0.0)
        acc, peak, mass = attend_page(acc, peak, mass, q_tile, k, v, in_dim, score_scale, SOFTCAP, False)
    slot = (tl.load(row_parts + row * 4, mask=mine, other=0) + part).to(tl.int64) * (HEADS * GROUP) + q_head
    tl.store(parts + slot[:, None] * DIM + offs_d[None, :], acc / mass[:, None], mask=inside)
    tl.store(lse + slot, peak + tl.log2(mass), mask=mine)


@jit(varying=("table_stride",))
def decode_kernel(
    q,
    k_pages,
    v_pages,
    block_table,
    kv_lens,
    items,
    row_parts,
    arrivals,
    sinks,
    out,
    parts,
    lse,
    score_scale,
    table_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (items * KV heads,): a range of a row's own keys, and the row's result once all of them are done."""
    head = tl.program_id(0) % HEADS
    item = items + tl.program_id(0) // HEADS * 4
    row, begin, end, part = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    if begin >= end:
        return
    info = row_parts + row * 4
    skipped, first_key = 0, begin  # parts and keys that the window hides
    if WINDOW > 0:
        first_key = tl.maximum(tl.load(kv_lens + row) - WINDOW, 0)
        skipped = first_key // tl.load(info + 3)
        if part < skipped:
            return
        begin = tl.maximum(begin, first_key // PAGE * PAGE)
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    in_group, in_dim = offs_m < GROUP, (offs_d < DIM)[None, :]
    inside = in_group[:, None] & in_dim
    q_head = head * GROUP + offs_m
    q_at = (row.to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + offs_d[None, :]
    q_tile = tl.load(q + q_at, mask=inside, other=0.0)
    table = block_table + row.to(tl.int64) * table_stride
    in_page = offs_n[:, None] * DIM + offs_d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(begin, end, PAGE):
        at = (tl.load(table + start // PAGE).to(tl.int64) * HEADS + head) * (PAGE * DIM) + in_page
        key_at = start + offs_n
        loaded = (key_at < end)[:, None] & in_dim
        k, v = tl.load(k_pages + at, mask=loaded, other=0.0), tl.load(v_pages + at, mask=loaded, other=0.0)
        hidden = key_at >= end
        if WINDOW > 0:
            hidden = hidden | (key_at < first_key)
        acc, peak, mass = attend_page(acc, peak, mass, q_tile, k, v, hidden[None, :], score_scale, SOFTCAP, True)
    slot = tl.load(info).to(tl.int64) * (HEADS * GROUP) + q_head
    num_parts, num_shared = tl.load(info + 1), tl.load(info + 2)
    num_own = num_parts - num_shared - skipped
    last, merged = num_own <= 1, num_shared
    if num_own > 1:
        own = slot + part * (HEADS * GROUP)
        tl.store(parts + own[:, None] * DIM + offs_d[None, :], acc / mass[:, None], mask=inside)
        tl.store(lse + own, peak + tl.log2(mass), mask=in_group)
        tl.debug_barrier()  # every thread has written before this program counts as arrived
        last = tl.atomic_add(arrivals + row * HEADS + head, 1, sem="acq_rel") == num_own - 1
        tl.debug_barrier()
        # All parts are read again, in their order: the result is the same whoever comes last.
        merged = num_parts
        peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
        mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    if last:
        for i in range(skipped, merged):
            at = slot + i * (HEADS * GROUP)
            # Other programs wrote them: .cg reads them in the L2 cache, which all programs share.
            total = tl.load(lse + at, mask=in_group, other=0.0, cache_modifier=".cg")
            value = tl.load(parts + at[:, None] * DIM + offs_d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, total)
            old, new = tl.exp2(peak - new_peak), tl.exp2(total - new_peak)
            acc = acc * old[:, None] + value * new[:, None]
            mass = mass * old + new
            peak = new_peak
        if SINKS:
            sink = tl.load(sinks + q_head, mask=in_group, other=0.0)
            acc, mass = with_sink(acc, peak, mass, sink)
        tl.store(out + q_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
        if num_own > 1:
            tl.store(arrivals + row * HEADS + head, 0)
