"""On a GPU the engine gives what it gives on a CPU, with graphs and without, and never waits for the device."""

import json
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import save_file

from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from batchgen.engine.decode_work import DecodePlanner
from batchgen.engine.shared_runs import ReadingCosts
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import Model
from tests.engine.conftest import Automaton

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": [2, 3],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"tie_word_embeddings": True},
    "Mistral": {"sliding_window": 9},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {},
}


class Pair(NamedTuple):
    cpu: Model
    gpu: Model


def make_pair(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Pair:
    """The same random weights on the CPU, in float32, and on the GPU."""
    values = SHAPE | FAMILIES[name] | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower()}
    (folder / "config.json").write_text(json.dumps(values))
    config = ModelConfig.from_folder(folder)
    cpu = Model(config, device=torch.device("cpu"), dtype=torch.float32)
    gpu = Model(config, device=torch.device("cuda"), dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for (part, a), b in zip(cpu.named_parameters(), gpu.parameters(), strict=True):
            a.uniform_(0.5, 1.5, generator=generator) if "norm" in part else a.normal_(0, 0.15, generator=generator)
            b.copy_(a)
    return Pair(cpu, gpu)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair("Llama", tmp_path_factory.mktemp("model"))


def make_prompts(count: int, seed: int = 1, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    prefixes = [[rng.randrange(4, 97) for _ in range(length)] for length in (0, 0, 8, 37, 70)]
    return [
        rng.choice(prefixes) + [rng.randrange(4, 97) for _ in range(rng.randrange(1, longest))] for _ in range(count)
    ]


PARAMS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 7, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"logprobs": 3},
    {"min_tokens": 4, "logit_bias": {5: 3.0, 9: -100.0}, "temperature": 0.5},
]
"""One for each way through the sampler."""


def make_requests(count: int, kinds: Sequence[dict[str, Any]] = PARAMS) -> list[Request]:
    return [
        Request(i, prompt, SamplingParams(**{"max_tokens": 3 + i % 20, "seed": i} | kinds[i % len(kinds)]))
        for i, prompt in enumerate(make_prompts(count))
    ]


def make_engine(model: Model, **options: Any) -> Engine:
    options = {"max_length": 512, "max_batch_rows": 24, "page_size": 16, "poison_freed_pages": True} | options
    pages = options.pop("pages", 400)
    return Engine(
        model, EngineConfig(kv_bytes=(pages + 1) * options["page_size"] * model.kv_bytes_per_token, **options)
    )


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    engine.check()
    assert engine._pool.num_free == engine.limits.num_pages - 1, "all pages are free, but that for padding"
    return [done[request.request_id] for request in requests]


def tokens(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    assert all(completion.error is None for completion in completions)
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lag": 0},
        {"lag": 1},
        {"cuda_graphs": False},
        {"cuda_graphs": False, "lag": 0},
        {"max_batch_tokens": 7, "page_size": 64},
        {"max_batch_rows": 5, "prefix_caching": False},
        {"max_batch_rows": 1},
        {"pages": 40, "output_reserve": 0.0, "refill_share": 0.0},
        {"max_length": 2048, "page_size": 128},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
def test_tokens_equal_the_cpus_in_float32(pair: Pair, options: dict[str, Any]) -> None:
    requests = make_requests(40)
    expected = tokens(run(make_engine(pair.cpu), requests))
    assert tokens(run(make_engine(pair.gpu, **options), requests)) == expected


def test_plain_rows_draw_in_the_graph_what_they_draw_outside(llama: Pair) -> None:
    requests = make_requests(60, PARAMS[:2])
    expected = tokens(run(make_engine(llama.cpu), requests))
    assert tokens(run(make_engine(llama.gpu), requests)) == expected
    assert tokens(run(make_engine(llama.gpu, max_batch_rows=1), requests[:10])) == expected[:10]


def test_contexts_beyond_one_split_of_attention(llama: Pair) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(4, 97) for _ in range(length)] for length in (1010, 1024, 2030, 2048, 2900, 30)]
    requests = [Request(i, p, SamplingParams(max_tokens=40, ignore_eos=True)) for i, p in enumerate(prompts)]
    expected = tokens(run(make_engine(llama.cpu, max_length=4096, pages=800), requests))
    assert tokens(run(make_engine(llama.gpu, max_length=4096, page_size=64), requests)) == expected


def test_logprobs_and_scores_equal_the_cpus(llama: Pair) -> None:
    requests = [Request(i, p, targets=((5,), (5, 6, 7), (8, 9))) for i, p in enumerate(make_prompts(5))]
    requests += [Request(9, make_prompts(1)[0], SamplingParams(max_tokens=5, logprobs=4, ignore_eos=True), n=3)]
    cpu, gpu = (list(make_engine(model).generate(requests)) for model in llama)
    for a, b in zip(*(sorted(done, key=lambda c: (c.request_id, c.sample)) for done in (cpu, gpu)), strict=True):
        for x, y in zip(a.target_logprobs or (), b.target_logprobs or (), strict=True):
            assert x == pytest.approx(y, abs=1e-4)
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert [i for i, _ in x.top] == [i for i, _ in y.top]
            assert [v for _, v in x.top] == pytest.approx([v for _, v in y.top], abs=1e-4)


def test_bfloat16_logits_are_close_to_float32(tmp_path: Path) -> None:
    pair = make_pair("Qwen3", tmp_path, torch.bfloat16)
    requests = [
        Request(i, p, SamplingParams(max_tokens=1, logprobs=97, ignore_eos=True))
        for i, p in enumerate(make_prompts(30))
    ]
    rows = []
    for model in pair:
        done = run(make_engine(model), requests)
        rows.append(torch.tensor([[v for _, v in sorted((c.logprobs or ())[0].top)] for c in done]))
    exact, close = rows
    assert torch.linalg.vector_norm(close - exact) <= 2e-2 * torch.linalg.vector_norm(exact)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Whoever waits for the device, other than by an event, gets an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("graphs", [True, False])
def test_the_loop_never_waits_for_the_device(llama: Pair, graphs: bool) -> None:
    engine = make_engine(llama.gpu, cuda_graphs=graphs, poison_freed_pages=False)
    requests = [*make_requests(40), Request("s", [5, 6], targets=((7, 8), (9,)))]
    expected = tokens(run(engine, requests)[:-1])
    with no_synchronisation():
        assert tokens(run(engine, requests)[:-1]) == expected


GRAMMAR = Automaton(
    {0: {10: 1}, 1: {11: 2}, 2: {12: 3}, 3: dict.fromkeys(range(20, 60), 4), 4: dict.fromkeys(range(5, 90), 5),
     5: {13: 6, 14: 0, 15: 3}, 6: {16: 7}, 7: {17: 8}, 8: dict.fromkeys(range(4, 97), 9)},
    [4, 5], eos=2,
)  # fmt: skip
"""Forced runs, choices among few and among many tokens, loops, and places to end at."""


def make_constrained(count: int) -> list[Request]:
    """Rows with the grammar, two of three, and rows without."""
    rows = enumerate(make_requests(count, [kind for kind in PARAMS if "min_tokens" not in kind]))
    return [replace(request, constraint=GRAMMAR) if number % 3 else request for number, request in rows]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("lag", [0, 2])
def test_grammars_are_followed_as_on_a_cpu(llama: Pair, graphs: bool, lag: int) -> None:
    requests = make_constrained(60)
    expected = tokens(run(make_engine(llama.cpu), requests))
    engine = make_engine(llama.gpu, cuda_graphs=graphs, lag=lag)
    assert tokens(run(engine, requests)) == expected
    assert engine.stats.forced_tokens > 100
    assert engine.stats.masks > 200


def test_grammars_wait_for_the_device_no_more_than_other_rows(llama: Pair) -> None:
    engine = make_engine(llama.gpu, poison_freed_pages=False)
    requests = make_constrained(40)
    expected = tokens(run(engine, requests))
    with no_synchronisation():
        assert tokens(run(engine, requests)) == expected


def test_a_row_whose_logits_are_no_numbers_ends_alone(tmp_path: Path) -> None:
    pair = make_pair("Qwen2", tmp_path)
    for model in pair:
        model.embed[96] = torch.nan
    requests = make_requests(40)
    bad = [96 in request.token_ids for request in requests]
    assert 5 < sum(bad) < 35
    expected, done = (run(make_engine(model), requests) for model in pair)
    for is_bad, ours, cpus in zip(bad, done, expected, strict=True):
        if is_bad:
            assert ours.error is not None
            assert ours.error.kind == "non_finite"
        assert ours.token_ids == cpus.token_ids
        assert ours.finish_reason == cpus.finish_reason


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_agrees_with_transformers_but_for_near_ties(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = make_pair(name, tmp_path, torch.bfloat16)
    tensors = {
        f"model.{part}".replace("model.lm_head", "lm_head"): t for part, t in pair.cpu.checkpoint_tensors().items()
    }
    save_file({part: tensor.contiguous() for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    requests = [Request(i, p, SamplingParams(max_tokens=16, ignore_eos=True)) for i, p in enumerate(make_prompts(100))]
    equal, gaps = 0, []
    for request, answer in zip(requests, tokens(run(make_engine(pair.gpu), requests)), strict=True):
        prompt = list(request.token_ids)
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        drawn = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        behind = logits.amax(1) - drawn  # our token's logit behind the largest one, after our own text so far
        gaps += behind[behind > 0].tolist()
        equal += not behind.any()
    spread = logits.std().item()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{name} in bfloat16: {equal} of 100 greedy answers are those of transformers in float32; {len(gaps)} of "
            f"1600 tokens differ, the largest gap is {max(gaps, default=0):.3f} (logits spread by {spread:.2f})\n"
        )
    assert max(gaps, default=0) < 0.15 * spread


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False}, {"page_size": 64, "max_batch_rows": 40}], ids=str)
def test_rows_that_share_pages_give_the_cpus_tokens(
    llama: Pair, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ReadingCosts, "saved", lambda self, rows, pages: 1e9 * (rows - 1) * pages)
    runs = list[bool]()
    plan = DecodePlanner.plan

    def watched(self: DecodePlanner, *args: Any) -> Any:
        work = plan(self, *args)
        runs.append(len(work.shared_items) > 0)
        return work

    monkeypatch.setattr(DecodePlanner, "plan", watched)
    rng = random.Random(5)
    heads = [[rng.randrange(4, 97) for _ in range(length)] for length in (64, 200, 330)]
    heads.append(heads[1] + heads[0])
    prompts = [heads[i % 4] + [rng.randrange(4, 97) for _ in range(1 + i % 7)] for i in range(60)]
    requests = [Request(i, p, SamplingParams(max_tokens=3 + i % 30, seed=i)) for i, p in enumerate(prompts)]
    expected = tokens(run(make_engine(llama.cpu), requests))
    assert tokens(run(make_engine(llama.gpu, **options), requests)) == expected
    assert any(runs)
