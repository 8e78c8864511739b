"""Answers that follow a grammar: the same whatever the schedule, whether their tokens are drawn or had to come."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine import Request, SamplingParams
from tests.engine.conftest import SCHEDULES, Automaton, Walk


def answer(rig: Any, automaton: Automaton, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], str]:
    """The greedy answer, one token after another, and why it ends."""
    tokens: list[int] = []
    walk = automaton.matcher()
    while len(tokens) < max_tokens:
        logits = rig.logits([*prompt, *tokens])
        token = max(sorted(walk.allowed()), key=lambda token: float(logits[token]))
        if token == rig.EOS:
            return tokens, "eos"
        tokens.append(token)
        assert walk.accept([token])
        if walk.is_complete:
            return tokens, "stop"
    return tokens, "length"


@st.composite
def automata(draw: st.DrawFn) -> Automaton:
    """Long forced runs, choices, loops, and places where the answer may end."""
    num_states = draw(st.integers(1, 12))
    tokens = st.integers(1, 48)
    edges = {}
    for state in range(num_states):
        size = draw(st.sampled_from([1, 1, 1, 2, 5]))
        targets = st.one_of(st.just(state + 1), st.integers(0, num_states))
        edges[state] = draw(st.dictionaries(tokens, targets, min_size=size, max_size=size))
    return Automaton(edges, draw(st.lists(st.integers(1, num_states), max_size=3)))


@st.composite
def requests(draw: st.DrawFn) -> list[Request]:
    grammars = draw(st.lists(automata(), min_size=1, max_size=3))
    result = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.sampled_from([[], [5, 6, 7], [5, 6, 7, 8, 9, 1, 2, 3, 4]]))
        prompt = prompt + draw(st.lists(st.integers(1, 48), min_size=1, max_size=5))
        params = SamplingParams(
            max_tokens=draw(st.sampled_from([1, 2, 3, 5, 9, 17])), logprobs=draw(st.sampled_from([None, None, None, 0]))
        )
        constraint = draw(st.sampled_from([*grammars, *grammars, None]))
        result.append(Request(number, prompt, params, n=draw(st.sampled_from([1, 1, 3])), constraint=constraint))
    return result


@settings(max_examples=150)
@given(
    requests=requests(),
    schedule=SCHEDULES,
    spare_pages=st.integers(0, 25),
)
def test_answers_do_not_depend_on_the_schedule(
    rig: Any, requests: list[Request], schedule: dict[str, Any], spare_pages: int
) -> None:
    longest = max(len(r.token_ids) + r.params.max_tokens for r in requests)
    engine = rig.engine(
        pages=-(-longest // schedule["page_size"]) + spare_pages,
        **schedule,
    )
    done = rig.run(engine, requests)
    assert set(done) == {(r.request_id, sample) for r in requests for sample in range(r.n)}
    for (number, _), completion in done.items():
        request: Any = requests[number]
        if request.constraint is None:
            expected = rig.answer(request.token_ids, request.params.max_tokens)
        else:
            expected = answer(rig, request.constraint, request.token_ids, request.params.max_tokens)
        assert (list(completion.token_ids), completion.finish_reason) == expected
        if completion.logprobs is not None:
            assert [entry.token_id for entry in completion.logprobs] == expected[0]


def form(*parts: Sequence[int]) -> Automaton:
    """Forced runs, each but the last followed by a choice among three tokens."""
    edges: dict[int, dict[int, int]] = {}
    state = 0
    for number, part in enumerate(parts):
        for token in part:
            edges[state] = {token: state + 1}
            state += 1
        if number < len(parts) - 1:
            edges[state] = dict.fromkeys((11, 12, 13), state + 1)
            state += 1
    return Automaton(edges, [])


@pytest.mark.parametrize(("lag", "decode_steps"), [(0, 0), (2, 2)])
def test_forced_tokens_take_no_decode_step(rig: Any, lag: int, decode_steps: int) -> None:
    """With a lag, a decode step is launched before the draws are seen that force the next tokens or end the answer."""
    grammar = form(range(20, 28), range(28, 36), range(36, 44))
    engine = rig.engine(lag=lag, refill_share=0)
    done = rig.run(engine, [Request(i, [i + 1, 2, 3], constraint=grammar) for i in range(5)])
    for completion in done.values():
        assert (len(completion.token_ids), completion.finish_reason) == (26, "stop")
    stats = engine.stats
    assert (stats.output_tokens, stats.forced_tokens) == (5 * 26, 5 * 24)
    # Each answer draws twice: behind its prompt and the first run, and behind the second. The last run ends it.
    assert stats.prefill_steps == 2
    assert stats.decode_steps == decode_steps
    assert stats.computed_tokens == 5 * (3 + 8) + 5 * (8 if decode_steps else 1 + 8)


def test_forced_tokens_before_an_end_that_is_drawn_count_once(rig: Any) -> None:
    engine = rig.engine(lag=0)
    grammar = Automaton({0: {5: 1, 6: 1}, 1: {20: 2}, 2: {21: 3}, 3: {rig.POISON: 4}}, [3])  # never drawn: it ends at 3
    done = rig.run(engine, [Request(i, [i + 1, 2], constraint=grammar) for i in range(4)])
    assert {found.finish_reason for found in done.values()} == {"eos"}
    assert engine.stats.forced_tokens == 4 * 2
    assert engine.stats.output_tokens == 4 * 3


def test_a_grammar_of_the_empty_text_ends_at_once(rig: Any) -> None:
    done = rig.run(rig.engine(), [Request(0, [1, 2], constraint=Automaton({}, [0]))])
    assert (done[0, 0].token_ids, done[0, 0].finish_reason) == ((), "eos")


def test_a_stopped_engine_has_nothing_left_to_fill(rig: Any) -> None:
    engine = rig.engine(lag=0, refill_share=0)
    requests = [Request(i, [i + 1, 2, 3], constraint=form([20, 21], range(22, 30), [31, 32])) for i in range(5)]
    answers = engine.generate([*requests, Request("free", [4], SamplingParams(max_tokens=30, ignore_eos=True))])
    next(answers)
    answers.close()
    engine.check()
    assert rig.run(engine, requests)[0, 0].finish_reason == "stop"


def test_a_single_forced_token_is_drawn(rig: Any) -> None:
    engine = rig.engine(lag=0)
    rig.run(engine, [Request(0, [1, 2, 3], constraint=form([20, 21], [22], [23], [24, 25]))])
    assert (engine.stats.prefill_steps, engine.stats.decode_steps) == (1, 4)
    assert engine.stats.forced_tokens == 2 + 2


def test_every_token_has_its_log_probability(rig: Any) -> None:
    grammar = form([20, 21, 22], [23, 24])
    engine = rig.engine(lag=1)
    done = rig.run(engine, [Request(0, [1, 2, 3], SamplingParams(logprobs=2), constraint=grammar)])
    completion = done[0, 0]
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    tokens = list(completion.token_ids)
    for index, entry in enumerate(completion.logprobs):
        raw = rig.logits([1, 2, 3, *tokens[:index]]).log_softmax(0)
        assert entry.logprob == pytest.approx(float(raw[tokens[index]]), abs=1e-5)  # as if there were no grammar
        assert entry.top[0][0] == int(raw.argmax())


@pytest.mark.parametrize(
    "params", [{"top_k": 2}, {"top_p": 0.6}, {"repetition_penalty": 1.4}, {"logit_bias": {13: 9.0}}]
)
def test_seeded_samples_are_the_same_in_company(rig: Any, params: dict[str, Any]) -> None:
    grammar = Automaton({0: {5: 1, 6: 1, 7: 2}, 1: {20: 3}, 3: {21: 4}, 4: {22: 0}, 2: {11: 0, 12: 5, 13: 0}}, [1])
    settings = SamplingParams(max_tokens=20, temperature=2.0, seed=3, **params)
    requests = [Request(i, [i + 1, 2, 3], settings, n=4, constraint=grammar if i % 3 else None) for i in range(9)]
    together = rig.run(rig.engine(lag=2, max_batch_rows=7, pages=40, output_reserve=0.0), requests)
    alone = {key: value for r in requests for key, value in rig.run(rig.engine(lag=0, max_batch_rows=1), [r]).items()}
    assert {key: found.token_ids for key, found in together.items()} == {k: f.token_ids for k, f in alone.items()}
    assert len({found.token_ids for (number, _), found in alone.items() if number == 1}) > 1
    for (number, _), found in together.items():
        assert number % 3 == 0 or grammar.matcher().accept(found.token_ids)


def test_masks_come_before_filters(rig: Any) -> None:
    """With top_k 1 the likeliest of the allowed tokens is drawn, which is not among the likeliest of all."""
    grammar = form([], [])
    params = SamplingParams(temperature=1.0, top_k=1, seed=1)
    for first in range(1, 30):
        done = rig.run(rig.engine(), [Request(0, [first], params, constraint=grammar)])
        logits = rig.logits([first])
        assert list(done[0, 0].token_ids) == [max((11, 12, 13), key=lambda token: float(logits[token]))]


@pytest.mark.parametrize("lag", [0, 1])
def test_a_step_without_memory_is_computed_in_halves(rig: Any, monkeypatch: pytest.MonkeyPatch, lag: int) -> None:
    grammar = form([20, 21, 22], [23, 24], [25, 26, 27])
    requests = [Request(i, [5, 6, i], n=1 + i % 3, constraint=grammar if i % 2 else None) for i in range(1, 9)]
    options = {"max_batch_rows": 6, "max_batch_tokens": 16, "lag": lag}
    expected = {key: found.token_ids for key, found in rig.run(rig.engine(**options), requests).items()}
    engine = rig.engine(**options)
    launch = engine._runner.launch

    def short_of_memory(batch: Any, masks: Any) -> Any:
        if len(batch.positions) > 3:
            if len(batch.constrained) > 2:  # late: earlier steps have been read
                masks()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(batch, masks)

    monkeypatch.setattr(engine._runner, "launch", short_of_memory)
    assert {key: found.token_ids for key, found in rig.run(engine, requests).items()} == expected
    assert engine.stats.split_steps > 0


def test_rows_without_a_grammar_keep_their_lag(rig: Any) -> None:
    """Steps are read while the next one runs: before its masks are made when it has some, else behind its launch."""
    engine = rig.engine(lag=2)
    free = [Request(i, [i + 1, 2], SamplingParams(max_tokens=9, ignore_eos=True)) for i in range(4)]
    rig.run(engine, free)
    assert engine.stats.masks == 0
    grammar = Automaton({0: dict.fromkeys(range(1, 40), 0)}, [])
    rig.run(engine, [*free, Request("c", [1], SamplingParams(max_tokens=9), constraint=grammar)])
    assert engine.stats.masks == sum(grammar.fills) == 9


class Broken(Walk):
    """A matcher that fails at its third token."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        if len(self.states) + len(token_ids) > 3:
            self.problem = "too complex"
            return False
        return super().accept(token_ids)


def test_a_grammar_that_fails_ends_its_row_alone(rig: Any) -> None:
    grammar = Automaton({0: dict.fromkeys(range(1, 40), 0)}, [])
    broken = Automaton(grammar.edges, [])
    broken.matcher = lambda: Broken(broken)  # type: ignore[method-assign]
    done = rig.run(
        rig.engine(), [Request("good", [1, 2], constraint=grammar), Request("bad", [1, 2], constraint=broken)]
    )
    error = done["bad", 0].error
    assert error.kind == "constraint"
    assert "too complex" in error.message
    assert done["good", 0].finish_reason == "length"


@pytest.mark.parametrize(
    "asked",
    [
        {"stop_check": lambda: len},
        {"params": SamplingParams(min_tokens=1)},
        {"params": SamplingParams(stop_token_ids=(3,))},
        {"params": SamplingParams(ignore_eos=True)},
    ],
)
def test_what_does_not_go_with_a_grammar_is_refused(rig: Any, asked: dict[str, Any]) -> None:
    done = rig.run(rig.engine(), [Request(0, [1], constraint=form([20], [21]), **asked)])
    assert done[0, 0].error.kind == "bad_request"
