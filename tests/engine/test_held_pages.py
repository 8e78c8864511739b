"""What a request shares with the next one stays in the KV cache, so that planned prompts compute each token once."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.engine import Engine, Request, SamplingParams
from batchgen.planning.plan import make_plan
from batchgen.planning.spool import Spool

few_tokens = st.lists(st.integers(1, 3), min_size=1, max_size=8)
many_tokens = st.builds(lambda length, rest: [1] * length + rest, st.integers(0, 20), few_tokens)


def planned(prompts: list[list[int]], page_size: int, max_tokens: int, n: int = 1) -> tuple[list[Request], int]:
    """Requests in planned order, and the prompt tokens that they should compute."""
    with Spool() as spool:
        for prompt in prompts:
            spool.append(np.array(prompt, np.int32), b"")
        plan = make_plan(spool.tokens(), spool.outputs, spool.merge_keys, page_size)
    params = SamplingParams(max_tokens=max_tokens)
    shared = [*plan.shared.tolist(), 0][1:]
    requests = [
        Request(i, prompts[i], params, n=n, shared_with_next=with_next)
        for i, with_next in zip(plan.order.tolist(), shared, strict=True)
    ]
    return requests, plan.counts.computed_tokens


def computed(engine: Engine) -> int:
    return engine.stats.prompt_tokens - engine.stats.cached_tokens


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    prompts=st.lists(many_tokens, min_size=1, max_size=20),
    page_size=st.sampled_from([1, 2, 4, 5, 8, 16]),
    rows=st.integers(1, 6),
    chunk=st.integers(1, 20),
    lag=st.sampled_from([0, 1, 2]),
    max_tokens=st.integers(1, 9),
    n=st.integers(1, 3),
)
def test_planned_tokens_are_computed_to_the_token(
    rig: Any, prompts: list[list[int]], page_size: int, rows: int, chunk: int, lag: int, max_tokens: int, n: int
) -> None:
    """In a pool with room for two requests, however many share the prefix, and whatever preemption does."""
    requests, expected = planned(prompts, page_size, max_tokens, n)
    longest = max(map(len, prompts)) + max_tokens
    engine = rig.engine(
        pages=2 * n * -(-longest // page_size),
        page_size=page_size,
        max_batch_rows=rows,
        max_batch_tokens=chunk,
        lag=lag,
        max_positions=64,
    )
    done = rig.run(engine, requests)
    assert computed(engine) == expected
    for number, prompt in enumerate(prompts):
        for sample in range(n):
            assert list(done[number, sample].token_ids) == rig.answer(prompt, max_tokens)[0]
    engine.abort_all()
    assert engine._pool.num_used == 0, "nothing is pinned for ever"


DOCUMENT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]
CASES = {
    "a group larger than the pool": [[*DOCUMENT, 20 + row, row, row] for row in range(20)],
    "one group for the whole job": [[*DOCUMENT, 20 + row] for row in range(12)],
    "no sharing at all": [[row, row + 1, row + 2, row + 3, row + 4] for row in range(1, 40, 3)],
    "prefixes of one another": [(DOCUMENT * 2)[:length] for length in range(1, 26)],
    "equal to the prefix of the group": [DOCUMENT, *([*DOCUMENT, 20 + row] for row in range(5)), DOCUMENT],
    "groups in groups": [[*DOCUMENT, 20 + row // 4, 20 + row // 2, 20 + row, 7] for row in range(16)],
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_planned_run_answers_as_an_unplanned_one(rig: Any, case: str, n: int) -> None:
    """With what is shared computed once, in a pool for three of the longest answers, and every page free at the end."""
    prompts = CASES[case]
    requests, expected = planned(prompts, 4, 6, n)
    plain = [Request(i, prompt, SamplingParams(max_tokens=6), n=n) for i, prompt in enumerate(prompts)]
    unplanned = rig.run(rig.engine(pages=400, page_size=4, prefix_caching=False), plain)
    engine = rig.engine(pages=27, page_size=4, max_batch_rows=8, max_batch_tokens=30)
    done = rig.run(engine, requests)
    assert computed(engine) == expected
    assert (expected == sum(map(len, prompts))) == (case == "no sharing at all")
    assert {key: answer.token_ids for key, answer in done.items()} == {
        key: answer.token_ids for key, answer in unplanned.items()
    }
    engine.abort_all()
    assert engine._pool.num_used == 0


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


@pytest.mark.parametrize(("in_order", "cached"), [(True, 0), (False, 16)])
def test_a_request_out_of_order_leaves_what_is_held(rig: Any, in_order: bool, cached: int) -> None:
    """Two answers that together would fill the pool wait for one another, where the prefix stays held."""
    prefix, long = list(range(1, 17)), SamplingParams(max_tokens=23, ignore_eos=True)
    requests = [
        Request("a", [*prefix, 20], SamplingParams(max_tokens=1), shared_with_next=16),
        *(Request(i, [30, i], long, in_order=in_order) for i in range(2)),
        Request("b", [*prefix, 22], SamplingParams(max_tokens=1)),
    ]
    engine = rig.engine(pages=12, page_size=4, max_batch_rows=2)
    assert rig.run(engine, requests)["b", 0].cached_tokens == cached


def test_a_part_of_a_page_is_copied_and_not_computed(rig: Any) -> None:
    """All in one step: each prompt copies what the one before it computes there, or copies there itself."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, *rest] for rest in ([9], [9, 9, 9, 9, 10], [9, 9, 9, 9, 11, 12])]
    requests, expected = planned(prompts, 16, 1)
    engine = rig.engine(pages=12, page_size=16)
    done = rig.run(engine, requests)
    assert engine.stats.prefill_steps == 1
    assert computed(engine) == expected == 13 + 1 + 2
    for number, prompt in enumerate(prompts):
        assert list(done[number, 0].token_ids) == rig.answer(prompt, 1)[0]


@pytest.mark.parametrize("most", [1, 2, 5, 9])
@pytest.mark.parametrize("case", CASES)
def test_copies_hold_when_a_step_is_computed_in_parts(
    rig: Any, monkeypatch: pytest.MonkeyPatch, case: str, most: int
) -> None:
    """Copies of both halves are made in each of them: some of tokens that are not there yet."""
    requests, expected = planned(CASES[case], 8, 4, 2)
    engine = rig.engine(pages=60, page_size=8, max_batch_rows=10, max_batch_tokens=64)
    launch = engine._runner.launch

    def short_of_memory(batch: Any, masks: Any) -> Any:
        if len(batch.positions) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch, masks)

    monkeypatch.setattr(engine._runner, "launch", short_of_memory)
    done = rig.run(engine, requests)
    assert engine.stats.split_steps > 0
    assert computed(engine) == expected
    for number, prompt in enumerate(CASES[case]):
        assert list(done[number, 1].token_ids) == rig.answer(prompt, 4)[0]


@pytest.mark.parametrize(("shared", "copied"), [(3, 0), (4, 4), (15, 15), (19, 16)])
def test_few_tokens_are_computed_again(rig: Any, shared: int, copied: int) -> None:
    prompts = [[*range(1, shared + 1), 30, 31], [*range(1, shared + 1), 40, 41]]
    requests = [
        Request(i, prompt, SamplingParams(max_tokens=1), shared_with_next=shared) for i, prompt in enumerate(prompts)
    ]
    done = rig.run(rig.engine(pages=12, page_size=16), requests)
    assert done[1, 0].cached_tokens == copied


def test_a_wrong_word_about_the_next_request_changes_no_answer(rig: Any) -> None:
    """Tokens are compared: what is said to be shared is a hint of what to keep. A bad request may come between, too."""
    prompts = [list(range(1, 12)), [], [*range(1, 7), 20, 21], [30, *range(2, 12)], list(range(30, 40))]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine = rig.engine(pages=20, page_size=8)
    done = rig.run(engine, [Request(i, prompt, params, shared_with_next=99) for i, prompt in enumerate(prompts)])
    assert done[1, 0].finish_reason == "error"
    assert [done[i, 0].cached_tokens for i in (0, 2, 3, 4)] == [0, 6, 0, 0]
    for i in (0, 2, 3, 4):
        assert list(done[i, 0].token_ids) == rig.answer(prompts[i], 3, eos=())[0]


def test_a_hold_gives_way_when_the_next_request_needs_the_whole_pool(rig: Any) -> None:
    requests = [
        Request(0, list(range(1, 13)), SamplingParams(max_tokens=1), shared_with_next=12),
        Request(1, list(range(21, 41)), SamplingParams(max_tokens=5, ignore_eos=True)),
    ]
    engine = rig.engine(pages=6, page_size=4)
    done = rig.run(engine, requests)
    assert list(done[1, 0].token_ids) == rig.answer(range(21, 41), 5, eos=())[0]


def test_a_hold_is_no_reason_to_wait_when_nothing_runs(rig: Any) -> None:
    """All of the pool is held for the second sample, and the share of it that should be free before a refill is not."""
    engine = rig.engine(pages=1, page_size=1, max_batch_rows=1, refill_share=0.6)
    done = rig.run(engine, [Request(0, [1], SamplingParams(max_tokens=1), n=2)])
    assert list(done[0, 1].token_ids) == rig.answer([1], 1)[0]


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
    assert (engine.stats.prompt_tokens, engine.stats.cached_tokens) == (16, 0)
    assert engine.stats.recomputed_tokens > 0
    assert engine.stats.recomputed_tokens % 4 == 0
    assert engine.stats.computed_tokens == 16 + engine.stats.recomputed_tokens


def test_neighbours_are_what_the_requests_say(rig: Any) -> None:
    requests, _ = planned([[1, 2, 3], [4, 5], [1, 2, 4], [4, 5]], 1, 1)
    for one, other in pairwise(requests):
        assert list(one.token_ids)[: one.shared_with_next] == list(other.token_ids)[: one.shared_with_next]
