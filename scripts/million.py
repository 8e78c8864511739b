"""A million rows through one machine: rows a second, and memory that must not grow with the rows done.

    python scripts/million.py [--rows 1000000] [--folder FOLDER]

Writes a JSONL file of short prompts and a model whose answers are known, previews the last row, runs the job, checks
every answer. Exit code 1 when an answer is wrong, or when memory at 90 % of the job is 5 % above that at 10 %.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import yaml
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LETTERS = "abcde"
TOKENS = ["<eos>", *"0123456789", *LETTERS]
PART_ROWS = 10_000
MOST_GROWTH = 1.05


class Sample(NamedTuple):
    seconds: float
    parts: int
    rss: int


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=1_000_000)
    options.add_argument("--folder", type=Path, help="work here, and leave everything there")
    chosen = options.parse_args()
    if chosen.folder is not None:
        return measure(chosen.folder, chosen.rows)
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), chosen.rows)


def measure(folder: Path, num_rows: int) -> int:
    write_model(folder / "model")
    size = write_rows(folder / "rows.jsonl", num_rows)
    job = write_job(folder)
    print(f"input    {num_rows:,} rows, {size / 2**20:,.0f} MiB of JSONL")

    samples = list(watch(["preview", str(job), "--row", str(num_rows - 1), "--no-generate"], folder))
    print(f"preview  row {num_rows - 1:,} after {samples[-1].seconds:.1f} s, at most {mib(max_rss(samples))}")

    samples = list(watch(["run", str(job)], folder))
    seconds = samples[-1].seconds
    print(f"run      {num_rows:,} rows in {seconds:.1f} s: {num_rows / seconds:,.0f} rows/s, start-up included")
    wrong = wrong_answers(folder / "out", num_rows)
    print(f"answers  {wrong:,} wrong")

    early, late = rss_at(samples, 0.1, num_rows), rss_at(samples, 0.9, num_rows)
    print(f"memory   {mib(early)} at 10 %, {mib(late)} at 90 %, at most {mib(max_rss(samples))}")
    if late > MOST_GROWTH * early:
        print(f"FAILED   memory grew by {late / early - 1:.1%}")
    return int(wrong > 0 or late > MOST_GROWTH * early)


def write_rows(path: Path, num_rows: int) -> int:
    with path.open("w") as file:
        for row in range(num_rows):
            file.write(f'{{"id": {row}, "prompt": "{row:07}"}}\n')
    return path.stat().st_size


def letter(row: int) -> str:
    """The answer to row number `row`: it goes by the prompt's last digit."""
    return LETTERS[row % 10 % len(LETTERS)]


def write_model(folder: Path) -> None:
    """A Llama of 16 tokens: one-hot embeddings, attention and MLP add nothing, so the last token alone decides."""
    size = len(TOKENS)
    head = np.zeros((size, size), np.float32)
    for token, text in enumerate(TOKENS):
        head[TOKENS.index(letter(int(text))) if text.isdecimal() else 0, token] = 4.0
    ones, layer = np.ones(size, np.float32), "model.layers.0."
    weights = {
        "model.embed_tokens.weight": np.eye(size, dtype=np.float32),
        "lm_head.weight": head,
        "model.norm.weight": ones,
        layer + "input_layernorm.weight": ones.copy(),
        layer + "post_attention_layernorm.weight": ones.copy(),
        layer + "mlp.gate_proj.weight": np.zeros((8, size), np.float32),
        layer + "mlp.up_proj.weight": np.zeros((8, size), np.float32),
        layer + "mlp.down_proj.weight": np.zeros((size, 8), np.float32),
    }
    weights |= {f"{layer}self_attn.{name}_proj.weight": np.zeros((size, size), np.float32) for name in "qkvo"}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 8,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.WordLevel({token: place for place, token in enumerate(TOKENS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def write_job(folder: Path) -> Path:
    job: dict[str, Any] = {
        "version": 1,
        "name": "million-rows",
        "model": "model",
        "input": {"path": "rows.jsonl"},
        "prompt": {"text": "{{ prompt }}"},
        "generate": {"max_tokens": 2},
        "output": {"path": "out", "columns": ["id"], "part_rows": PART_ROWS},
        "engine": {"dtype": "float32", "threads": 1},  # the model is nothing: the other core builds prompts
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def watch(arguments: list[str], folder: Path) -> Iterator[Sample]:
    """Run a batchgen command, and sample its memory and its finished parts once a second until it ends."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "batchgen", *arguments])
    while True:
        rss = tree_rss(process.pid)
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = None
        yield Sample(time.perf_counter() - start, len(list((folder / "out").glob("part-*.parquet"))), rss)
        if code is not None:
            break
    if code:
        sys.exit(f"batchgen {arguments[0]} ended with exit code {code}")


def tree_rss(pid: int) -> int:
    """Resident bytes of a process and its descendants. Pages that they share count for each."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(tree_rss(int(child)) for child in children)


def rss_at(samples: list[Sample], share: float, num_rows: int) -> int:
    """Median memory while the share of finished rows was within 5 % of the job around `share`."""
    near = [s.rss for s in samples if s.rss and abs(s.parts * PART_ROWS / num_rows - share) <= 0.05]
    if not near:
        sys.exit(f"no sample of memory near {share:.0%}: give more rows")
    return round(statistics.median(near))


def max_rss(samples: list[Sample]) -> int:
    return max(sample.rss for sample in samples)


def mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def wrong_answers(folder: Path, num_rows: int) -> int:
    """Rows that are missing, doubled, moved or wrongly answered."""
    right = row = 0
    for part in sorted(folder.glob("part-*.parquet")):
        table = pq.read_table(part, columns=["row", "id", "output", "status"])
        for found in zip(*(column.to_pylist() for column in table.columns), strict=True):
            right += found == (row, row, letter(row), "ok")
            row += 1
    return max(row, num_rows) - right


if __name__ == "__main__":
    sys.exit(main())
