"""The Triton kernels of paged attention: split-KV decode, the merge of its splits, and chunked prefill.

A tile of keys is one page: its address is one scalar load from the block table, and a head of a page is contiguous.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from batchgen_kernels._triton import jit, tl


@jit()
def _attend(acc, peak, mass, q, k, v, hidden, score_scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One page of keys: the running output [M, D], maximum (in log2) and sum of exponentials [M] of each query row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = (2.0 * tl.sigmoid(scores * (2.0 * score_scale / SOFTCAP)) - 1.0) * (SOFTCAP * 1.4426950408889634)
    else:
        scores = scores * (score_scale * 1.4426950408889634)
    if MASKED:
        scores = tl.where(hidden, float("-inf"), scores)
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = new_peak
    if MASKED:  # a row that has seen no key yet
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = tl.exp2(scores - base[:, None])
    old = tl.exp2(peak - base)
    mass = mass * old + tl.sum(probs, axis=1)
    acc = tl.dot(probs.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return acc, new_peak, mass


@jit()
def _with_sink(acc, peak, mass, sink):
    """Add the sink logits [M] to the softmax."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_peak = tl.maximum(peak, sink)
    old = tl.exp2(peak - new_peak)
    return acc * old[:, None], mass * old + tl.exp2(sink - new_peak)


@jit(varying=("table_stride", "num_splits"))
def decode_kernel(
    q,
    k_pages,
    v_pages,
    block_table,
    kv_lens,
    sinks,
    out,
    parts,
    lse,
    score_scale,
    table_stride,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (B, KV heads, splits): a split of a sequence for a KV head. A sequence of one split is written right away;
    WHOLE: all are."""
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(kv_lens + row)
    begin = split * SPLIT
    end = tl.minimum(begin + SPLIT, length)
    if WINDOW > 0:
        begin = tl.maximum(begin, (length - WINDOW) // PAGE * PAGE)
    if begin >= end:
        return
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    in_group = offs_m < GROUP
    q_head = head * GROUP + offs_m
    q_at = (row * HEADS * GROUP + q_head)[:, None] * DIM + offs_d[None, :]
    inside = in_group[:, None] & (offs_d < DIM)[None, :]
    q_tile = tl.load(q + q_at, mask=inside, other=0.0)
    in_page = offs_n[:, None] * DIM + offs_d[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(begin, end, PAGE):
        page = tl.load(block_table + row.to(tl.int64) * table_stride + start // PAGE).to(tl.int64)
        at = (page * HEADS + head) * (PAGE * DIM) + in_page
        key_at = start + offs_n
        loaded = (key_at < end)[:, None] & (offs_d < DIM)[None, :]
        k = tl.load(k_pages + at, mask=loaded, other=0.0)
        v = tl.load(v_pages + at, mask=loaded, other=0.0)
        hidden = key_at >= end
        if WINDOW > 0:
            hidden = hidden | (key_at < length - WINDOW)
        acc, peak, mass = _attend(acc, peak, mass, q_tile, k, v, hidden[None, :], score_scale, SOFTCAP, True)
    if WHOLE or length <= SPLIT:
        if SINKS:
            acc, mass = _with_sink(acc, peak, mass, tl.load(sinks + q_head, mask=in_group, other=0.0))
        tl.store(out + q_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        part = (row.to(tl.int64) * num_splits + split) * HEADS * GROUP + q_head
        tl.store(parts + part[:, None] * DIM + offs_d[None, :], acc / mass[:, None], mask=inside)
        tl.store(lse + part, peak + tl.log2(mass), mask=in_group)


@jit(varying=("num_splits",))
def combine_kernel(
    parts,
    lse,
    kv_lens,
    sinks,
    out,
    num_splits,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (B, KV heads): merge the splits of a sequence by log-sum-exp, in their order, if it has several."""
    row, head = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_lens + row)
    if length <= SPLIT:
        return
    first = 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // SPLIT
    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    in_group = offs_m < GROUP
    inside = in_group[:, None] & (offs_d < DIM)[None, :]
    q_head = head * GROUP + offs_m
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    for split in range(first, tl.cdiv(length, SPLIT)):
        part = (row.to(tl.int64) * num_splits + split) * HEADS * GROUP + q_head
        score = tl.load(lse + part, mask=in_group, other=0.0)
        value = tl.load(parts + part[:, None] * DIM + offs_d[None, :], mask=inside, other=0.0)
        new_peak = tl.maximum(peak, score)
        old, new = tl.exp2(peak - new_peak), tl.exp2(score - new_peak)
        acc = acc * old[:, None] + value * new[:, None]
        mass = mass * old + new
        peak = new_peak
    if SINKS:
        acc, mass = _with_sink(acc, peak, mass, tl.load(sinks + q_head, mask=in_group, other=0.0))
    q_at = (row * HEADS * GROUP + q_head)[:, None] * DIM + offs_d[None, :]
    tl.store(out + q_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)


@jit()
def _sequence_of(block, query_start, num_sequences, BLOCK_Q: tl.constexpr):
    """Which sequence the query block belongs to, where sequence s starts at block query_start[s] // BLOCK_Q + s."""
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@jit(varying=("table_stride", "num_sequences"))
def prefill_kernel(
    q,
    k_pages,
    v_pages,
    block_table,
    query_start,
    kv_lens,
    sinks,
    out,
    score_scale,
    table_stride,
    num_sequences,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (query blocks, KV heads): BLOCK_Q tokens of a sequence for a KV head, over its pages."""
    block, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(block, query_start, num_sequences, BLOCK_Q)
    query_begin = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - query_begin
    first = (block - query_begin // BLOCK_Q - sequence) * BLOCK_Q
    if first >= num_queries:
        return
    length = tl.load(kv_lens + sequence)
    offs_m, offs_n, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, PAGE), tl.arange(0, BLOCK_D)
    token = first + offs_m // GROUP
    q_head = head * GROUP + offs_m % GROUP
    mine = (offs_m < BLOCK_Q * GROUP) & (token < num_queries)
    inside = mine[:, None] & (offs_d < DIM)[None, :]
    q_at = ((query_begin + token).to(tl.int64) * (HEADS * GROUP) + q_head)[:, None] * DIM + offs_d[None, :]
    q_tile = tl.load(q + q_at, mask=inside, other=0.0)
    query_at = length - num_queries + token
    begin = 0
    # Keys before `open_end` are seen by every query of the block.
    open_end = (length - num_queries + first + 1) // PAGE * PAGE
    end = tl.minimum(length - num_queries + first + BLOCK_Q, length)
    if WINDOW > 0:
        begin = tl.maximum(length - num_queries + first + 1 - WINDOW, 0) // PAGE * PAGE
        open_end = begin
    in_page = offs_n[:, None] * DIM + offs_d[None, :]
    in_dim = (offs_d < DIM)[None, :]
    table = block_table + sequence.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    mass = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(begin, open_end, PAGE):
        at = (tl.load(table + start // PAGE).to(tl.int64) * HEADS + head) * (PAGE * DIM) + in_page
        if DIM == BLOCK_D:
            k, v = tl.load(k_pages + at), tl.load(v_pages + at)
        else:
            k, v = tl.load(k_pages + at, mask=in_dim, other=0.0), tl.load(v_pages + at, mask=in_dim, other=0.0)
        acc, peak, mass = _attend(acc, peak, mass, q_tile, k, v, in_dim, score_scale, SOFTCAP, False)
    for start in range(open_end, end, PAGE):
        at = (tl.load(table + start // PAGE).to(tl.int64) * HEADS + head) * (PAGE * DIM) + in_page
        key_at = start + offs_n
        loaded = (key_at < length)[:, None] & in_dim
        k = tl.load(k_pages + at, mask=loaded, other=0.0)
        v = tl.load(v_pages + at, mask=loaded, other=0.0)
        hidden = key_at[None, :] > query_at[:, None]
        if WINDOW > 0:
            hidden = hidden | (key_at[None, :] <= query_at[:, None] - WINDOW)
        acc, peak, mass = _attend(acc, peak, mass, q_tile, k, v, hidden, score_scale, SOFTCAP, True)
    if SINKS:
        acc, mass = _with_sink(acc, peak, mass, tl.load(sinks + q_head, mask=mine, other=0.0))
    tl.store(out + q_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
