"""The engine over a model that shows what its KV pages hold: the same answers whatever the schedule."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.engine import Engine, EngineConfig, Request, SamplingParams
from batchgen.errors import EngineError
from tests.engine.conftest import SCHEDULES

PREFIXES = st.sampled_from([[], [5, 6], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9, 1, 2, 3, 4, 10, 11], [12, 13, 14]])
PROMPTS = st.builds(lambda prefix, rest: prefix + rest, PREFIXES, st.lists(st.integers(1, 48), min_size=1, max_size=6))


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    result = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(PROMPTS)
        shared = draw(st.sampled_from([0, 0, 2, len(prompt)]))
        if draw(st.integers(0, 4)) == 0:
            target = st.lists(st.integers(0, 48), min_size=1, max_size=5).map(tuple)
            targets = tuple(draw(st.lists(target, min_size=1, max_size=4)))
            result.append(Request(number, prompt, targets=targets, shared_with_next=shared))
            continue
        params = SamplingParams(max_tokens=draw(st.integers(1, 14)), ignore_eos=draw(st.booleans()))
        samples = draw(st.sampled_from([1, 1, 1, 2, 4]))
        result.append(Request(number, prompt, params, n=samples, shared_with_next=shared))
    return result


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    requests=requests(),
    schedule=SCHEDULES,
    spare_pages=st.integers(0, 25),
)
def test_answers_do_not_depend_on_the_schedule(
    rig: Any, requests: list[Request], schedule: dict[str, Any], spare_pages: int
) -> None:
    longest = max(len(r.token_ids) + max([r.params.max_tokens, *map(len, r.targets)]) for r in requests)
    engine = rig.engine(
        pages=-(-longest // schedule["page_size"]) + spare_pages,
        **schedule,
        max_positions=256,
    )
    done = rig.run(engine, requests)
    expected = {(r.request_id, sample) for r in requests for sample in range(1 if r.targets else r.n)}
    assert set(done) == expected
    for request in requests:
        if request.targets:
            check_scores(rig, request, done[request.request_id, 0].target_logprobs)
            continue
        eos = () if request.params.ignore_eos else (rig.EOS,)
        answer = rig.answer(request.token_ids, request.params.max_tokens, eos)
        for sample in range(request.n):
            completion = done[request.request_id, sample]
            assert (list(completion.token_ids), completion.finish_reason) == answer
            assert completion.prompt_tokens == len(request.token_ids)


def check_scores(rig: Any, request: Request, scores: Any) -> None:
    for target, values in zip(request.targets, scores, strict=True):
        for index, (token, value) in enumerate(zip(target, values, strict=True)):
            logprobs = rig.logits([*request.token_ids, *target[:index]]).log_softmax(0)
            assert value == pytest.approx(float(logprobs[token]), abs=1e-5)


def test_a_pool_too_small_for_all_preempts_the_newest_and_changes_no_answer(rig: Any) -> None:
    prompts = [[i + 1, i + 2, i + 3] for i in range(6)]
    engine = rig.engine(pages=12, page_size=2, output_reserve=0.0, refill_share=0.0)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    done = rig.run(engine, [Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    assert engine.stats.preemptions > 0
    assert engine.stats.recomputed_tokens > 0
    for i, prompt in enumerate(prompts):
        assert list(done[i, 0].token_ids) == rig.answer(prompt, 12, ())[0]


def test_admission_by_whole_sequences_never_preempts(rig: Any) -> None:
    engine = rig.engine(pages=12, page_size=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    rig.run(engine, [Request(i, [i + 1, i + 2, i + 3], params) for i in range(6)])
    assert engine.stats.preemptions == 0


def test_a_prefix_in_the_same_step_is_computed_once(rig: Any) -> None:
    prefix = list(range(1, 21))
    engine = rig.engine(page_size=4)
    done = rig.run(engine, [Request(i, [*prefix, 30 + i], SamplingParams(max_tokens=2)) for i in range(8)])
    assert engine.stats.prefill_steps == 1
    assert engine.stats.computed_tokens == 21 + 7 * 1
    assert [done[i, 0].cached_tokens for i in range(8)] == [0] + [20] * 7


def test_samples_share_the_computed_prompt(rig: Any) -> None:
    engine = rig.engine(page_size=4)
    done = rig.run(engine, [Request("a", list(range(1, 11)), SamplingParams(max_tokens=5), n=4)])
    assert engine.stats.computed_tokens == 10
    assert len({completion.token_ids for completion in done.values()}) == 1


def test_more_samples_than_rows_come_in_waves_and_find_the_prompt_cached(rig: Any) -> None:
    engine = rig.engine(page_size=4, max_batch_rows=3, pages=20)
    done = rig.run(engine, [Request("a", list(range(1, 11)), SamplingParams(max_tokens=5, temperature=1.0), n=8)])
    assert sorted(done) == [("a", sample) for sample in range(8)]
    assert engine.stats.computed_tokens == 10 + 2 * 2


def test_targets_compute_the_prompt_once_and_decode_nothing(rig: Any) -> None:
    prompt = list(range(1, 11))
    engine = rig.engine(page_size=4)
    request = Request("a", prompt, targets=((4,), (4, 5), (4, 5, 6), (7, 8)))
    done = rig.run(engine, [request])
    check_scores(rig, request, done["a", 0].target_logprobs)
    assert done["a", 0].token_ids == ()
    assert engine.stats.decode_steps == 0
    assert engine.stats.prefill_steps == 1
    assert engine.stats.computed_tokens == len(prompt) + 2 + 1, "4 and 4, 5 once, and 7"


def test_one_token_targets_cost_nothing_beyond_the_prompt(rig: Any) -> None:
    engine = rig.engine(page_size=4)
    requests = [Request(i, [*range(1, 11), i], targets=tuple((t,) for t in range(5, 45))) for i in range(3)]
    done = rig.run(engine, requests)
    for request in requests:
        check_scores(rig, request, done[request.request_id, 0].target_logprobs)
    assert engine.stats.prefill_steps == 1
    assert engine.stats.computed_tokens == 11 + 2 * 3, "two full pages are shared"


def test_many_targets_on_few_rows_and_pages(rig: Any) -> None:
    targets = tuple((a, b, a) for a in range(1, 8) for b in range(1, 8))
    engine = rig.engine(page_size=4, max_batch_rows=3, pages=9)
    request = Request("a", list(range(1, 11)), targets=targets)
    check_scores(rig, request, rig.run(engine, [request])["a", 0].target_logprobs)
    assert engine.stats.prefill_steps > 1, "7 + 49 nodes are more than 9 pages hold"


def test_tokens_past_an_end_seen_late_are_cut_and_counted(rig: Any) -> None:
    prompt = next([a, b] for a in range(1, 40) for b in range(1, 40) if len(rig.answer([a, b], 9)[0]) in range(2, 6))
    answers = {}
    for lag in (0, 1):
        engine = rig.engine(lag=lag)
        answers[lag] = rig.run(engine, [Request(0, prompt, SamplingParams(max_tokens=9, logprobs=1))])[0, 0]
        assert engine.stats.discarded_tokens == lag
    assert answers[0] == answers[1]
    assert answers[0].finish_reason == "eos"
    assert answers[0].stop_token_id == rig.EOS
    assert len(answers[0].logprobs) == len(answers[0].token_ids)


def test_running_answers_wait_for_new_prompts_until_there_is_room_for_several(rig: Any) -> None:
    engine = rig.engine(max_batch_rows=8, refill_share=0.5)
    lengths = [3, 5, 7, 9, 20, 20, 20, 20, 4, 4, 4, 4]
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    rig.run(engine, [Request(i, [i + 1], p) for i, p in enumerate(params)])
    assert engine.stats.prefill_steps == 2


def test_short_answers_teach_the_engine_to_admit_more(rig: Any) -> None:
    """Each sequence could grow to 11 pages, of which the pool has 22; answers really end after two tokens."""
    engine = rig.engine(pages=22, page_size=4, max_batch_rows=16)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    for i in range(150):
        engine.add(Request(i, [1 + i % 40] * 4, params, stop_check=lambda: lambda t: 2 if len(t) == 2 else None))
    at_once, finished = [], 0
    while engine.busy:
        finished += len(engine.step())
        at_once.append((finished, engine.num_running))
    assert max(running for done, running in at_once if done < 64) == 2
    assert max(running for done, running in at_once if done > 64) > 8


def test_generate_pulls_no_more_than_it_may_and_returns_everything(rig: Any) -> None:
    engine = rig.engine(max_waiting=3, max_batch_rows=2)
    pulled = []

    def source() -> Any:
        for i in range(30):
            pulled.append(i)
            yield Request(i, [i + 1], SamplingParams(max_tokens=3))

    seen = []
    for completion in engine.generate(source()):
        seen.append(completion.request_id)
        assert len(pulled) - len(seen) <= 3 + 2 + 2
    assert sorted(seen) == list(range(30))


def test_the_first_step_waits_for_no_more_requests_than_fill_it(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pulled: list[int] = []
    at_step: list[int] = []

    def source() -> Iterator[Request]:
        for i in range(40):
            pulled.append(i)
            # Ten tokens, of which six are those of the request before.
            yield Request(i, [2, 3, 4, 5, 6, 7, 8, 9, 2 + i % 5, 2 + i % 7], shared_with_next=6)

    engine = rig.engine(max_batch_tokens=20, max_waiting=30)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (at_step.append(len(pulled)), step())[1])
    assert len(list(engine.generate(source()))) == 40
    assert at_step[0] == 5
    assert at_step[1] > 30


def test_generate_bounds_a_source_of_bad_requests(rig: Any) -> None:
    engine = rig.engine(max_waiting=3)
    pulled = []
    source = (Request(pulled.append(i) or i, []) for i in range(1000))
    first = next(engine.generate(source))
    assert first.finish_reason == "error"
    assert len(pulled) <= 4


def test_a_generator_closed_early_leaves_an_empty_engine(rig: Any) -> None:
    engine = rig.engine(lag=1)
    stream = engine.generate(Request(i, [i + 1], SamplingParams(max_tokens=30)) for i in range(9))
    next(stream)
    stream.close()
    assert engine.num_running == engine.num_waiting == 0
    engine.check()
    assert rig.run(engine, [Request("again", [3], SamplingParams(max_tokens=4))])["again", 0].token_ids == tuple(
        rig.answer([3], 4)[0]
    )


@pytest.mark.parametrize("targets", [(), ((5,), (6, 7))])
def test_answers_of_a_single_token_leave_nothing_behind(rig: Any, targets: tuple[tuple[int, ...], ...]) -> None:
    engine = rig.engine(max_batch_rows=4, refill_share=0.0)
    params = SamplingParams(max_tokens=1)
    done = list(engine.generate(Request(i, [1 + i % 40, 5], params, targets=targets) for i in range(200)))
    assert len(done) == 200
    assert engine.stats.decode_steps == 0
    assert not engine._scheduler._joining
    assert not engine._scheduler._left


def test_the_step_that_is_planned_is_a_decode_of_every_running_row(rig: Any) -> None:
    engine = rig.engine()
    rig.run(engine, [Request(i, [i + 1, i + 2], SamplingParams(max_tokens=4, ignore_eos=True)) for i in range(5)])
    decodes = [meta for meta in engine._runner._model.steps if meta.max_query_len == 1]
    assert [len(meta.kv_lens) for meta in decodes] == [5, 5, 5]
    assert all(meta.kv_lens.dtype == meta.block_table.dtype == torch.int32 for meta in decodes)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_without_memory_is_computed_in_halves(rig: Any, monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    requests = [Request(i, [5, 6, 7, i, *range(i)], SamplingParams(max_tokens=9), n=1 + i % 3) for i in range(1, 9)]
    requests.append(Request("scored", [5, 6, 7], targets=((8, 9, 10), (11,))))
    options = {"max_batch_rows": 6, "max_batch_tokens": 16, "page_size": 4, "lag": lag}
    expected = rig.run(rig.engine(**options), requests)
    engine = rig.engine(**options)
    launch, sizes = engine._runner.launch, []

    def short_of_memory(batch: Any, masks: Any) -> Any:
        sizes.append(len(batch.positions))
        if len(batch.positions) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch, masks)

    monkeypatch.setattr(engine._runner, "launch", short_of_memory)
    assert rig.run(engine, requests) == expected
    assert engine.stats.split_steps > 0
    assert sizes.count(16) == 1  # prefill steps are smaller from then on


def test_no_memory_for_a_single_token_is_an_error(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = rig.engine()

    def no_memory(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._runner, "launch", no_memory)
    with pytest.raises(EngineError, match="single token"):
        list(engine.generate([Request("a", [5, 6, 7])]))


def test_a_model_that_does_not_fit_on_the_gpu_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 GiB")

    monkeypatch.setattr("batchgen.engine.engine.load_model", no_memory)
    with pytest.raises(EngineError, match=r"some/model does not fit .* 16 GiB"):
        Engine.load("some/model", EngineConfig(device="cpu"))
