"""Every Triton kernel against its reference: in the interpreter (float32, float16), or on a GPU (bfloat16 too).

Collected only where kernels run: on a GPU, or under TRITON_INTERPRET=1, which test_interpreter.py sets.
"""

import numpy as np
import pytest
import torch

import batchgen_kernels as ops
from batchgen_kernels import (
    activation,
    attention,
    attention_gpu,
    attention_work,
    bitmask,
    filter_gpu,
    logprobs,
    norm,
    penalties,
    rope,
    sample,
)
from batchgen_kernels import filter as filter_op

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16) if GPU else (torch.float32, torch.float16)

pytestmark = [pytest.mark.gpu] if GPU else []


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("features", [{}, {"window": 20}, {"window": 33, "softcap": 5.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("heads", [(6, 2, 32), (7, 1, 24)], ids=str)
@pytest.mark.parametrize(
    "lens", [([1] * 6, [5, 100, 33, 64, 16, 1]), ([40, 20, 1, 9], [40, 61, 33, 16])], ids=["decode", "mixed"]
)
def test_attention(monkeypatch, make_step, close, lens, heads, features, dtype):
    """With splits of two pages, so that sequences have none to four of them."""
    monkeypatch.setattr(attention_work, "SPLIT_KEYS", 32)
    monkeypatch.setattr(attention_gpu, "PREFILL_ROWS", 32)
    q, k, v, meta = make_step(*lens, heads, dtype=dtype, device=DEVICE)
    sinks = randn(heads[0], dtype=dtype) if features.get("sinks") else None
    features = {name: value for name, value in features.items() if name != "sinks"}
    result = ops.paged_attention(q, k, v, meta, scale=0.2, **features, sinks=sinks)
    wide = (x.double().nan_to_num() for x in (q, k, v))
    close("attention", result, attention.reference(*wide, meta, 0.2, **features, sinks=sinks))


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "sizes"),
    [([40, 20, 1, 9], [40, 61, 33, 16], [17, 30, 5, 0]), ([1] * 4, [90, 33, 64, 5], [40, 33, 1, 2])],
    ids=["mixed", "token by token"],
)
def test_attention_in_trees(monkeypatch, make_step, with_tree, close, query_lens, kv_lens, sizes):
    monkeypatch.setattr(attention_gpu, "PREFILL_ROWS", 32)
    q, k, v, meta = make_step(query_lens, kv_lens, device=DEVICE)
    meta = with_tree(meta, sizes)
    wide = (x.double().nan_to_num() for x in (q, k, v))
    close("attention", ops.paged_attention(q, k, v, meta, scale=0.2), attention.reference(*wide, meta, 0.2))


@pytest.mark.parametrize("dtype", DTYPES[-1:] if GPU else DTYPES[:1], ids=str)
@pytest.mark.parametrize(
    "lens", [([1] * 5, [90, 7, 64, 33, 100]), ([1, 30, 9, 5, 1], [90, 37, 64, 5, 100])], ids=["decode", "prefill"]
)
def test_attention_depends_on_nothing_but_the_sequence(monkeypatch, make_step, lens, dtype):
    monkeypatch.setattr(attention_work, "SPLIT_KEYS", 32)
    q, k, v, meta = make_step(*lens, device=DEVICE, dtype=dtype)
    together = ops.paged_attention(q, k, v, meta, scale=0.2)
    for i, length in enumerate(lens[1]):
        tokens = slice(*meta.query_start[i : i + 2].tolist())
        start = torch.tensor([0, tokens.stop - tokens.start], dtype=torch.int32, device=DEVICE)
        one = ops.AttentionMetadata(
            meta.block_table[i : i + 1], start, meta.kv_lens[i : i + 1], meta.max_query_len, length
        )
        assert torch.equal(ops.paged_attention(q[tokens], k, v, one, scale=0.2), together[tokens])


RUNS = {
    "one run": ([5], [32], 0),
    "prefix but the last token": ([3], [48], 0),
    "several": ([2, 9, 1], [16, 80, 160], 3),
}
"""Rows of each run, keys that they share, rows beside them."""
SHARED_SHAPES = [((4, 1, 64), 16, {}), ((14, 2, 64), 64, {}), ((8, 2, 128), 16, {"softcap": 5.0, "sinks": True})]
"""Heads, page size, features."""


@pytest.mark.parametrize(("heads", "page_size", "features"), SHARED_SHAPES, ids=str)
@pytest.mark.parametrize("case", RUNS)
def test_shared_attention(monkeypatch, make_step, close, case, page_size, heads, features):
    """Against full attention. Rows lie in the batch in any order, blocks are small and splits short."""
    monkeypatch.setattr(attention_work, "SPLIT_KEYS", max(32, page_size))
    monkeypatch.setattr(attention_work, "SHARED_HEADS", 16)
    sizes, keys, rest = RUNS[case]
    keys = [count * page_size // 16 for count in keys]
    count = sum(sizes) + rest
    lengths = np.array([1 if "last" in case else 1 + (11 * i) % 70 for i in range(count)], np.int32)
    members = np.random.default_rng(0).permutation(count)[: sum(sizes)].astype(np.int32)
    lengths[members] += np.repeat(keys, sizes).astype(np.int32)
    q, k, v, meta = make_step([1] * count, lengths.tolist(), heads, page_size, device=DEVICE)
    for run, shared in zip(np.split(members, np.cumsum(sizes)[:-1]), keys, strict=True):
        meta.block_table[run, : shared // page_size] = meta.block_table[run[0], : shared // page_size].clone()
    runs = attention_work.SharedRuns(members, np.array(sizes, np.int32), np.array(keys, np.int32))
    work = attention_work.decode_work(lengths, runs, *heads[:2]).to_device(heads[1], torch.device(DEVICE))
    sinks = randn(heads[0]) if features.get("sinks") else None
    softcap = features.get("softcap")
    wide = (x.double().nan_to_num() for x in (q, k, v))
    wanted = attention.reference(*wide, meta, 0.2, softcap=softcap, sinks=sinks)
    meta = meta._replace(work=work)
    close("attention", ops.paged_attention(q, k, v, meta, scale=0.2, softcap=softcap, sinks=sinks), wanted)
    assert not work.arrivals.any()  # as the next layer's launch needs it
    with pytest.raises(ValueError, match=f"work: {len(members)} rows share keys, but a window of 5 hides some"):
        ops.paged_attention(q, k, v, meta, scale=0.2, window=5)


def test_the_list_of_work_gives_what_the_lengths_give(monkeypatch, make_step):
    monkeypatch.setattr(attention_work, "SPLIT_KEYS", 16)
    monkeypatch.setattr(attention_work, "MAX_SPLITS", 4)
    lengths = [90, 7, 64, 33, 300, 1]
    q, k, v, meta = make_step([1] * 6, lengths, device=DEVICE)
    arrays = attention_work.decode_work(np.array(lengths, np.int32), None, 6, 2)
    listed = meta._replace(work=arrays.to_device(2, torch.device(DEVICE)))
    for window in (None, 20):
        results = [ops.paged_attention(q, k, v, m, scale=0.2, window=window) for m in (meta, listed)]
        assert torch.equal(*results)


def test_attention_names_what_is_wrong(make_step):
    q, k, v, meta = make_step([1, 1], [30, 5], device=DEVICE)
    with pytest.raises(ValueError, match=r"k_pages: shape \(4, 2, 16, 32\), expected \(\*, \*, \*, 16\)"):
        ops.paged_attention(q[..., :16].contiguous(), k, v, meta, scale=1.0)
    with pytest.raises(ValueError, match=r"kv_lens: dtype torch.int64, expected torch.int32"):
        ops.paged_attention(q, k, v, meta._replace(kv_lens=meta.kv_lens.long()), scale=1.0)
    with pytest.raises(ValueError, match=r"max_kv_len 33, but block_table holds 32"):
        ops.paged_attention(q, k, v, meta._replace(max_kv_len=33), scale=1.0)
    with pytest.raises(ValueError, match=r"q has 5 heads, expected a multiple of the 2 of k_pages"):
        ops.paged_attention(q[:, :5].contiguous(), k, v, meta, scale=1.0)
    with pytest.raises(ValueError, match=r"q: strides .* expected contiguous"):
        ops.paged_attention(q.transpose(0, 1).contiguous().transpose(0, 1), k, v, meta, scale=1.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("order", norm.NORM_ORDERS)
def test_rms_norm(close, order, dtype):
    x, residual, weight = randn(5, 48, dtype=dtype), randn(5, 48, dtype=dtype), randn(48, dtype=dtype)
    result, total = ops.rms_norm(x, weight, 1e-6, residual=residual, order=order)
    assert torch.equal(total, x + residual)
    close("fused", result, norm.normalize(total.float(), weight.float(), 1e-6, order))
    close(
        "fused", ops.rms_norm(x, weight, 1e-6, order=order)[0], norm.normalize(x.float(), weight.float(), 1e-6, order)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
def test_act_mul(close, act, dtype):
    gate_up = randn(5, 2 * 1100, dtype=dtype)
    close("fused", ops.act_mul(gate_up, act), activation.reference(gate_up.double(), act))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("half", "normed"), [(16, True), (12, False), (10, True)])
def test_qkv_rope_store(close, half, normed, dtype):
    heads, tokens = (3, 2, 32), 19
    qkv, angles = randn(tokens, 7 * 32, dtype=dtype), torch.rand(100, half).to(DEVICE) * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    positions, slots = torch.randint(100, (tokens,)).to(DEVICE), torch.randperm(64)[:tokens].to(DEVICE)
    pages = [torch.zeros(4, 2, 16, 32, dtype=dtype, device=DEVICE) for _ in range(4)]
    norms = (randn(32, dtype=dtype), randn(32, dtype=dtype)) if normed else (None, None)
    kwargs = {"num_q_heads": 3, "num_kv_heads": 2, "head_dim": 32, "q_norm": norms[0], "k_norm": norms[1]}
    result = ops.qkv_rope_store(qkv, cos_sin, positions, slots, *pages[:2], **kwargs)
    args = (qkv, cos_sin, positions, slots, *pages[2:])
    wanted = rope.reference(*args, heads, norms, 1e-6, "cast_then_scale")
    for a, b in zip((*result, *pages[:2]), (*wanted, *pages[2:]), strict=True):
        close("fused", a, b)


@pytest.mark.parametrize("count", [1, 16, 33])
def test_copy_slots(count):
    k, v = randn(5, 3, 16, 24), randn(5, 3, 16, 24)
    wanted = torch.stack((k, v))
    source, target = torch.randperm(80).to(DEVICE)[: 2 * count].view(2, count)
    padding = torch.zeros(2, 5, dtype=torch.int64, device=DEVICE)
    ops.copy_slots(k, v, torch.cat((torch.stack((source, target)), padding), dim=1))
    wanted[:, target // 16, :, target % 16] = wanted[:, source // 16, :, source % 16]
    assert torch.equal(torch.stack((k, v)), wanted)


def test_sampling_equals_the_reference():
    """Bit for bit the same hash, so the same tokens as the CPU draws."""
    logits, heat = randn(7, 9001) * 3, torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 9e-6, 2.0])
    seeds, positions = torch.randint(-(2**62), 2**62, (7,)), torch.arange(7) * 1000
    args = (logits, heat.to(DEVICE), seeds.to(DEVICE), positions.to(DEVICE))
    assert torch.equal(ops.gumbel_sample(*args).cpu(), sample.reference(logits.cpu(), heat, seeds, positions))
    ties = torch.tensor([[1.0, 3.0, 3.0, 2.0] * 3000]).to(DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    assert ops.gumbel_sample(ties, torch.zeros(1, device=DEVICE), zero, zero).item() == 1


@pytest.mark.parametrize(("spread", "candidates"), [(1.0, 2048), (4.0, 2048), (0.3, 256)])
def test_filters(monkeypatch, spread, candidates):
    """Where few candidates decide, where none are enough, and with equal logits at the border."""
    monkeypatch.setattr(filter_gpu, "CANDIDATES", candidates)
    logits = (randn(9, 5000) * spread).bfloat16().float()
    logits[8, 4:] = -torch.inf
    heat = torch.tensor([0.0, 0.5, 1.0, 1.5, 1.0, 1.0, 0.7, 0.9, 1.0]).to(DEVICE)
    top_k = torch.tensor([5, 50, 0, -1, 1, 5000, 300, 3000, 20]).int().to(DEVICE)
    top_p = torch.tensor([0.5, 0.9, 0.9, 0.5, 0.99, 0.999, 0.95, 1.0, 0.9]).to(DEVICE)
    min_p = torch.tensor([0.9, 0.0, 0.0, 0.02, 0.0, 0.0, 0.0, 0.01, 0.0]).to(DEVICE)
    result = ops.filter_logits(logits, heat, top_k, top_p, min_p)
    assert torch.equal(result[0], logits[0])
    columns = (x.double().unsqueeze(1)[1:] for x in (heat, torch.where(top_k < 5000, top_k, 0), top_p, min_p))
    wanted = filter_op.reference(logits[1:].double(), *columns)
    assert torch.equal(result[1:].isfinite(), wanted.isfinite())
    kept = result.isfinite()
    assert torch.equal(result[kept], logits[kept])
    seeds = torch.arange(9, device=DEVICE)
    drawn = ops.filtered_sample(logits, heat, top_k, top_p, min_p, seeds, seeds)
    assert torch.equal(drawn, ops.gumbel_sample(result, heat, seeds, seeds))


def test_penalties_and_bitmask(close):
    logits, words = randn(6, 5001) * 2, torch.randint(-(2**31), 2**31 - 1, (6, 157), dtype=torch.int32).to(DEVICE)
    counts = torch.randint(0, 3, (6, 5001), dtype=torch.int16).to(DEVICE)
    factors = [
        torch.tensor(x).to(DEVICE) for x in ([1, 1.3, 1, 1, 0.8, 1.0], [0, 0, 0.5, 0, 1, 0.0], [0, 0, 0, 0.7, 1, 0.0])
    ]
    result = ops.penalize(logits, words, counts, *factors)
    close("logits", result, penalties.reference(logits.double(), words, counts, *factors))
    assert torch.equal(result[0], logits[0])
    assert torch.equal(ops.apply_bitmask(logits, words), bitmask.reference(logits, words))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [0, 5])
def test_logprobs(dtype, k):
    logits, ids = randn(4, 9001, dtype=dtype) * 3, torch.randint(9001, (4,)).to(DEVICE)
    result, oracle = ops.token_logprobs(logits, ids, k), logprobs.reference(logits.double(), ids, k)
    assert torch.equal(result.top_ids, oracle.top_ids)
    torch.testing.assert_close(result.chosen.double(), oracle.chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.top_logprobs.double(), oracle.top_logprobs, rtol=1e-6, atol=1e-6)
    rows = torch.tensor([0, 1, 2, 3]).to(DEVICE)
    assert torch.equal(ops.chosen_logprobs(logits, rows, ids), result.chosen)
