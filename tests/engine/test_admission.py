"""Bad requests fail alone, with a message that says what, where and what to do."""

from typing import Any

import numpy as np
import pytest

from batchgen.engine import EngineConfig, Request, SamplingParams
from batchgen.engine.config import KVShape, Limits
from batchgen.errors import EngineError


@pytest.mark.parametrize(
    ("request_", "kind", "words"),
    [
        (Request("bad", []), "empty_prompt", ["no tokens"]),
        (Request("bad", [3, 50]), "bad_token", ["token 50", "50 tokens"]),
        (Request("bad", [3, -1]), "bad_token", ["token -1"]),
        (Request("bad", [2**31 + 5]), "bad_token", [str(2**31 + 5)]),
        (Request("bad", [2**70]), "bad_token", ["no list of token ids"]),
        (Request("bad", [1.5]), "bad_token", ["no list of token ids"]),  # type: ignore[list-item]
        (Request("bad", [1] * 64), "prompt_too_long", ["64 tokens", "at most 63"]),
        (Request("bad", [1] * 33, SamplingParams(max_tokens=20)), "out_of_memory", ["13 pages", "are 12"]),
        (Request("bad", [1] * 33, targets=((1, 2), (3,) * 20)), "out_of_memory", ["13 pages", "are 12"]),
        (Request("bad", [1], n=0), "bad_request", ["n is 0"]),
        (Request("bad", [1], targets=((1,), ())), "bad_request", ["target 1 has no tokens"]),
        (Request("bad", [1], targets=((1,), (2, 77))), "bad_token", ["target 1", "token 77"]),
        (Request("bad", [1] * 60, targets=((1,) * 5,)), "prompt_too_long", ["60 tokens", "has 5", "64"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_request_fails_alone(rig: Any, request_: Request, kind: str, words: list[str]) -> None:
    good = [Request(name, [1, 2, 3], SamplingParams(max_tokens=4)) for name in ("before", "after")]
    done = rig.run(rig.engine(pages=12, max_batch_rows=4), [good[0], request_, good[1]])
    error = done["bad", 0].error
    assert error.kind == kind
    assert not [word for word in words if word not in error.message], error.message
    assert done["bad", 0].finish_reason == "error"
    for name in ("before", "after"):
        assert list(done[name, 0].token_ids) == rig.answer([1, 2, 3], 4)[0]


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.uint16)])
def test_prompts_may_be_any_sequence_of_integers(rig: Any, kind: Any) -> None:
    done = rig.run(rig.engine(), [Request("a", kind([1, 2, 3]), SamplingParams(max_tokens=4))])
    assert list(done["a", 0].token_ids) == rig.answer([1, 2, 3], 4)[0]


def test_every_sample_of_a_bad_request_comes_back(rig: Any) -> None:
    assert sorted(rig.run(rig.engine(), [Request("a", [], n=3)])) == [("a", 0), ("a", 1), ("a", 2)]


@pytest.mark.parametrize("lag", [0, 1])
def test_logits_that_are_no_numbers_end_that_request_alone(rig: Any, lag: int) -> None:
    requests = [Request(i, [i + 1, i + 2, 9], SamplingParams(max_tokens=6)) for i in range(6)]
    bad = [
        Request("greedy", [4, rig.POISON, 5], SamplingParams(max_tokens=6, logprobs=2)),
        Request("drawn", [4, 5, rig.POISON], SamplingParams(max_tokens=6, temperature=1.0, top_p=0.9), n=2),
        Request("scored", [4, 5, 6], targets=((1, 2), (1, rig.POISON, 2))),
    ]
    done = rig.run(rig.engine(lag=lag), [*requests[:3], *bad, *requests[3:]])
    for request in requests:
        assert list(done[request.request_id, 0].token_ids) == rig.answer(request.token_ids, 6)[0]
    for key in (("greedy", 0), ("drawn", 0), ("drawn", 1), ("scored", 0)):
        assert done[key].finish_reason == "error"
        assert done[key].error.kind == "non_finite"


def test_a_request_that_fills_the_whole_pool_runs(rig: Any) -> None:
    engine = rig.engine(pages=12, max_batch_rows=4)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    done = rig.run(engine, [Request(i, [i + 1] * 33, params) for i in range(3)])
    assert [len(completion.token_ids) for completion in done.values()] == [16] * 3
    assert engine.stats.preemptions == 0


def test_an_answer_without_a_limit_of_its_own_ends_where_the_pool_does(rig: Any) -> None:
    engine = rig.engine(pages=5, page_size=4, max_positions=64)
    params = SamplingParams(max_tokens=10**9, ignore_eos=True)
    done = rig.run(engine, [Request(i, [i + 1] * 8, params) for i in range(2)])
    assert [(len(c.token_ids), c.finish_reason) for c in done.values()] == [(13, "length")] * 2


SHAPE = KVShape(max_positions=2048, bytes_per_token=100)


def test_limits_follow_from_model_and_memory() -> None:
    limits = Limits.resolve(EngineConfig(kv_bytes=100 * 16 * 50), SHAPE, on_gpu=False)
    assert (limits.max_length, limits.page_size, limits.num_pages, limits.lag) == (2048, 16, 50, 0)
    on_gpu = Limits.resolve(EngineConfig(), SHAPE, on_gpu=True, free_gpu_bytes=10**10)
    assert (on_gpu.page_size, on_gpu.lag) == (64, 2)


def test_no_more_pages_are_made_than_the_rows_can_fill() -> None:
    config = EngineConfig(kv_bytes=10**12, max_length=100, max_batch_rows=3)
    assert Limits.resolve(config, SHAPE, on_gpu=False).num_pages == 3 * 7 + 1


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (EngineConfig(max_length=4096), ["max_length 4096", "2048 positions"]),
        (EngineConfig(kv_bytes=1500), ["1,500 bytes", "16 tokens", "1,600 bytes"]),
        (EngineConfig(max_length=1), ["max_length 1"]),
    ],
)
def test_limits_that_allow_nothing_are_refused_with_the_numbers(config: EngineConfig, words: list[str]) -> None:
    with pytest.raises(EngineError) as caught:
        Limits.resolve(config, SHAPE, on_gpu=False)
    assert not [word for word in words if word not in str(caught.value)]
