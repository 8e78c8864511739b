"""Every example job runs end to end with a tiny model: a new example is tested the day it is added."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
JOBS = sorted((ROOT / "jobs").glob("*.yaml"))


def batchgen(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "batchgen", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stand-in for the table that the quickstart fetches."""
    path = tmp_path_factory.mktemp("reviews") / "sample.parquet"
    texts = ["A joy from start to end.", "I left after an hour.", "Fine acting, thin story."]
    pq.write_table(pa.table({"review_id": [1, 2, 3], "rating": [3.1, -2.5, -0.2], "text": texts}), path)
    return path


def overrides(job: Path, model: Path, reviews: Path, output: Path) -> list[str]:
    """A tiny model, short answers, the test's output folder, and a stand-in for the table that is fetched."""
    # An answer that follows a schema is whole whatever the model, once it has room.
    max_tokens = 200 if "json_schema" in job.read_text() else 4
    fields = {"model": model, "output.path": output, "generate.max_tokens": max_tokens}
    if ".quickstart/sample" in job.read_text():
        fields["input.path"] = reviews
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.stem)
def test_job_runs(job: Path, tiny_llama: Path, reviews: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = overrides(job, tiny_llama, reviews, output)
    done = batchgen("run", job, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr

    spec = yaml.safe_load(job.read_text())
    samples = spec.get("generate", {}).get("n", 1)
    rows = rows_of(output)
    manifest = json.loads((output / "manifest.json").read_text())
    assert [(row["row"], row["sample"]) for row in rows] == [
        (row, sample) for row in range(len(rows) // samples) for sample in range(samples)
    ]
    assert len(rows) >= 3 * samples
    assert {row["status"] for row in rows} <= {"ok", "length"}
    assert all(row["output"] is not None and row["prompt_tokens"] > 0 for row in rows)
    assert all(row[column] is not None for row in rows for column in spec["output"].get("columns", []))
    assert manifest
    if "json_schema" in spec.get("generate", {}):
        assert all(row["status"] == "ok" and row["parsed"] == json.loads(row["output"]) for row in rows)
    if "choices" in spec.get("generate", {}):
        assert {row["label"] for row in rows} <= set(spec["generate"]["choices"])


def test_finished_job_says_so_and_does_nothing(tiny_llama: Path, reviews: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = overrides(ROOT / "jobs" / "quickstart.yaml", tiny_llama, reviews, output)
    job = ROOT / "jobs" / "quickstart.yaml"
    assert batchgen("run", job, *arguments, cwd=tmp_path).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in output.rglob("part-*")}

    again = batchgen("run", job, *arguments, cwd=tmp_path)
    assert again.returncode == 0
    assert "finished" in (again.stdout + again.stderr).lower()
    assert before == {path: path.stat().st_mtime_ns for path in output.rglob("part-*")}


def test_killed_four_times_the_job_ends_with_the_same_rows(tiny_llama: Path, tmp_path: Path) -> None:
    """kill -9 as soon as one more part is there, and run it again: nothing is lost, doubled or moved."""
    table = tmp_path / "sample.parquet"
    texts = [f"Film {number} is {'good' if number % 3 else 'bad'}." for number in range(240)]
    pq.write_table(pa.table({"review_id": range(240), "rating": [1.0] * 240, "text": texts}), table)
    job = ROOT / "jobs" / "quickstart.yaml"
    settings = ["--set", "output.part_rows=8", "--set", "engine.max_batch_rows=4", "--set", "engine.dtype=float32"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert batchgen("run", job, *overrides(job, tiny_llama, table, whole), *settings, cwd=tmp_path).returncode == 0

    command = [sys.executable, "-P", "-m", "batchgen", "run", str(job)]
    command += [*overrides(job, tiny_llama, table, killed), *settings]
    finished = [0]
    for _ in range(4):
        process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        while process.poll() is None and num_parts(killed) == finished[-1]:
            time.sleep(0.005)
        process.kill()
        assert process.wait() == -9, "the job was over before it could be killed"
        finished.append(num_parts(killed))
    assert finished == sorted(set(finished))

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected, found = rows_of(whole), rows_of(killed)
    assert [row["row"] for row in found] == list(range(240))
    for before, after in zip(expected, found, strict=True):
        for name in ("label_probs", "margin"):
            assert after.pop(name) == pytest.approx(before.pop(name), abs=1e-5)
        assert after | {"cached_tokens": 0} == before | {"cached_tokens": 0}
    assert sorted(path.name for path in killed.iterdir()) == sorted(path.name for path in whole.iterdir())


def num_parts(output: Path) -> int:
    return len(list(output.glob("part-*.parquet")))


def rows_of(output: Path) -> list[dict[str, Any]]:
    return [row for part in sorted(output.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]


def test_every_job_is_in_the_readme() -> None:
    readme = (ROOT / "jobs" / "README.md").read_text()
    assert [job.name for job in JOBS if f"({job.name})" not in readme] == []
    assert len(JOBS) >= 6
