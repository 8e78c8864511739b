"""What planning costs: tokens planned a second, peak memory, and the share of a whole job.

    python scripts/bench_planning.py --rows 1000000 --tokens 200
    python scripts/bench_planning.py --workload label --rows-a-second 245
    python scripts/bench_planning.py --rows 10000000 --tokens 200 --stream

Made prompts share an instruction with all rows and a document with seven others. A workload of `batchgen bench` is
planned as it is. With --stream all rows go the way of `batchgen run` from the tokenizer to the engine: kept on disk
with what the output needs of them, planned as one window, and read back in planned order.
"""

import argparse
import resource
import sys
import time
from collections.abc import Generator, Iterable, Iterator

import numpy as np

from batchgen.bench.workloads import WORKLOADS
from batchgen.data.rows import Row
from batchgen.job.spec import Job
from batchgen.planning.plan import make_plan
from batchgen.planning.spool import Spool, Tokens
from batchgen.prompts.builder import PromptResult
from batchgen.windows import PlannedPrompts

BATCH_ROWS = 8192
VOCABULARY = 50_000


def made_prompts(num_rows: int, num_tokens: int) -> Iterator[Tokens]:
    """30 % instruction, 40 % document of eight rows each, 30 % of the row's own."""
    rng = np.random.default_rng(0)
    shared, own = num_tokens * 3 // 10, num_tokens * 3 // 10
    head = rng.integers(0, VOCABULARY, shared, dtype=np.int32)
    num_documents = -(-num_rows // 8)
    width = num_tokens - shared - own
    for begin in range(0, num_rows, BATCH_ROWS):
        count = min(BATCH_ROWS, num_rows - begin)
        tokens = np.empty((count, num_tokens), np.int32)
        tokens[:, :shared] = head
        # A document's tokens follow from its number, so that none has to be kept.
        documents = rng.integers(0, num_documents, count, dtype=np.int64)[:, None]
        tokens[:, shared : shared + width] = (documents * 7919 + np.arange(width) * 104_729) % VOCABULARY
        tokens[:, shared] = documents[:, 0] % 2**31
        tokens[:, shared + width :] = rng.integers(0, VOCABULARY, (count, own), dtype=np.int32)
        yield from tokens


def main() -> int:
    """Spool, plan, and say how it went."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--workload", choices=sorted(WORKLOADS))
    parser.add_argument("--stream", action="store_true", help="keep rows on disk, and read them back in planned order")
    parser.add_argument("--rows-a-second", type=float, help="of the engine, for the share of a whole job")
    options = parser.parse_args()
    prompts = made_prompts(options.rows, options.tokens)
    if options.workload:
        prompts = (tokens for tokens, _ in WORKLOADS[options.workload](1))
    if options.stream:
        return stream(prompts, options.page_size)
    with Spool() as spool:
        spooling = 0.0
        for prompt in prompts:
            start = time.perf_counter()
            spool.append(prompt, b"", outputs=16, merge_key=0)
            spooling += time.perf_counter() - start
        before = peak_memory()
        start = time.perf_counter()
        plan = make_plan(spool.tokens(), spool.outputs, spool.merge_keys, options.page_size)
        planning = time.perf_counter() - start
        tokens = spool.num_tokens
    counts = plan.counts
    print(f"prompts   {counts.prompts:,} with {tokens:,} tokens, {counts.computed_tokens:,} to compute")
    print(f"groups    {len(plan.groups.rows):,} with {int(plan.groups.rows.sum()):,} prompts")
    print(f"spooling  {spooling:.2f} s, {tokens / spooling / 1e6:,.0f} M tokens/s")
    print(f"planning  {planning:.2f} s, {tokens / planning / 1e6:,.0f} M tokens/s")
    print(f"memory    {peak_memory() / 1e9:.2f} GB at most, {before / 1e9:.2f} GB before planning")
    if options.rows_a_second:
        job = counts.prompts / options.rows_a_second
        print(f"share     {(spooling + planning) / job:.2%} of {job:.1f} s at {options.rows_a_second:,.0f} rows/s")
    return 0


def stream(prompts: Iterable[Tokens], page_size: int) -> int:
    """All rows from the tokenizer's end to the engine's beginning."""
    job = Job.model_validate(
        {
            "version": 1,
            "model": "none",
            "input": {"path": "none.jsonl"},
            "prompt": {"text": "{{ text }}"},
            "output": {"path": "none", "columns": ["id"]},
            "plan": {"window": "all"},
        }
    )
    start = time.perf_counter()
    came_first = came = 0.0
    rows = tokens = shared = 0
    with PlannedPrompts(job, results(prompts), ["id"]) as planned:
        for found in planned.in_order(page_size, lambda: None):
            came = time.perf_counter() - start
            came_first = came_first or came
            rows += 1 + len(found.merged)
            tokens += len(found.prompt.token_ids if found.prompt.token_ids is not None else ())
            shared += found.shared_with_next
    print(f"rows      {rows:,} with {tokens:,} tokens, {shared:,} of them shared with the next row")
    print(f"first     after {came_first:.0f} s: all are kept and planned, {rows / came_first:,.0f} rows/s")
    print(f"stream    {came - came_first:.0f} s for all, {rows / max(1e-9, came - came_first):,.0f} rows/s")
    print(f"memory    {peak_memory() / 1e9:.2f} GB at most")
    return 0


def results(prompts: Iterable[Tokens]) -> Generator[PromptResult]:
    """What the prompt builder would give for each row."""
    for number, tokens in enumerate(prompts):
        yield PromptResult(
            Row(number, {"id": f"row-{number}", "text": "of the prompt"}, f"row {number}"), tokens, "text"
        )


def peak_memory() -> int:
    """Most bytes that this process has had resident, pages of mapped files among them."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
