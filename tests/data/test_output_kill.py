"""A run killed at any moment, and run again until it ends, leaves what an uninterrupted run leaves."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq

RUN = """
import random, sys
import pyarrow as pa
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow

model = SourceRecord(name="m", fingerprint="f")
manifest = Manifest(
    batchgen_version="0.1.0", spec={}, fingerprint={"seed": "1"}, inputs=(), model=model, tokenizer=model,
    num_rows=2000, n=1, part_rows=25,
)
with OutputFolder.open(sys.argv[1], manifest=manifest, carried=pa.schema([("id", pa.string())])) as folder:
    todo = [row for rows in folder.pending() for row in rows]
    print("start", len(todo), flush=True)
    for window in range(0, len(todo), 100):  # finished in any order, as an engine does
        rows = todo[window : window + 100]
        random.shuffle(rows)
        for row in rows:
            folder.add(OutputRow(row, 0, "ok", output=f"answer {row} " * 20, carried={"id": f"r{row}"}))
            print(row, flush=True)
    folder.finish()
"""


def run(folder: Path, *, kill_after: int | None = None) -> int:
    """Run the job, to its end or killed some time after so many rows; how many rows it said were still to do."""
    command = [sys.executable, "-c", RUN, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        word, todo = process.stdout.readline().split()
        assert word == "start"
        for count, _ in enumerate(process.stdout, 1):
            if count == kill_after:
                time.sleep(random.random() * 0.005)
                process.kill()
    assert process.returncode == (0 if kill_after is None else -signal.SIGKILL)
    return int(todo)


def rows_of(folder: Path) -> list[dict[str, object]]:
    return [row for part in sorted(folder.glob("part-*")) for row in pq.read_table(part).to_pylist()]


def test_D01_killed_ten_times_and_run_again_the_output_is_the_same(tmp_path: Path) -> None:
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run(whole)
    todo = []
    for kill_after in (1, 20, 50, 90, 110, 130, 150, 170, 180, 190):
        todo.append(run(folder, kill_after=kill_after))
        for part in folder.glob("part-*"):
            assert pq.read_metadata(part).num_rows == 25  # a part under its final name is whole at every moment
    todo.append(run(folder))
    assert todo == sorted(todo, reverse=True)
    assert len(set(todo)) > 2  # the kills came in the middle
    assert rows_of(folder) == rows_of(whole)
    assert [row["row"] for row in rows_of(folder)] == list(range(2000))
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in whole.iterdir())
