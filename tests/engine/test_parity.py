"""Greedy tokens in float32 equal transformers' on tiny random models, whatever chunks, pages, cache, batch and lag."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from batchgen.models.decoder import Model
from batchgen.models.load import load_model

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": [2, 3],
    "bos_token_id": 1,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 9, "head_dim": 16},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16},
}
MAX_TOKENS = 12


class Family(NamedTuple):
    model: Model
    prompts: list[list[int]]
    answers: list[list[int]]


def reference_answers(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Tokens of transformers.generate, one prompt at a time, the end of sequence included."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def make_family(name: str, folder: Path, device: str = "cpu") -> Family:
    cls = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    reference = cls(cls.config_class(**SHAPE, **FAMILIES[name])).float().eval()
    with torch.no_grad():
        for part, parameter in reference.named_parameters():
            parameter.uniform_(0.5, 1.5) if "norm" in part else parameter.normal_(0.0, 0.15)
    reference.save_pretrained(folder)
    rng = random.Random(1)
    prefixes = [[rng.randrange(4, 97) for _ in range(length)] for length in (0, 0, 8, 37, 70)]
    prompts = [
        rng.choice(prefixes) + [rng.randrange(4, 97) for _ in range(rng.choice((1, 3, 16, 17, 40)))] for _ in range(14)
    ]
    prompts += [prompts[5], prefixes[4], prefixes[4][:64]]
    model = load_model(folder, device=torch.device(device), dtype=torch.float32)
    return Family(model, prompts, reference_answers(reference, prompts, MAX_TOKENS))


@pytest.fixture(scope="module", params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def family(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return make_family(name, tmp_path_factory.mktemp("models") / name, request.param)


def make_engine(model: Model, *, pages: int | None = None, page_size: int = 16, **options: Any) -> Engine:
    if model.device.type == "cuda" and page_size < 16:  # a GPU's smallest page
        page_size, pages = 16, None if pages is None else pages * page_size // 16
    kv_bytes = None if pages is None else (pages + 1) * page_size * model.kv_bytes_per_token
    options = {"max_length": 160, "max_batch_rows": 16} | options
    config = EngineConfig(page_size=page_size, kv_bytes=kv_bytes, poison_freed_pages=True, **options)
    return Engine(model, config)


def with_end(completion: Completion) -> list[int]:
    assert completion.finish_reason in ("eos", "length"), completion.error
    end = [] if completion.stop_token_id is None else [completion.stop_token_id]
    return [*completion.token_ids, *end]


def run(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens)
    requests = (Request(i, prompt, params) for i, prompt in enumerate(prompts))
    done = {completion.request_id: with_end(completion) for completion in engine.generate(requests)}
    engine.check()
    return [done[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_tokens": 1, "page_size": 4},
        {"max_batch_tokens": 7, "page_size": 16, "lag": 1},
        {"max_batch_tokens": 64, "page_size": 64},
        {"max_batch_rows": 1},
        {"max_batch_rows": 5, "page_size": 4, "lag": 1, "max_batch_tokens": 100},
        {"prefix_caching": False, "page_size": 64, "lag": 1},
        {"page_size": 1, "max_batch_tokens": 64},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
def test_greedy_tokens_equal_transformers(family: Family, options: dict[str, Any]) -> None:
    assert run(make_engine(family.model, **options), family.prompts) == family.answers


@pytest.mark.parametrize("lag", [0, 1])
def test_preemption_changes_nothing(family: Family, lag: int) -> None:
    engine = make_engine(family.model, pages=36, page_size=4, output_reserve=0.0, refill_share=0.0, lag=lag)
    assert run(engine, family.prompts) == family.answers
    assert engine.stats.preemptions > 0


def test_a_second_run_finds_its_prompts_cached(family: Family) -> None:
    engine = make_engine(family.model, page_size=4)
    run(engine, family.prompts)
    before = engine.stats
    assert run(engine, family.prompts) == family.answers
    size = engine.limits.page_size
    found = sum((len(prompt) - 1) // size * size for prompt in family.prompts)
    assert engine.stats.cached_tokens - before.cached_tokens == found


def test_target_scores_equal_a_plain_forward_pass(family: Family) -> None:
    model, prompt = family.model, family.prompts[3]
    targets = ((5,), (5, 6, 7), (8, 9), (5, 6), tuple(range(10, 30)))
    engine = make_engine(model, page_size=4, max_batch_rows=3, max_batch_tokens=7)
    (scored,) = engine.generate([Request("a", prompt, targets=targets)])
    assert scored.target_logprobs is not None
    for target, values in zip(targets, scored.target_logprobs, strict=True):
        one_token = SamplingParams(max_tokens=1, logprobs=SHAPE["vocab_size"])
        for index, value in enumerate(values):
            (plain,) = make_engine(model).generate([Request("b", [*prompt, *target[:index]], one_token)])
            assert plain.logprobs is not None
            assert value == pytest.approx(dict(plain.logprobs[0].top)[target[index]], abs=1e-4)


@pytest.mark.parametrize("name", ["Llama", "Mistral"], indirect=True)
def test_C11_greedy_output_does_not_depend_on_the_rest_of_the_batch(family: Family) -> None:
    rng = random.Random(2)
    prefixes = [family.prompts[i] for i in (0, 3, 7, 11)]
    rows = [rng.choice(prefixes) + [rng.randrange(4, 97) for _ in range(rng.randrange(1, 9))] for _ in range(200)]
    whole = run(make_engine(family.model, max_batch_rows=64), rows, max_tokens=5)
    assert run(make_engine(family.model, max_batch_rows=7, page_size=4, lag=1), rows, max_tokens=5) == whole
    order = rng.sample(range(200), 200)
    shuffled = run(make_engine(family.model, max_batch_rows=64, prefix_caching=False), [rows[i] for i in order], 5)
    assert shuffled == [whole[i] for i in order]
    preempting = make_engine(family.model, pages=80, page_size=4, output_reserve=0.0, max_batch_tokens=50)
    assert run(preempting, rows, max_tokens=5) == whole
    assert run(make_engine(family.model, max_batch_rows=64), rows[100:], max_tokens=5) == whole[100:]
    assert run(make_engine(family.model, max_batch_rows=1), rows[:30], max_tokens=5) == whole[:30]


def test_C11_in_bfloat16_tokens_differ_only_where_two_are_nearly_as_likely(tmp_path: Path) -> None:
    family = make_family("Qwen2", tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16)
    rng = random.Random(3)
    rows = [family.prompts[rng.randrange(12)] + [rng.randrange(4, 97)] for _ in range(80)]
    params = SamplingParams(max_tokens=10, logprobs=2, ignore_eos=True)

    def answers(**options: Any) -> dict[Any, Completion]:
        requests = [Request(i, row, params) for i, row in enumerate(rows)]
        return {completion.request_id: completion for completion in make_engine(model, **options).generate(requests)}

    whole, again = answers(max_batch_rows=64), answers(max_batch_rows=64)
    assert {i: c.token_ids for i, c in again.items()} == {i: c.token_ids for i, c in whole.items()}
    other = answers(max_batch_rows=7, max_batch_tokens=50, page_size=4, lag=1)
    for i, completion in whole.items():
        for place, (ours, theirs) in enumerate(zip(completion.token_ids, other[i].token_ids, strict=True)):
            if ours != theirs:
                (_, best), (_, second) = (completion.logprobs or ())[place].top
                assert best - second < 0.1, (i, place)
                break


def test_a_model_loaded_for_short_texts_runs_no_longer_ones(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, max_length=40)
    engine = Engine(model, EngineConfig())
    assert engine.limits.max_length == 40
    (fits, over) = engine.generate([Request(0, [5] * 39, SamplingParams(ignore_eos=True)), Request(1, [5] * 40)])
    assert {fits.request_id: len(fits.token_ids), over.request_id: len(over.token_ids)} == {0: 1, 1: 0}
