"""With batch_invariant, a row in bfloat16 has the same bits alone, in any company, and however its prompt is cut."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from batchgen.bench.workloads import GEOMETRIES
from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from batchgen.models.load import load_model

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "in company": {},
    "in another order, with little room": {"max_batch_rows": 7, "max_batch_tokens": 100, "shuffle": True},
    "step by step, without a cache": {"cuda_graphs": False, "lag": 0, "prefix_caching": False, "max_batch_tokens": 333},
    "among many": {"max_batch_rows": 700, "others": 900},
}


@pytest.fixture(scope="module", params=GEOMETRIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two layers of a real shape: with matrices of such sizes products are summed in several ways."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(GEOMETRIES[request.param] | {"num_hidden_layers": 2}))
    return load_model(folder, device=torch.device("cuda"), dtype=torch.bfloat16, dummy=True, max_length=1024)


def make_requests() -> list[Request]:
    rng = random.Random(0)
    heads = [[rng.randrange(1000, 90_000) for _ in range(length)] for length in (0, 70, 300, 640)]
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9, "top_k": 500}]
    requests = []
    for number in range(30):
        prompt = heads[number % 4] + [rng.randrange(1000, 90_000) for _ in range(rng.choice((1, 5, 64, 130)))]
        params = SamplingParams(max_tokens=4 + number, logprobs=2, ignore_eos=True, seed=number, **kinds[number % 3])
        requests.append(Request(number, prompt, params))
    requests += [Request(30 + i, requests[i].token_ids, targets=((5,), (6, 7, 8), (9, 10))) for i in range(8)]
    return requests


def run(
    model: Any, requests: Sequence[Request], *, others: int = 0, shuffle: bool = False, **options: Any
) -> dict[Any, Completion]:
    """Completions of the requests, in the company of others that are not looked at."""
    config = EngineConfig(**{"batch_invariant": True, "kv_bytes": 2**31, "max_batch_rows": 64, **options})
    rng = random.Random(1)
    company = [
        Request(f"other {i}", [rng.randrange(1000, 90_000)] * rng.randrange(1, 50), SamplingParams(max_tokens=20))
        for i in range(others)
    ]
    mixed = [*requests, *company]
    if others or shuffle:
        rng.shuffle(mixed)
    engine = Engine(model, config)
    done = {completion.request_id: completion for completion in engine.generate(mixed)}
    engine.check()
    assert engine.stats.preemptions == 0
    return {request.request_id: done[request.request_id] for request in requests}


@pytest.mark.parametrize("way", WAYS)
def test_a_row_has_the_same_bits_alone_and_in_company(model: Any, way: str) -> None:
    requests = make_requests()
    alone = run(model, requests, max_batch_rows=1, prefix_caching=False)
    company = run(model, requests, **WAYS[way])
    for number, completion in alone.items():
        assert completion.error is None
        assert company[number].token_ids == completion.token_ids
        assert company[number].logprobs == completion.logprobs
        assert company[number].target_logprobs == completion.target_logprobs
