"""What journal and parts cost: seconds of processor time for rows as an engine finishes them.

    python scripts/bench_durable.py [--rows 50000] [--tokens 200] [--order shuffled] [--format parquet|jsonl|openai]

Adds rows with texts of so many tokens to an output folder as fast as it takes them, a checkpoint for every 10,000. The
cost is the processor time of all threads, writing included, against the second that an engine with 1,000 rows a second
needs for 1,000 rows. A few rows come first, since loading the libraries is no cost of rows: a job has read its input
with them. Exit code 1 when the cost is over 2 %.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa

from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow

ROWS_A_SECOND = 1000
CHECKPOINT_ROWS = 10_000  # ten seconds of such an engine
MOST_SHARE = 0.02
WORDS = ["the", "of", "and", "a", "film", "that", "was", "not", "what", "one", "would", "call", "good", "although"]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=50_000)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--folder", type=Path, help="a new folder for the output")
    options.add_argument("--order", choices=["input", "shuffled"], default="shuffled")
    options.add_argument("--format", choices=["parquet", "jsonl", "openai"], default="parquet")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "first", make_rows(1000, chosen.tokens), chosen.format)
        rows = make_rows(chosen.rows, chosen.tokens)
        if chosen.order == "shuffled":
            random.Random(0).shuffle(rows)
        where = chosen.folder or Path(folder) / "out"
        processor, wall = write(where, rows, chosen.format)
        size = sum(file.stat().st_size for file in where.iterdir())
    engine = chosen.rows / ROWS_A_SECOND
    print(
        f"rows      {chosen.rows:,} of {chosen.tokens} tokens, {chosen.order} order, {size / 2**20:,.1f} MiB of output"
    )
    print(f"processor {processor:.2f} s in {wall:.2f} s, {processor / chosen.rows * 1e6:.1f} microseconds a row")
    print(f"engine    {engine:.0f} s at {ROWS_A_SECOND:,} rows/s")
    print(f"cost      {processor / engine:.2%} of one processor's time")
    return int(processor / engine > MOST_SHARE)


def write(folder: Path, rows: list[OutputRow], part_format: str) -> tuple[float, float]:
    """Seconds of processor time, and of the clock, for the rows of a whole job."""
    model = SourceRecord(name="m", fingerprint="f")
    manifest = Manifest(
        batchgen_version="0",
        spec={},
        fingerprint={},
        inputs=(),
        model=model,
        tokenizer=model,
        num_rows=len(rows),
        n=1,
        part_rows=10_000,
        part_format="openai_chat" if part_format == "openai" else part_format,
        part_compression="zstd" if part_format == "parquet" else "none",
    )
    carried = pa.schema([("id", pa.string())])
    output = OutputFolder.open(str(folder), manifest=manifest, carried=carried, checkpoint_s=3600)
    processor, wall = time.process_time(), time.perf_counter()
    with output:
        for count, row in enumerate(rows, 1):
            output.add(row)
            if count % CHECKPOINT_ROWS == 0:
                output.checkpoint()
        output.finish()
    return time.process_time() - processor, time.perf_counter() - wall


def make_rows(num_rows: int, num_tokens: int) -> list[OutputRow]:
    rng = random.Random(1)
    return [
        OutputRow(
            row,
            0,
            "ok",
            output=" ".join(rng.choices(WORDS, k=num_tokens)),
            finish_reason="eos",
            prompt_tokens=500,
            cached_tokens=400,
            output_tokens=num_tokens,
            carried={"id": f"review-{row}"},
        )
        for row in range(num_rows)
    ]


if __name__ == "__main__":
    sys.exit(main())
