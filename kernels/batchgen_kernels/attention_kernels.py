"""The Triton kernel of chunked prefill attention over pages, and the step that it shares with the one of decode.

A tile of keys is one page: its address is one scalar load from the block table, and a head of a page is contiguous.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from batchgen_kernels._triton import jit, tl


@jit()
def attend_page(acc, peak, mass, q, k, v, hidden, score_scale, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """One page of keys: the running output [M, D], maximum (in log2) and sum of exponentials [M] of each query row."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = (2.0 * tl.sigmoid(scores * (2.0 * score_scale / SOFTCAP)) - 1.0) * SOFTCAP
        factor = 1.4426950408889634
    else:
        factor = score_scale * 1.4426950408889634
    if MASKED:
        scores = tl.where(hidden, float("-inf"), scores)
    # The factor is applied behind the maximum: there it is one instruction with the subtraction. It is asked for, since
    # a compiler that finds it in one loop and not in another would give a row other bits in other company.
    new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    base = new_peak
    if MASKED:  # a row that has seen no key yet
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    probs = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    old = tl.exp2(peak - base)
    mass = tl.fma(mass, old, tl.sum(probs, axis=1))
    acc = tl.dot(probs.to(v.dtype), v, acc * old[:, None], input_precision="ieee")
    return acc, new_peak, mass


@jit()
def with_sink(acc, peak, mass, sink):
    """Add the sink logits [M] to the softmax."""
    sink = sink.to(tl.float32) * 1.4426950408889634
    new_peak = tl.maximum(peak, sink)
    old = tl.exp2(peak - new_peak)
    return acc * old[:, None], mass * old + tl.exp2(sink - new_peak)


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


@jit(varying=("table_stride", "num_sequences", "tree_size"))
def prefill_kernel(
    q,
    k_pages,
    v_pages,
    block_table,
    query_start,
    kv_lens,
    tree_start,
    tree_until,
    sinks,
    out,
    score_scale,
    table_stride,
    num_sequences,
    tree_size,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
    TREE: tl.constexpr,
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
    tree = 0
    if TREE:
        tree = tl.load(tree_start + sequence)
        open_end = tl.minimum(open_end, tree // PAGE * PAGE)
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
        acc, peak, mass = attend_page(acc, peak, mass, q_tile, k, v, in_dim, score_scale, SOFTCAP, False)
    for start in range(open_end, end, PAGE):
        at = (tl.load(table + start // PAGE).to(tl.int64) * HEADS + head) * (PAGE * DIM) + in_page
        key_at = start + offs_n
        loaded = (key_at < length)[:, None] & in_dim
        k = tl.load(k_pages + at, mask=loaded, other=0.0)
        v = tl.load(v_pages + at, mask=loaded, other=0.0)
        hidden = key_at[None, :] > query_at[:, None]
        if WINDOW > 0:
            hidden = hidden | (key_at[None, :] <= query_at[:, None] - WINDOW)
        if TREE:
            node = key_at - tree
            until = tree_until + sequence.to(tl.int64) * tree_size + node
            seen = tl.load(until, mask=(node >= 0) & (node < tree_size), other=2147483647)
            hidden = hidden | (query_at[:, None] >= seen[None, :])
        acc, peak, mass = attend_page(acc, peak, mass, q_tile, k, v, hidden, score_scale, SOFTCAP, True)
    if SINKS:
        acc, mass = with_sink(acc, peak, mass, tl.load(sinks + q_head, mask=mine, other=0.0))
    tl.store(out + q_at, (acc / mass[:, None]).to(out.dtype.element_ty), mask=inside)
