"""Steps padded to the sizes of graphs give what they give without; here they are run, on the CPU, and not captured."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine import Completion, Engine, EngineConfig, Request, SamplingParams
from batchgen.engine.cuda_graphs import StepGraphs, Steps, batch_sizes
from batchgen.engine.decode_work import DecodePlanner
from batchgen.engine.device import _largest_decode, _largest_prefill
from batchgen.engine.model_runner import ModelRunner
from batchgen.engine.sampler import Sampled
from batchgen.engine.transfer import Array, pack, unpack
from batchgen.models.decoder import Model
from batchgen.models.load import load_model

CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 40,
    "eos_token_id": 2,
}


class RunningGraphs(StepGraphs):
    """Runs the padded step, and what a capture runs to warm up, instead of replaying a graph."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replays: Counter[str] = Counter()

    def _replay(self, shape: Any, arrays: Sequence[Array]) -> Tensor | Sampled:
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        self.replays[shape.name] += 1
        return self._run(shape, unpack(pack(arrays), arrays))

    def _capture(self, shape: Any) -> Any:
        padding = self._padding(shape)
        self._run(shape, unpack(pack(padding), padding))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32, dummy=True)


def make_engine(model: Model, *, graphs: bool, **options: Any) -> Engine:
    kv_bytes = 60 * 16 * model.kv_bytes_per_token
    engine = Engine(
        model, EngineConfig(max_batch_rows=13, page_size=16, kv_bytes=kv_bytes, poison_freed_pages=True, **options)
    )
    if graphs:
        runner = engine._runner
        steps = Steps(runner._decode, runner._decode_and_draw, runner._prefill)
        planner = DecodePlanner(model.config, engine.limits.page_size, 4, share=True)
        runner._graphs = RunningGraphs(steps, planner, engine.limits, model.device, prefill=True)
    return engine


def run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[Any, int], Completion]:
    done = {(completion.request_id, completion.sample): completion for completion in engine.generate(requests)}
    engine.check()
    return done


@pytest.mark.parametrize("options", [{}, {"lag": 1}, {"lag": 2, "max_batch_tokens": 256}], ids=str)
def test_padding_changes_nothing(model: Model, options: dict[str, Any]) -> None:
    rng = random.Random(0)
    requests = [
        Request(
            i,
            [rng.randrange(3, 97) for _ in range(rng.randrange(1, 90))],
            SamplingParams(max_tokens=1 + i, temperature=i % 3 / 2, seed=i, top_k=5 * (i % 7 == 0)),
            n=1 + i % 2,
        )
        for i in range(20)
    ]
    requests.append(Request("scored", [5, 6, 7, 8], targets=((5, 6, 7), (8,))))
    engine = make_engine(model, graphs=True, **options)
    done, expected = run(engine, requests), run(make_engine(model, graphs=False), requests)
    for key, completion in expected.items():
        assert done[key].token_ids == completion.token_ids
        assert done[key].error is None
    graphs = engine._runner._graphs
    assert isinstance(graphs, RunningGraphs)
    assert set(graphs.replays) == {"prefill", "decode", "draw"}


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_largest_steps_run_with_the_work_of_a_gpu(
    model: Model, batch_invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the KV cache is sized: launch by launch, here on the CPU, which has no use for the work."""
    limits = make_engine(model, graphs=False).limits
    runner = ModelRunner(model, limits, 97, batch_invariant=batch_invariant)
    runner._planner = DecodePlanner(model.config, limits.page_size, 4, share=False)
    plan = runner._planner.plan
    planned = []
    monkeypatch.setattr(runner._planner, "plan", lambda *args: planned.append(args) or plan(*args))
    for batch in (_largest_prefill(limits), _largest_decode(limits)):
        runner.launch(batch)
    assert [batch.token_ids for batch, _ in planned] == [None]  # the decode step's, all rows at once
    assert len(planned[0][1]) == limits.max_rows


def test_batch_invariant_steps_take_the_kernels_of_tries_with_a_trie_and_without(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, graphs=False)
    monkeypatch.setattr(engine._runner, "_always_trees", True)
    has_tree, forward = list[bool](), Model.forward

    def watched(self: Model, *args: Any) -> Any:
        has_tree.append(args[4].tree is not None)
        return forward(self, *args)

    monkeypatch.setattr(Model, "forward", watched)
    plain = [Request(i, [5 + i] * (3 + i), SamplingParams(max_tokens=3, ignore_eos=True)) for i in range(6)]
    list(engine.generate([*plain, Request("choices", [7, 8, 9], targets=((5, 6), (5, 7)))]))
    list(engine.generate(plain))
    assert has_tree.count(True) == engine.stats.prefill_steps
    assert has_tree.count(False) == engine.stats.decode_steps > 0


@pytest.mark.parametrize("max_rows", [1, 8, 16, 100, 512, 1000, 1024])
def test_every_batch_has_a_size(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == max_rows
