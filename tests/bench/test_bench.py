"""The standard workloads, their roofline, and a bench of a tiny model."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from batchgen.bench.planned import planned
from batchgen.bench.result import table
from batchgen.bench.roofline import roofline
from batchgen.bench.run import make_bench, run_bench
from batchgen.bench.workloads import GEOMETRIES, WORKLOADS
from batchgen.errors import EngineError, JobFileError
from batchgen.models.config import from_config

FakeVllm = Callable[..., str]


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
    assert lines[0]["order"] == "planned"
    assert lines[0]["startup"].keys() == {"weights", "first steps", "KV cache", "first batch"}
    assert len(list(table(results))) == 3


def test_planned_order_has_every_row_once_the_longest_answers_first_and_says_what_is_shared() -> None:
    work = WORKLOADS["chat"](0.02)
    rows = planned(work)
    assert sorted(row.row for row in rows) == list(range(len(work)))
    assert all(np.array_equal(row.tokens, work[row.row][0]) and row.outputs == work[row.row][1] for row in rows)
    outputs = [row.outputs for row in rows if row.shared_with_next == 0]
    assert outputs[:-1] == sorted(outputs[:-1], reverse=True)
    shared = planned(WORKLOADS["grouped"](0.02))  # 2 groups of 40 rows
    assert sorted(row.shared_with_next for row in shared)[:2] == [0, 500]
    assert all(row.shared_with_next >= 2000 for row in shared if row.shared_with_next not in (0, 500))


def test_a_peer_runs_in_a_process_with_its_own_packages(tiny: str, fake_vllm: FakeVllm) -> None:
    bench = make_bench(
        ("label", "chat"), (), model=tiny, scale=0.001, peer="vllm", peer_path=fake_vllm(), peer_sorted=True
    )
    results = [result for result in run_bench(bench) if result.engine == "vllm"]
    assert [(r.workload, r.rows, r.order) for r in results] == [
        ("label x0.001", 4, "planned"),
        ("chat x0.001", 3, "planned"),
    ]
    assert {(r.hardware, r.precision, r.version) for r in results} == {("an abacus", "bfloat16", "0.0")}


def test_a_peer_that_ends_early_is_an_error(tiny: str, tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text("raise SystemExit(3)")
    bench = make_bench(("chat",), (), model=tiny, scale=0.001, peer="vllm", peer_path=str(tmp_path))
    with pytest.raises(EngineError, match="vllm ended early, with exit code 3"):
        list(run_bench(bench))


def test_a_peer_that_takes_too_long_is_ended_and_what_came_before_is_kept(
    tiny: str, tmp_path: Path, fake_vllm: FakeVllm
) -> None:
    out = tmp_path / "results.jsonl"
    peer = {"peer": "vllm", "peer_path": fake_vllm(600), "peer_limit": 1.0}
    bench = make_bench(("label", "chat"), (), model=tiny, scale=0.001, **peer)
    with pytest.raises(EngineError, match="took more than 1 s"):
        list(run_bench(bench, str(out)))
    assert [json.loads(line)["engine"] for line in out.read_text().splitlines()] == ["batchgen"] * 2


def test_mistakes_are_told(tiny: str) -> None:
    with pytest.raises(JobFileError, match="no field 'rows'"):
        make_bench((), ("rows=4",), model=tiny)
    with pytest.raises(JobFileError, match="no workload cat"):
        list(run_bench(make_bench(("cat",), (), model=tiny)))
    with pytest.raises(JobFileError, match="neither a geometry"):
        list(run_bench(make_bench(("chat",), (), model="llama-9b")))
    with pytest.raises(EngineError, match="can be imported"):
        list(run_bench(make_bench(("chat",), (), model=tiny, peer="vllm")))
