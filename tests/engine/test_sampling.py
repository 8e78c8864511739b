"""Sampling: distributions, seeds, samples, penalties, logprobs, and rows of different settings in one batch."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from batchgen.engine import Completion, Request, SamplingParams
from batchgen.engine.sampler import row_seed

PROMPT = [4, 8, 15]
DRAWS = 4000


def distribution(logits: Tensor, params: SamplingParams) -> np.ndarray:
    """Probabilities by transformers' processors, in float64."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        processors.append(MinPLogitsWarper(params.min_p))
    logits = logits.double().clone()
    for token, bias in params.logit_bias.items():
        logits[token] += bias
    return processors(torch.tensor([PROMPT]), logits.unsqueeze(0))[0].softmax(0).numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.2},
        {"temperature": 2.0, "top_k": 12, "top_p": 0.8},
        {"temperature": 2.0, "top_k": 12, "min_p": 0.1},
        {"temperature": 2.0, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 2.0, "logit_bias": {7: 5.0, 9: -3.0}},
        {"temperature": 2.0, "repetition_penalty": 1.5, "top_k": 20},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(rig: Any, options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True, seed=11, **options)
    engine = rig.engine(pages=600, max_batch_rows=512, lag=1)
    done = rig.run(engine, [Request("a", PROMPT, params, n=DRAWS)])
    counts = Counter(completion.token_ids[0] for completion in done.values())
    expected = distribution(rig.logits(PROMPT), params) * DRAWS
    assert not [token for token in counts if expected[token] == 0]
    common = expected >= 5
    observed = np.array([counts[token] for token in range(rig.VOCAB)])
    rest = [observed[~common].sum()], [expected[~common].sum()]
    observed, expected = np.append(observed[common], rest[0]), np.append(expected[common], rest[1])
    kept = expected > 0
    assert chisquare(observed[kept], expected[kept] * observed[kept].sum() / expected[kept].sum()).pvalue > 1e-4


def mixed_requests() -> list[Request]:
    settings: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 10},
        {"temperature": 1.2, "top_p": 0.8, "min_p": 0.05},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "logit_bias": {3: 6.0}, "logprobs": 3},
        {"min_tokens": 5, "logprobs": 0},
        {"temperature": 2.0, "min_tokens": 3, "top_k": 8, "repetition_penalty": 0.8, "logprobs": 50},
    ]
    return [
        Request(i, [i % 7 + 1, i % 5 + 1, i % 3 + 1], SamplingParams(max_tokens=9, seed=i, **settings[i % 9]))
        for i in range(36)
    ]


def test_rows_are_the_same_alone_and_in_company(rig: Any) -> None:
    requests = mixed_requests()
    together = rig.run(rig.engine(lag=1), requests)
    preempted = rig.engine(pages=14, page_size=2, output_reserve=0.0, max_batch_tokens=5, refill_share=0.0)
    assert without_cache(rig.run(preempted, requests)) == without_cache(together)
    assert preempted.stats.preemptions > 0
    for request in requests:
        alone = rig.run(rig.engine(), [request])
        assert without_cache(alone)[request.request_id, 0] == without_cache(together)[request.request_id, 0]


def without_cache(done: dict[Any, Completion]) -> dict[Any, Any]:
    """All of the completions but how much of their prompts was cached."""
    return {
        key: (c.token_ids, c.finish_reason, c.stop_token_id, c.logprobs, c.prompt_tokens, c.error)
        for key, c in done.items()
    }


def test_samples_differ_and_each_is_what_its_number_gives(rig: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    few = rig.run(rig.engine(), [Request("a", PROMPT, params, n=3)])
    many = rig.run(rig.engine(max_batch_rows=2), [Request("a", PROMPT, params, n=9)])
    assert len({completion.token_ids for completion in many.values()}) > 1
    for key in few:
        assert few[key].token_ids == many[key].token_ids


def test_row_seeds_do_not_collide_for_neighbours() -> None:
    seeds = {row_seed(seed, sample) for seed in range(-50, 50) for sample in range(50)}
    assert len(seeds) == 5000
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_logprobs_are_those_of_the_raw_logits(rig: Any) -> None:
    params = SamplingParams(max_tokens=6, temperature=1.3, top_k=4, logit_bias={3: 2.0}, logprobs=4, ignore_eos=True)
    (completion,) = rig.run(rig.engine(), [Request("a", PROMPT, params)]).values()
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    for index, (token, entry) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        raw = rig.logits([*PROMPT, *completion.token_ids[:index]]).log_softmax(0)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(raw[token]), abs=1e-5)
        best = raw.topk(4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_each_row_gets_as_many_alternatives_as_it_asks_for(rig: Any) -> None:
    requests = [Request(k, PROMPT, SamplingParams(max_tokens=2, logprobs=k)) for k in (0, 1, 5, 70)]
    requests.append(Request("none", PROMPT, SamplingParams(max_tokens=2)))
    done = rig.run(rig.engine(), requests)
    assert [len(done[k, 0].logprobs[0].top) for k in (0, 1, 5, 70)] == [0, 1, 5, rig.VOCAB]
    assert done["none", 0].logprobs is None


def test_penalties_see_what_they_should(rig: Any) -> None:
    """Repetition sees prompt and output, the other two the output alone: computed by hand from the logits."""
    params = SamplingParams(
        max_tokens=12, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.6, ignore_eos=True
    )
    expected: list[int] = []
    for _ in range(12):
        logits = rig.logits([*PROMPT, *expected])
        for token in {*PROMPT, *expected}:
            logits[token] = logits[token] / 1.4 if logits[token] > 0 else logits[token] * 1.4
        for token, count in Counter(expected).items():
            logits[token] -= 0.7 + 0.6 * count
        expected.append(int(logits.argmax()))
    assert expected != rig.answer(PROMPT, 12, ())[0]
    for lag in (0, 1):
        done = rig.run(rig.engine(lag=lag), [Request("a", PROMPT, params, n=2), Request("b", PROMPT)])
        assert list(done["a", 0].token_ids) == list(done["a", 1].token_ids) == expected


def test_padded_vocabulary_is_never_drawn(rig: Any) -> None:
    params = SamplingParams(max_tokens=8, temperature=50.0, ignore_eos=True, logprobs=20)
    done = rig.run(rig.engine(num_tokens=10), [Request("a", PROMPT, params, n=50), Request("b", PROMPT)])
    assert {token for completion in done.values() for token in completion.token_ids} <= set(range(10))
    assert {i for entry in done["a", 0].logprobs for i, _ in entry.top} <= set(range(10))


def test_greedy_rows_ask_for_nothing_but_the_largest_logit(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("a greedy row needs no such thing")

    for name in ("filter_logits", "penalize", "token_logprobs"):
        monkeypatch.setattr(f"batchgen.engine.sampler.{name}", never)
    rig.run(rig.engine(), [Request(i, [i + 1], SamplingParams(max_tokens=4, top_p=0.5, top_k=3)) for i in range(9)])


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stop_check_cuts_tokens_and_logprobs_at_the_same_place(rig: Any, lag: int) -> None:
    calls: list[int] = []

    def check_once() -> Any:
        def check(tokens: Any) -> int | None:
            calls.append(len(tokens))
            return 2 if len(tokens) >= 4 else None

        return check

    params = SamplingParams(max_tokens=9, logprobs=1, ignore_eos=True)
    done = rig.run(rig.engine(lag=lag), [Request("a", PROMPT, params, stop_check=check_once)])["a", 0]
    assert done.finish_reason == "stop"
    assert done.stop_token_id is None
    assert list(done.token_ids) == rig.answer(PROMPT, 9, ())[0][:2]
    assert len(done.logprobs) == 2
    assert calls == [1, 2, 3, 4]


def test_each_sample_gets_a_stop_check_of_its_own(rig: Any) -> None:
    made: list[list[int]] = []

    def make() -> Any:
        seen: list[int] = []
        made.append(seen)

        def check(tokens: Any) -> int | None:
            seen.append(len(tokens))
            return None

        return check

    rig.run(rig.engine(), [Request("a", [3], SamplingParams(max_tokens=3, ignore_eos=True), n=3, stop_check=make)])
    assert made == [[1, 2, 3]] * 3
