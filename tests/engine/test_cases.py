"""Known trouble of generation tools, by the id of the case, over a model whose text is known."""

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams

Scripted = Callable[..., Path]
Load = Callable[..., Engine]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def load(request: pytest.FixtureRequest) -> Load:
    """Makes an engine of a model folder, on the CPU and on a GPU."""

    def make(folder: Path, **options: Any) -> Engine:
        options = {"dtype": "float32", "max_length": 256, "page_size": 16, **options}
        return Engine.load(folder, EngineConfig(device=request.param, **options))

    return make


def ask(engine: Engine, *requests: Request) -> list[Completion]:
    """Completions in the order of the requests and samples."""
    done = list(engine.generate(requests))
    engine.check()
    order = {request.request_id: index for index, request in enumerate(requests)}
    return sorted(done, key=lambda completion: (order[completion.request_id], completion.sample))


def chain(*tokens: int) -> dict[int, int]:
    """A script in which each token leads to the next one."""
    return dict(itertools.pairwise(tokens))


def test_C01_a_stop_over_two_tokens_cuts_ids_and_logprobs_alike(load: Load, scripted_model: Scripted) -> None:
    pieces = {10: "Hel", 11: "lo E", 12: "ND", 13: " more"}

    def stop_at_end() -> Callable[[Sequence[int]], int | None]:
        def check(tokens: Sequence[int]) -> int | None:
            text = "".join(pieces[token] for token in tokens)
            return 2 if "END" in text else None

        return check

    engine = load(scripted_model(chain(5, 10, 11, 12, 13, 13)))
    stopped, cut = ask(
        engine,
        Request("stop", [5], SamplingParams(max_tokens=9, logprobs=0), stop_check=stop_at_end),
        Request("cut", [5], SamplingParams(max_tokens=2, logprobs=0), stop_check=stop_at_end),
    )
    assert (stopped.token_ids, stopped.finish_reason) == ((10, 11), "stop")
    assert len(stopped.logprobs or ()) == 2
    assert (cut.token_ids, cut.finish_reason) == ((10, 11), "length")


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_C03_prompts_at_over_and_far_over_the_limit(load: Load, scripted_model: Scripted, lag: int) -> None:
    engine = load(scripted_model(chain(7, 7)), max_length=64, lag=lag)
    lengths = [1, 62, 63, 64, 65, 640]
    done = ask(engine, *(Request(length, [7] * length, SamplingParams(max_tokens=100)) for length in lengths))
    assert [(c.request_id, len(c.token_ids), c.finish_reason) for c in done] == [
        (1, 63, "length"),
        (62, 2, "length"),
        (63, 1, "length"),
        (64, 0, "error"),
        (65, 0, "error"),
        (640, 0, "error"),
    ]
    for completion in done[3:]:
        assert completion.error is not None
        assert completion.error.kind == "prompt_too_long"
        assert str(completion.request_id) in completion.error.message
        assert "64" in completion.error.message
    for max_tokens in (1, 2):
        (exact,) = ask(engine, Request("a", [7, 7], SamplingParams(max_tokens=max_tokens)))
        assert exact.token_ids == (7,) * max_tokens
    (none,) = ask(engine, Request("a", [7, 7], SamplingParams(max_tokens=0)))
    assert none.error is not None
    assert none.error.kind == "bad_request"


def test_C06_penalties_over_the_prompt_cold_warm_and_preempted(load: Load, scripted_model: Scripted) -> None:
    # From 20 the chain wants to go back to 21, which the prompt holds, and from 45 to 41, which the output holds;
    # 1.3 makes the second choices 40 and 46 win.
    script = {20: 21, 45: 41} | chain(40, 41, 42, 43, 44, 45) | chain(46, 47, 48, 49, 50, 51)
    folder = scripted_model(script, {20: 40, 45: 46})
    prompt = [*range(60, 76), 21, 30, 31, 32, 33, 34, 35, 36, 37, 38, 20]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    settings = {"max_new_tokens": 12, "do_sample": False, "repetition_penalty": 1.3, "pad_token_id": 255}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist()
    assert expected == [*range(40, 52)]
    params = SamplingParams(max_tokens=12, repetition_penalty=1.3)
    page_bytes = 16 * 2 * 256 * 4
    engine = load(folder)
    tight = load(folder, kv_bytes=(1 + 4) * page_bytes, output_reserve=0.0, refill_share=0.0)
    cold, warm = ask(engine, Request("cold", prompt, params)), ask(engine, Request("warm", prompt, params))
    preempted = ask(tight, *(Request(i, prompt, params) for i in range(3)))
    assert warm[0].cached_tokens == 16
    assert tight.stats.preemptions > 0
    for completion in (*cold, *warm, *preempted):
        ended = [] if completion.stop_token_id is None else [completion.stop_token_id]
        assert [*completion.token_ids, *ended] == expected
    frequency = SamplingParams(max_tokens=1, frequency_penalty=2.0)
    presence = SamplingParams(max_tokens=1, presence_penalty=2.0)
    for params in (frequency, presence):
        assert ask(engine, Request("a", prompt, params))[0].token_ids == (21,), "they do not see the prompt"
    (bad,) = ask(engine, Request("a", prompt, SamplingParams(repetition_penalty=0.0)))
    assert bad.error is not None
    assert "repetition_penalty" in bad.error.message


def test_C07_every_eos_ends_and_stop_ids_add_to_them(load: Load, scripted_model: Scripted) -> None:
    engine = load(scripted_model(chain(5, 6, 7, 1) | chain(15, 16, 17, 2) | chain(25, 26, 27, 3), eos=(1, 2, 3)))
    done = ask(engine, *(Request(first, [first], SamplingParams(max_tokens=9)) for first in (5, 15, 25)))
    assert [(c.token_ids, c.finish_reason, c.stop_token_id) for c in done] == [
        ((6, 7), "eos", 1),
        ((16, 17), "eos", 2),
        ((26, 27), "eos", 3),
    ]
    user = SamplingParams(max_tokens=9, stop_token_ids=(7,))
    first, other = ask(engine, Request("a", [5], user), Request("b", [15], user))
    assert (first.token_ids, first.finish_reason, first.stop_token_id) == ((6,), "stop", 7)
    assert (other.token_ids, other.finish_reason, other.stop_token_id) == ((16, 17), "eos", 2)


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_C07_min_tokens_and_ignore_eos(load: Load, scripted_model: Scripted, lag: int) -> None:
    # eos 1 is wanted at step 3 and leads on to itself; while it is forbidden, the second choice runs in a circle.
    folder = scripted_model(chain(5, 6, 7, 1, 1) | {9: 1}, {7: 9, 9: 9, 1: 9}, eos=(1,))
    engine = load(folder, lag=lag)

    def answer(**options: Any) -> tuple[tuple[int, ...], str]:
        (completion,) = ask(engine, Request("a", [5], SamplingParams(**{"max_tokens": 8, **options})))
        return completion.token_ids, completion.finish_reason

    assert answer() == ((6, 7), "eos")
    assert answer(min_tokens=2) == ((6, 7), "eos")
    assert answer(min_tokens=3) == ((6, 7, 9), "eos")
    assert answer(min_tokens=5) == ((6, 7, 9, 9, 9), "eos")
    assert answer(min_tokens=5, stop_token_ids=(9,))[0][:3] != (6, 7, 9)
    assert answer(ignore_eos=True) == ((6, 7, 1, 1, 1, 1, 1, 1), "length")
    assert answer(ignore_eos=True, stop_token_ids=(1,)) == ((6, 7), "stop")
    (bad,) = ask(engine, Request("a", [5], SamplingParams(min_tokens=9, max_tokens=8)))
    assert bad.error is not None
    assert "min_tokens" in bad.error.message


def test_C07_a_stop_check_does_not_count_before_min_tokens(load: Load, scripted_model: Scripted) -> None:
    engine = load(scripted_model(chain(5, 6, 7, 8, 9, 10, 11)))
    params = SamplingParams(max_tokens=6, min_tokens=4)
    (early,) = ask(engine, Request("a", [5], params, stop_check=lambda: lambda t: 1 if len(t) == 2 else None))
    (late,) = ask(engine, Request("a", [5], params, stop_check=lambda: lambda t: 3 if len(t) == 4 else None))
    assert early.token_ids == (6, 7, 8, 9, 10, 11)
    assert (late.token_ids, late.finish_reason) == ((6, 7, 8), "stop")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_C09_edges_of_temperature_and_filters(load: Load, scripted_model: Scripted, dtype: str) -> None:
    engine = load(scripted_model(chain(5, 6, 7, 8), eos=(0,)), dtype=dtype)
    greedy = [
        {"temperature": value} for value in (0.0, 1e-9, 1e-6, 0.01)
    ] + [
        {"temperature": 100.0, "top_k": 1},
        {"temperature": 100.0, "top_p": 1e-9},
        {"temperature": 100.0, "min_p": 1.0},
        {"temperature": 1.0, "top_k": 256},
        {"temperature": 1.0, "top_k": 257},
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 1.0, "top_k": -1},
    ]  # fmt: skip
    wild = [{"temperature": 100.0, "seed": seed, "ignore_eos": True} for seed in range(8)]
    requests = [Request(i, [5], SamplingParams(max_tokens=3, **options)) for i, options in enumerate(greedy + wild)]
    done = ask(engine, *requests)
    assert [c.token_ids for c in done[: len(greedy)]] == [(6, 7, 8)] * len(greedy)
    assert len({c.token_ids for c in done[len(greedy) :]}) > 4
    samples = ask(engine, Request("n", [5], SamplingParams(max_tokens=3), n=4))
    assert [c.token_ids for c in samples] == [(6, 7, 8)] * 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", {300: 1.0}),
        ("logprobs", -1),
        ("max_tokens", -1),
    ],
)
def test_C09_settings_out_of_range_fail_alone_and_by_name(
    load: Load, scripted_model: Scripted, name: str, value: Any
) -> None:
    engine = load(scripted_model(chain(5, 6, 7, 8)))
    options: dict[str, Any] = {"max_tokens": 3, name: value}
    good, bad = ask(
        engine, Request("good", [5], SamplingParams(max_tokens=3)), Request("bad", [5], SamplingParams(**options))
    )
    assert good.token_ids == (6, 7, 8)
    assert bad.error is not None
    assert bad.error.kind == "bad_request"
    assert name in bad.error.message


def test_C13_scores_of_choices_that_begin_alike_are_exact_with_their_ends(load: Load, scripted_model: Scripted) -> None:
    # After 5 comes A (10); after A the model wants the end (0), and B (11) is its second choice.
    folder = scripted_model({5: 10, 10: 0, 11: 0}, {10: 11}, c=0.3, c2=0.25)
    choices = {"A": (10, 0), "AB": (10, 11, 0), "B": (11, 0), "A B": (10, 32, 11, 0)}
    (scored,) = ask(load(folder), Request("a", [1, 2, 3, 5], targets=tuple(choices.values())))

    scale = (1 / 256 + 1e-6) ** -0.5  # of a one-hot state after its RMSNorm

    def logprob(before: int, token: int) -> float:
        logits = {5: {10: 0.3}, 10: {0: 0.3, 11: 0.25}, 11: {0: 0.3}, 32: {0: 0.3}}[before]
        total = 256 - len(logits) + sum(math.exp(scale * value) for value in logits.values())
        return scale * logits.get(token, 0.0) - math.log(total)

    assert scored.target_logprobs is not None
    for target, values in zip(choices.values(), scored.target_logprobs, strict=True):
        exact = [logprob(before, token) for before, token in zip((5, *target), target, strict=False)]
        assert values == pytest.approx(exact, abs=1e-4)


def test_D08_answers_belong_to_their_requests_in_whatever_order_they_finish(
    load: Load, scripted_model: Scripted
) -> None:
    numbers = 100
    script = {k: 100 + k for k in range(numbers)} | {100 + k: 100 + k for k in range(numbers)}
    engine = load(scripted_model(script, eos=(255,)), max_batch_rows=24, lag=1)
    requests = []
    for row in range(300):
        prompt = [row * 7 % 50, row % numbers] if row % 37 else []
        requests.append(Request(row, prompt, SamplingParams(max_tokens=row * 13 % 20 + 1), n=3))
    done = list(engine.generate(requests))
    assert len(done) == 900
    assert {(c.request_id, c.sample) for c in done} == {(row, sample) for row in range(300) for sample in range(3)}
    assert [c.request_id for c in done] != sorted(c.request_id for c in done)
    for completion in done:
        row = completion.request_id
        if row % 37:
            assert completion.token_ids == (100 + row % numbers,) * (row * 13 % 20 + 1)
        else:
            assert completion.error is not None
            assert completion.error.kind == "empty_prompt"
