"""The extraction example with the quickstart's real model."""

from pathlib import Path

import pyarrow.parquet as pq
from click.testing import CliRunner

from batchgen.cli import commands

JOB = Path(__file__).resolve().parents[2] / "jobs" / "extract-orders.yaml"


def test_orders_are_read_from_messages_of_people(smollm2: Path, tmp_path: Path) -> None:
    settings = {"model": smollm2, "output.path": tmp_path, "input.limit": 4, "engine.kv_memory": "100MiB"}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    done = CliRunner().invoke(commands, ["run", str(JOB), *words])
    assert done.exit_code == 0, done.stderr
    rows = pq.read_table(tmp_path / "part-00000-of-00001.parquet").to_pylist()
    assert [row["status"] for row in rows] == ["ok"] * 4
    # "We need 12 boxes of printer paper, delivery to Cork as usual."
    assert rows[1]["parsed"]["quantity"] == 12
    assert rows[1]["parsed"]["city"] == "Cork"
    assert "paper" in rows[1]["parsed"]["item"]
