"""The sampling ops: exact where they promise it, right in distribution where they draw."""

import pytest
import torch
from scipy.stats import chisquare, kstest

from batchgen_kernels import (
    apply_bitmask,
    chosen_logprobs,
    filter_logits,
    filtered_sample,
    gumbel_sample,
    penalize,
    token_logprobs,
)
from batchgen_kernels import bitmask as bitmask_op
from batchgen_kernels import filter as filter_op
from batchgen_kernels import logprobs as logprobs_op
from batchgen_kernels import sample as sample_op

ROWS = 20_000


def params(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    def full(value, dtype=torch.float32):
        return torch.full((rows,), value, dtype=dtype)

    return full(temperature), full(top_k, torch.int32), full(top_p), full(min_p)


def drawn(logits, temperature=1.0, **filters):
    """Counts of the tokens drawn over ROWS seeds and positions."""
    rows = logits.repeat(ROWS, 1)
    heat, *cuts = params(ROWS, temperature, **filters)
    seeds, positions = torch.arange(ROWS) // 7, torch.arange(ROWS) % 7
    ids = filtered_sample(rows, heat, *cuts, seeds, positions)
    return ids.bincount(minlength=len(logits))


@pytest.mark.parametrize(
    "filters",
    [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature, filters):
    logits = torch.tensor([2.0, 1.5, 0.5, 0.0, -1.0, 1.5, -3.0])
    heat, *cuts = params(1, temperature, **filters)
    kept = filter_logits(logits.unsqueeze(0), heat, *cuts)[0]
    counts, probs = drawn(logits, temperature, **filters), (kept / temperature).softmax(-1)
    assert counts[probs == 0].sum() == 0
    likely = probs > 0
    expected = (probs[likely] / probs[likely].sum()).double() * ROWS
    assert chisquare(counts[likely].double(), expected * counts.sum() / expected.sum()).pvalue > 1e-4


def test_noise_is_uniform_over_seeds_positions_and_tokens():
    def uniform(seeds, positions, tokens):
        keys = sample_op.row_keys(seeds, positions)
        return torch.exp(-torch.exp(-sample_op.gumbel_noise(*keys, tokens))).double().numpy()

    many, zero = torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)
    for draws in (
        uniform(many, zero, zero),
        uniform(zero, many, zero),
        uniform(zero, zero, many),
        uniform(many << 32, zero, zero),
    ):
        assert kstest(draws, "uniform").pvalue > 1e-4


def test_noise_is_the_documented_hash():
    """Fixed numbers: a resumed job must draw what it drew before, on every device and in every version."""
    first, second = sample_op.row_keys(torch.tensor([7, -1]), torch.tensor([0, 12]))
    assert [first.tolist(), second.tolist()] == [[415870660, 98680040], [1707976614, 1577594588]]
    noise = sample_op.gumbel_noise(first, second, torch.tensor([5, 131_071]))
    torch.testing.assert_close(noise, torch.tensor([-0.3166647, 0.9061826]), rtol=1e-6, atol=1e-6)


def test_rows_are_independent_exactly():
    torch.manual_seed(0)
    logits = torch.randn(9, 3000) * 3
    heat = torch.tensor([0.0, 0.5, 1.0, 1.5, 0.7, 0.0, 1.0, 1.0, 1.0])
    top_k = torch.tensor([0, 5, 0, 50, 2000, 3, 0, -1, 3000]).int()
    top_p = torch.tensor([1.0, 0.9, 0.5, 0.95, 0.99, 0.5, 1.0, 0.1, 0.999])
    min_p = torch.tensor([0.0, 0.0, 0.1, 0.0, 0.0, 0.5, 0.05, 0.0, 0.0])
    seeds, positions = torch.arange(9) * 2**40, torch.arange(9)
    args = (logits, heat, top_k, top_p, min_p, seeds, positions)
    filtered, ids = filter_logits(*args[:5]), filtered_sample(*args)
    for i in range(9):
        one = tuple(arg[i : i + 1] for arg in args)
        assert torch.equal(filter_logits(*one[:5])[0], filtered[i])
        assert filtered_sample(*one)[0] == ids[i]
    order = torch.randperm(9)
    assert torch.equal(filtered_sample(*(arg[order] for arg in args)), ids[order])


def test_greedy_takes_the_largest_and_of_equal_ones_the_lowest():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0], [-torch.inf, -1.0, -2.0, -1.0]])
    for temperature in (0.0, 9e-6):
        heat = torch.full((3,), temperature)
        assert gumbel_sample(logits.bfloat16(), heat, torch.arange(3), torch.arange(3)).tolist() == [1, 0, 1]
    assert gumbel_sample(logits, torch.full((3,), 1e-4), torch.arange(3), torch.arange(3))[2] in (1, 3)


def test_only_reachable_tokens_need_noise():
    torch.manual_seed(0)
    logits = torch.randn(40, 500) * 10
    heat, seeds, positions = torch.rand(40) + 0.1, torch.randint(-(2**62), 2**62, (40,)), torch.arange(40)
    assert torch.equal(
        gumbel_sample(logits, heat, seeds, positions), sample_op.reference(logits, heat, seeds, positions)
    )


def kept_by_a_sort(row, heat, top_k, top_p, min_p):
    """The ids that one row keeps, token by token, in float64."""
    kth = row.sort(descending=True).values[top_k - 1] if 0 < top_k < len(row) else -torch.inf
    alive = row >= kth
    probs = (row.double() / heat).masked_fill(~alive, -torch.inf).softmax(-1)
    above = torch.stack([probs[row > value].sum() for value in row])
    inside = (above < top_p) | (row == row.max())
    return set((alive & inside & (probs >= min_p * probs.max() * (1 - 1e-9))).nonzero().flatten().tolist())


@pytest.mark.parametrize("candidates", [1024, 16], ids=["few candidates decide", "whole rows sorted"])
def test_filter_keeps_what_a_sort_keeps(monkeypatch, candidates):
    monkeypatch.setattr(filter_op, "CANDIDATES", candidates)
    torch.manual_seed(3)
    logits = (torch.randn(12, 400) * 2).bfloat16().float()  # with many equal values
    heat = torch.rand(12) + 0.5
    top_k = torch.tensor([0, 1, 5, 40, 399, 400, 999, -1, 0, 7, 100, 0]).int()
    top_p = torch.tensor([0.9, 1.0, 0.5, 0.93, 0.99, 1.0, 0.3, 0.0, 1e-9, 1.0, 0.8, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.01, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    result = filter_logits(logits, heat, top_k, top_p, min_p)
    for i, (row, *rest) in enumerate(
        zip(logits, heat.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    ):
        kept = set((result[i] > -torch.inf).nonzero().flatten().tolist())
        assert kept == kept_by_a_sort(row, *rest), i
        assert torch.equal(result[i][list(kept)], row[list(kept)])


def test_C09_edges_of_top_k_and_top_p():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0]])
    for top_k in (0, -1, 4, 100):
        assert torch.equal(filter_logits(logits, *params(1, top_k=top_k)), logits)
    assert torch.equal(filter_logits(logits, *params(1, temperature=0.0, top_k=1, top_p=0.1)), logits)
    assert filter_logits(logits, *params(1, top_k=1))[0].isfinite().tolist() == [False, True, True, False]
    assert filter_logits(logits, *params(1, top_p=0.0))[0].isfinite().tolist() == [False, True, True, False]
    assert filter_logits(logits, *params(1, min_p=1.0))[0].isfinite().tolist() == [False, True, True, False]
    masked = torch.tensor([[-torch.inf, 1.0, -torch.inf, 0.0]])
    assert torch.equal(filter_logits(masked, *params(1, top_k=3, top_p=0.999)), masked)


def test_C06_penalties_token_by_token():
    """Repetition over prompt and output, positive logits divided, others multiplied; the other two over the output."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, -1.0]]).repeat(3, 1)
    in_prompt = torch.tensor([[0b01010]], dtype=torch.int32).repeat(3, 1)  # tokens 1 and 3
    counts = torch.tensor([[2, 0, 0, 1, 0]], dtype=torch.int16).repeat(3, 1)
    args = (torch.tensor([2.0, 1.0, 1.0]), torch.tensor([0.0, 0.5, 0.0]), torch.tensor([0.0, 0.25, 0.0]))
    result = penalize(logits, in_prompt, counts, *args)
    assert result[0].tolist() == [1.0, -4.0, 1.0, 0.25, -1.0]
    assert result[1].tolist() == [2.0 - 0.5 - 0.5, -2.0, 1.0, 0.5 - 0.25 - 0.5, -1.0]
    assert torch.equal(result[2], logits[2])


def test_logprobs():
    torch.manual_seed(0)
    logits = torch.randn(5, 300).bfloat16()
    ids = torch.randint(300, (5,))
    result, oracle = token_logprobs(logits, ids, 7), logprobs_op.reference(logits.double(), ids, 7)
    assert torch.equal(result.top_ids, oracle.top_ids)
    torch.testing.assert_close(result.chosen.double(), oracle.chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.top_logprobs.double(), oracle.top_logprobs, rtol=1e-6, atol=1e-6)
    assert token_logprobs(logits, ids, 0).top_ids.shape == (5, 0)
    rows = torch.tensor([4, 0, 0, 3, 4])
    wanted = token_logprobs(logits[rows], ids, 0).chosen
    assert torch.equal(chosen_logprobs(logits, rows, ids), wanted)


def test_bitmask():
    logits = torch.arange(40.0).repeat(2, 1)
    mask = torch.tensor([[1 << 3, 1 << 7], [-(2**31), 0]], dtype=torch.int32)
    result = apply_bitmask(logits, mask)
    assert result.isfinite().nonzero().tolist() == [[0, 3], [0, 39], [1, 31]]
    assert result[0, 39] == 39.0


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 259])
def test_bitmask_is_its_definition(vocab_size):
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(3, vocab_size, generator=generator)
    mask = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator).to(torch.int32)
    assert torch.equal(apply_bitmask(logits, mask), bitmask_op.reference(logits, mask))
    assert torch.equal(apply_bitmask(logits.bfloat16(), mask), bitmask_op.reference(logits.bfloat16(), mask))
