"""Labels by choices beside labels by generated text: how good, and how fast, in one go on this machine.

    python scripts/bench_labels.py [--rows 500] [--device auto] [--dtype auto] [--rounds 1]

Both are whole jobs through `batchgen run`, with the model, the reviews and the prompt of jobs/quickstart.yaml: one with
`choices`, one that generates at most 16 tokens, one that stops at the line's end too. A generated text is read as its
first word. Right is what the people's mean rating says; a text that is neither label is wrong. The jobs take turns, and
the fastest of the rounds counts. rows/s are those of the engine at work, and those of the whole job in brackets.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parent.parent
DATA, MODEL = ROOT / ".quickstart" / "reviews.parquet", ROOT / ".quickstart" / "SmolLM2-135M-Instruct.Q4_1.gguf"
LABELS = ("positive", "negative")
SURE_RATING = 1.0  # as in the quickstart's sample: rated so clearly, either way
BINS = 10
WORK = ("calibrate", "prefill", "decode")
METHODS: dict[str, dict[str, object]] = {
    "choices": {"choices": list(LABELS)},
    "16 tokens of text": {"max_tokens": 16, "ignore_eos": True},
    "text to the line's end": {"max_tokens": 16, "stop": "\n"},
}


class Figures(NamedTuple):
    """What one method came to. `brier` and `ece` are None without probabilities; `read` is the share with a label."""

    right: float
    read: float
    auc: float
    brier: float | None
    ece: float | None
    engine_rows_s: float
    job_rows_s: float


def write_sample(path: Path, rows: int) -> int:
    """Reviews that were rated clearly, evenly over the file."""
    table = pq.read_table(DATA, columns=["review_id", "rating", "text"])
    clear = table.filter(pc.greater_equal(pc.abs(table["rating"]), SURE_RATING))
    picked = np.linspace(0, len(clear) - 1, min(rows, len(clear))).astype(np.int64)
    pq.write_table(clear.take(picked), path)
    return len(picked)


def run_job(folder: Path, method: str, turn: int, options: argparse.Namespace) -> Figures:
    """Run one job and look at its output."""
    job = yaml.safe_load((ROOT / "jobs" / "quickstart.yaml").read_text())
    out = folder / f"{turn}-{list(METHODS).index(method)}"
    job |= {
        "model": str(options.model),
        "input": {"path": str(folder / "sample.parquet")},
        "generate": METHODS[method],
        "output": {"path": str(out), "columns": ["rating"]},
        "engine": {"device": options.device, "dtype": options.dtype},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    command = [sys.executable, "-m", "batchgen", "run", str(path), "--quiet"]
    subprocess.run(command, check=True, cwd=folder)
    report = json.loads((out / "manifest.json").read_text())["report"]
    rows = [row for part in sorted(out.glob("part-*.parquet")) for row in pq.read_table(part).to_pylist()]
    working = sum(report["seconds_by_phase"][phase] for phase in WORK)
    return Figures(*quality(rows), len(rows) / working, report["rows_per_second"])


def quality(rows: Sequence[dict[str, object]]) -> tuple[float, float, float, float | None, float | None]:
    """Share right, share with a label, AUC, Brier score and expected calibration error."""
    truth = np.array([float(str(row["rating"])) > 0 for row in rows])
    if "label_probs" in rows[0]:
        positive = np.array([row["label_probs"]["positive"] for row in rows])  # type: ignore[index]
        says, read = positive >= 0.5, np.ones(len(rows), bool)
        brier, ece = float(((positive - truth) ** 2).mean()), calibration_error(positive, truth)
    else:
        words = [first_word(str(row["output"] or "")) for row in rows]
        says, read = np.array([word == "positive" for word in words]), np.array([word in LABELS for word in words])
        positive = np.where(read, says.astype(float), 0.5)
        brier = ece = None
    return float((read & (says == truth)).mean()), float(read.mean()), auc(positive, truth), brier, ece


def first_word(text: str) -> str:
    """The first word of a generated text, in lower case."""
    found = re.search(r"[^\W\d_]+", text)
    return "" if found is None else found[0].lower()


def auc(scores: np.ndarray, truth: np.ndarray) -> float:
    """How often a positive row has the higher score than a negative one; equal ones count half."""
    above, below = scores[truth][:, None], scores[~truth][None, :]
    return float(((above > below) + 0.5 * (above == below)).mean())


def calibration_error(positive: np.ndarray, truth: np.ndarray) -> float:
    """Expected calibration error of the label's probability, in BINS equal bins."""
    sure, right = np.maximum(positive, 1 - positive), (positive >= 0.5) == truth
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = [abs(sure[bins == b].mean() - right[bins == b].mean()) * (bins == b).mean() for b in set(bins.tolist())]
    return float(sum(gaps))


def main() -> None:
    """Run the jobs in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    options.model = options.model.resolve() if options.model.exists() else options.model
    if not DATA.exists():
        sys.exit(f"{DATA} is not there: make quickstart fetches it")
    best: dict[str, Figures] = {}
    with tempfile.TemporaryDirectory() as name:
        rows = write_sample(Path(name) / "sample.parquet", options.rows)
        for turn in range(options.rounds):
            for method in METHODS:
                found = run_job(Path(name), method, turn, options)
                if method not in best or found.engine_rows_s > best[method].engine_rows_s:
                    best[method] = found
    print(f"{rows} reviews, {options.model.name}, device {options.device}, dtype {options.dtype}\n")
    print("| | right | with a label | AUC | Brier | ECE | rows/s | times as fast |")
    print("|---|---|---|---|---|---|---|---|")
    slowest = min(figures.engine_rows_s for figures in best.values())
    for method, found in best.items():
        both = " | ".join("" if value is None else f"{value:.3f}" for value in (found.brier, found.ece))
        print(
            f"| {method} | {found.right:.1%} | {found.read:.1%} | {found.auc:.3f} | {both} | "
            f"{found.engine_rows_s:.1f} ({found.job_rows_s:.1f}) | {found.engine_rows_s / slowest:.2f} |"
        )


if __name__ == "__main__":
    main()
