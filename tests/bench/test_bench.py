"""The standard workloads, their roofline, and a bench of a tiny model."""

import json
from pathlib import Path

import numpy as np
import pytest

from batchgen.bench.roofline import roofline
from batchgen.bench.run import make_bench, run_bench, table
from batchgen.bench.workloads import GEOMETRIES, WORKLOADS
from batchgen.errors import EngineError, JobFileError
from batchgen.models.config import from_config

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100_000,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.parametrize(("name", "rows"), [("label", 4096), ("grouped", 4000), ("documents", 4800), ("chat", 3000)])
def test_workloads_have_their_rows_and_are_the_same_each_time(name: str, rows: int) -> None:
    work, again = WORKLOADS[name](1), WORKLOADS[name](1)
    assert len(work) == rows
    assert all(np.array_equal(a, b) and m == n for (a, m), (b, n) in zip(work, again, strict=True))


def test_grouped_rows_share_what_they_say() -> None:
    work = WORKLOADS["grouped"](0.02)  # 2 groups, 80 rows
    heads = {tuple(tokens[:2000].tolist()) for tokens, _ in work}
    assert (len(work), len(heads)) == (80, 2)
    assert len({head[:500] for head in heads}) == 1


@pytest.mark.parametrize(
    ("model", "name", "rows_s"), [("llama-8b", "chat", 82), ("llama-8b", "even", 29.2), ("qwen-0.5b", "chat", 1047)]
)
def test_roofline_is_near_the_published_estimate(model: str, name: str, rows_s: float) -> None:
    # The estimate moves more bytes for norms and activations than fused ops have to, so the bound may lie above it.
    work = WORKLOADS[name](1)
    bound = roofline(work, from_config(GEOMETRIES[model], "config.json"))
    assert rows_s * 0.98 < len(work) / bound.total < rows_s * 1.35


def test_roofline_computes_a_shared_prefix_once() -> None:
    config = from_config(GEOMETRIES["llama-8b"], "config.json")
    shared = WORKLOADS["label"](0.05)
    rng = np.random.default_rng(0)
    apart = [(rng.integers(1000, 100_000, len(tokens), dtype=np.int32), out) for tokens, out in shared]
    assert roofline(shared, config).gemm * 8 < roofline(apart, config).gemm
    assert roofline(shared, config).kv < roofline(apart, config).kv


def test_a_bench_writes_one_line_per_workload(tiny: str, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    bench = make_bench(("label", "chat"), ("dtype=float32", "max_batch_rows=4"), model=tiny, scale=0.001)
    results = list(run_bench(bench, str(out)))
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["workload"] for line in lines] == ["label x0.001", "chat x0.001"]
    assert lines[0]["rows"] == 4
    assert lines[0]["precision"] == "float32"
    assert lines[0]["settings"]["max_batch_rows"] == 4
    assert lines[0]["cached_tokens"] == 3 * 2048  # the head is computed once for four rows
    assert len(table(results).splitlines()) == 3


def test_mistakes_are_told(tiny: str) -> None:
    with pytest.raises(JobFileError, match="no field 'rows'"):
        make_bench((), ("rows=4",), model=tiny)
    with pytest.raises(JobFileError, match="no workload cat"):
        list(run_bench(make_bench(("cat",), (), model=tiny)))
    with pytest.raises(JobFileError, match="neither a geometry"):
        list(run_bench(make_bench(("chat",), (), model="llama-9b")))
    with pytest.raises(EngineError, match="can be imported"):
        list(run_bench(make_bench(("chat",), (), model=tiny, peer="vllm")))
