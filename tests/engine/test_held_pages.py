"""What a request shares with the next one stays in the KV cache, so that planned prompts compute each token once."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.engine import Engine, Request, SamplingParams
from batchgen.planning.plan import make_plan
from batchgen.planning.spool import Spool

few_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=12)


def planned(prompts: list[list[int]], page_size: int, max_tokens: int) -> tuple[list[Request], int]:
    """Requests in planned order, and the prompt tokens that they should compute."""
    with Spool() as spool:
        for prompt in prompts:
            spool.append(np.array(prompt, np.int32), b"")
        plan = make_plan(spool.tokens(), spool.outputs, spool.merge_keys, page_size)
    params = SamplingParams(max_tokens=max_tokens)
    shared = [*plan.shared.tolist(), 0][1:]
    requests = [
        Request(i, prompts[i], params, shared_with_next=with_next)
        for i, with_next in zip(plan.order.tolist(), shared, strict=True)
    ]
    return requests, plan.counts.computed_tokens


def computed(engine: Engine) -> int:
    return engine.stats.prompt_tokens - engine.stats.cached_tokens


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(few_tokens, min_size=1, max_size=20),
    page_size=st.integers(1, 4),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 20),
    lag=st.sampled_from([0, 1]),
    max_tokens=st.integers(1, 9),
)
def test_planned_tokens_are_computed_to_the_token(
    rig: Any, prompts: list[list[int]], page_size: int, rows: int, chunk: int, lag: int, max_tokens: int
) -> None:
    """In a pool with room for two sequences, however many share the prefix, and whatever preemption does."""
    requests, expected = planned(prompts, page_size, max_tokens)
    longest = max(map(len, prompts)) + max_tokens
    engine = rig.engine(
        pages=2 * -(-longest // page_size),
        page_size=page_size,
        max_batch_rows=rows,
        max_batch_tokens=chunk,
        lag=lag,
        max_positions=64,
    )
    done = rig.run(engine, requests)
    assert computed(engine) == expected
    for number, prompt in enumerate(prompts):
        assert list(done[number, 0].token_ids) == rig.answer(prompt, max_tokens)[0]


def test_a_held_prefix_outlives_all_that_would_evict_it(rig: Any) -> None:
    """Between two rows of a group the pool is written full by a long answer: an LRU would have lost the prefix."""
    prefix = list(range(1, 17))
    requests = [
        Request(0, [*prefix, 20], SamplingParams(max_tokens=1), shared_with_next=16),
        Request(1, [*prefix, 21], SamplingParams(max_tokens=30, ignore_eos=True), shared_with_next=16),
        Request(2, [*prefix, 22], SamplingParams(max_tokens=30, ignore_eos=True)),
    ]
    engine = rig.engine(pages=12, page_size=4, max_batch_rows=1)
    done = rig.run(engine, requests)
    assert [done[i, 0].cached_tokens for i in range(3)] == [0, 16, 16]


def test_a_hold_gives_way_when_the_next_request_needs_the_whole_pool(rig: Any) -> None:
    requests = [
        Request(0, list(range(1, 13)), SamplingParams(max_tokens=1), shared_with_next=12),
        Request(1, list(range(21, 41)), SamplingParams(max_tokens=5, ignore_eos=True)),
    ]
    engine = rig.engine(pages=6, page_size=4)
    done = rig.run(engine, requests)
    assert list(done[1, 0].token_ids) == rig.answer(range(21, 41), 5, eos=())[0]


def test_pages_of_a_finished_group_are_free(rig: Any) -> None:
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9, group] for group in (10, 11, 12)]
    requests, _ = planned(prompts, 2, 3)
    engine = rig.engine(pages=40, page_size=2)
    for request in requests:
        engine.add(request)
    while engine.busy:
        engine.step()
    assert engine._pool.num_used == 0


@pytest.mark.parametrize("caching", [True, False])
def test_aborting_lets_go_of_held_pages(rig: Any, caching: bool) -> None:
    engine = rig.engine(pages=20, page_size=2, prefix_caching=caching)
    engine.add(Request(0, [1, 2, 3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True), shared_with_next=4))
    engine.step()
    assert len(engine._scheduler.held_pages) == (2 if caching else 0)
    engine.check()
    engine.abort_all()
    engine.check()
    assert engine._pool.num_used == 0


def test_samples_that_do_not_fit_at_once_share_their_prompt(rig: Any) -> None:
    """Several waves of samples, one prompt: its full pages are computed once."""
    prompt = list(range(1, 17))
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    engine = rig.engine(pages=11, page_size=4, max_batch_rows=8)
    rig.run(engine, [Request(0, prompt, params, n=4)])
    leaders = engine.stats.cached_tokens // 12
    assert leaders >= 1
    assert engine.stats.computed_tokens == 16 + 4 * leaders


def test_neighbours_are_what_the_requests_say(rig: Any) -> None:
    requests, _ = planned([[1, 2, 3], [4, 5], [1, 2, 4], [4, 5]], 1, 1)
    for one, other in pairwise(requests):
        assert list(one.token_ids)[: one.shared_with_next] == list(other.token_ids)[: one.shared_with_next]
