"""When GPU memory is short. These tests take nearly all of it: nothing else may run on that GPU meanwhile."""

import gc
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen.bench import run as bench
from batchgen.engine import Engine, EngineConfig, Request, SamplingParams
from batchgen.errors import EngineError
from batchgen.models.load import load_model

pytestmark = pytest.mark.gpu

MIB = 2**20
Leave = Callable[[int], None]
MUCH_KV = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}
"""A small model whose KV cache can fill a GPU."""


@pytest.fixture(autouse=True)
def _tidy() -> Iterator[None]:
    """Engines hold memory until Python's collector has seen them; what is frozen it never sees."""
    yield
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def leave() -> Iterator[Leave]:
    """Takes the GPU's memory but for so many bytes, until the test is over."""
    taken = []

    def take(remaining: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        taken.append(torch.empty(torch.cuda.mem_get_info()[0] - remaining, dtype=torch.uint8, device="cuda"))

    yield take
    taken.clear()


def run(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    """The tokens of each request, in their order."""
    done = {completion.request_id: completion for completion in engine.generate(requests)}
    engine.check()
    assert all(completion.error is None for completion in done.values())
    return [done[request.request_id].token_ids for request in requests]


def make_requests(count: int, length: int) -> list[Request]:
    rng = random.Random(count)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    return [Request(i, [rng.randrange(256) for _ in range(length)], params) for i in range(count)]


@pytest.mark.parametrize("graphs", [True, False])
def test_a_step_without_memory_is_computed_in_parts(tiny_llama: Path, leave: Leave, graphs: bool) -> None:
    model = load_model(tiny_llama, device=torch.device("cuda"), dtype=torch.float32)
    kv_bytes = 70_000 * model.kv_bytes_per_token
    sizes: dict[str, Any] = {"max_batch_tokens": 65_536, "max_batch_rows": 64, "max_length": 1024}
    engine = Engine(model, EngineConfig(kv_bytes=kv_bytes, cuda_graphs=graphs, prefix_caching=False, **sizes))
    small, large = make_requests(64, 16), make_requests(64, 1000)
    expected_small, expected = run(engine, small), run(engine, large)
    assert engine.stats.split_steps == 0
    del engine
    engine = Engine(model, EngineConfig(kv_bytes=kv_bytes, cuda_graphs=graphs, prefix_caching=False, **sizes))
    run(engine, small)  # what stays in memory is there now: cuBLAS's workspace, decode graphs
    leave(60 * MIB)
    assert run(engine, large) == expected
    assert engine.stats.split_steps > 0
    assert run(engine, small) == expected_small


def test_a_model_without_room_for_its_steps_says_so_with_numbers(tiny_llama: Path, leave: Leave) -> None:
    leave(1500 * MIB)
    with pytest.raises(EngineError, match=r"1,048,576 tokens .* lower max_batch_tokens.*: 1\.\d GiB of"):
        Engine.load(tiny_llama, EngineConfig(device="cuda", max_batch_tokens=2**20, max_length=2048))


def test_the_kv_cache_takes_what_the_largest_steps_leave(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MUCH_KV))
    model = load_model(tmp_path, device=torch.device("cuda"), dtype=torch.float32, dummy=True)
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    engine = Engine(model, EngineConfig(max_batch_rows=2048))
    size = engine.limits.num_pages * engine.limits.page_size * model.kv_bytes_per_token
    assert 0.85 * free < size < free
    run(engine, make_requests(2048, 50))
    assert engine.stats.split_steps == 0


def test_a_bench_gives_its_memory_back_before_a_peer_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MUCH_KV | {"vocab_size": 100_000}))
    left = []
    monkeypatch.setattr(bench, "check_importable", lambda *_: None)
    monkeypatch.setattr(bench, "peer_messages", lambda *_, **__: left.append(torch.cuda.memory_reserved()) or [])
    model = str(tmp_path / "config.json")
    torch.cuda.reset_peak_memory_stats()
    list(bench.run_bench(bench.make_bench(("chat",), (), model=model, scale=0.001, peer="vllm")))
    assert torch.cuda.max_memory_reserved() > 32 * 1024 * MIB
    assert max(left) < 2 * 1024 * MIB  # captured steps and the workspaces of libraries may keep some
