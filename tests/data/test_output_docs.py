"""docs/output.md lists the columns, the statuses and the kinds of errors that there are."""

import re
from pathlib import Path
from typing import get_args

import pyarrow as pa

from batchgen.data.columns import Asked, output_columns
from batchgen.data.rows import Status

ROOT = Path(__file__).resolve().parents[2]


def first_cells(heading: str) -> list[str]:
    page = (ROOT / "docs" / "output.md").read_text()
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)


def test_columns_are_documented() -> None:
    columns = output_columns(
        pa.schema([]),
        Asked(True, True, True, pa.string(), labels=("a", "b"), label_logprobs=True, score=True, vote=True),
    )
    assert first_cells("Columns") == columns.schema.names


def test_statuses_are_documented() -> None:
    assert first_cells("Statuses") == list(get_args(Status))


def test_kinds_of_errors_are_documented() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "batchgen").rglob("*.py"))
    kinds = set(re.findall(r"\b(?:Row|Request)Error\(\s*\"(\w+)\"", sources))
    assert len(kinds) > 5
    assert kinds <= set(first_cells("Errors of a row"))
