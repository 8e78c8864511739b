"""Every example job runs end to end with a tiny model: a new example is tested the day it is added."""

import json
import subprocess
import sys
from pathlib import Path

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
    fields = {"model": model, "output.path": output, "generate.max_tokens": 4}
    if job.name == "quickstart.yaml":
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
    rows = pa.concat_tables([pq.read_table(part) for part in sorted(output.glob("part-*.parquet"))]).to_pylist()
    manifest = json.loads((output / "manifest.json").read_text())
    assert [(row["row"], row["sample"]) for row in rows] == [
        (row, sample) for row in range(len(rows) // samples) for sample in range(samples)
    ]
    assert len(rows) >= 3 * samples
    assert {row["status"] for row in rows} <= {"ok", "length"}
    assert all(row["output"] is not None and row["prompt_tokens"] > 0 for row in rows)
    assert all(row[column] is not None for row in rows for column in spec["output"].get("columns", []))
    assert manifest
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


def test_every_job_is_in_the_readme() -> None:
    readme = (ROOT / "jobs" / "README.md").read_text()
    assert [job.name for job in JOBS if f"({job.name})" not in readme] == []
    assert len(JOBS) >= 6
