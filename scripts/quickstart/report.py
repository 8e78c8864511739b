"""Shows what the quickstart job made: agreement with the people's ratings, the first rows, and what to try next."""

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

LABELS = Path(__file__).resolve().parents[2] / ".quickstart" / "labels"

NEXT = """\
What to try next
  .venv/bin/batchgen preview jobs/quickstart.yaml      the prompt as the model sees it, and its answer
  .venv/bin/batchgen run jobs/quickstart.yaml --set input.path=../.quickstart/reviews.parquet \\
      --set output.path=../.quickstart/all-labels      all 10,605 reviews
  cp jobs/label-tickets.yaml my-job.yaml               a job of your own; jobs/README.md shows more
"""


def main() -> None:
    """Print the report, or stop when the job has left nothing to report on."""
    parts = sorted(LABELS.glob("part-*.parquet"))
    if not parts:
        sys.exit(f"no parts in {LABELS}: batchgen run jobs/quickstart.yaml makes them")
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    print(agreement(rows))
    print(first_rows(rows))
    print(NEXT, end="")


def agreement(rows: list[dict[str, Any]]) -> str:
    """How often the label is what people said: a mean rating above zero is positive."""
    labelled = [(is_positive(row), row["rating"] > 0) for row in rows if row["status"] == "ok"]
    if not labelled:
        return "\nNo row was labelled; the status of each is below.\n"
    same = sum(model == people for model, people in labelled)
    left_out = len(rows) - len(labelled)
    model, people = (sum(column) / len(labelled) for column in zip(*labelled, strict=True))
    return (
        f"\nThe labels agree with the ratings on {same} of {len(labelled)} reviews, {same / len(labelled):.1%}.\n"
        f"The model calls {model:.0%} of them positive, people {people:.0%}.\n"
        + (f"{left_out} row{'s' * (left_out > 1)} could not be labelled.\n" if left_out else "")
    )


def is_positive(row: dict[str, Any]) -> bool:
    """The model's label."""
    return bool(row["label"].strip() == "positive")


def first_rows(rows: list[dict[str, Any]], count: int = 8) -> str:
    """A small table of the first rows of the Parquet files: rating, label, the label's probability, text."""
    title = f"First rows of {LABELS.relative_to(LABELS.parents[1])}/part-*.parquet"
    return "\n".join([title, f"{'rating':>6}  {'label':8}  prob  text", *map(line, rows[:count])]) + "\n"


def line(row: dict[str, Any]) -> str:
    """One row of it. A row without a label shows its status."""
    label = row["label"]
    shown = f"{label.strip():8}  {row['label_probs'][label]:4.2f}" if label else f"{row['status']:8}      "
    text = row["text"] if len(row["text"]) <= 80 else row["text"][:79] + "…"
    return f"{row['rating']:6.2f}  {shown}  {text}"


if __name__ == "__main__":
    main()
