"""Where the GPU's time goes in steady prefill and decode steps of a standard workload: one line a kernel.

python scripts/profile_engine.py --model qwen-0.5b --workload chat --engine max_batch_rows=512
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from batchgen.bench.planned import planned
from batchgen.bench.run import make_bench
from batchgen.bench.workloads import WORKLOADS
from batchgen.engine import Engine, Request, SamplingParams
from batchgen.engine.device import choose_device, choose_dtype
from batchgen.models.load import load_model


def make_engine(model: str, options: list[str]) -> Engine:
    bench = make_bench([], options, model=model)
    device = choose_device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config()))
        weights = load_model(folder, device=device, dtype=choose_dtype("auto", device), dummy=True)
    return Engine(weights, bench.engine)


def run_until(engine: Engine, done: Callable[[], bool]) -> tuple[float, int]:
    """Seconds and steps until `done`; the device has finished, too."""
    torch.cuda.synchronize()
    before, start = engine.stats, time.perf_counter()
    while not done() and engine.busy:
        engine.step()
    torch.cuda.synchronize()
    after = engine.stats
    return time.perf_counter() - start, after.prefill_steps + after.decode_steps - (
        before.prefill_steps + before.decode_steps
    )


def report(name: str, engine: Engine, steps: Callable[[], Callable[[], bool]]) -> None:
    before = engine.stats
    seconds, count = run_until(engine, steps())
    after = engine.stats
    host = {
        part: (getattr(after, f"{part}_seconds") - getattr(before, f"{part}_seconds")) * 1000 / max(1, count)
        for part in ("schedule", "launch", "wait", "collect")
    }
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        _, profiled = run_until(engine, steps())
    times: dict[str, list[float]] = defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name].append(event.time_range.elapsed_us() / 1000)
    busy = sum(map(sum, times.values())) / max(1, profiled)
    print(
        f"\n{name}: {count} steps of {seconds / max(1, count) * 1000:.2f} ms, {engine.num_running} sequences; ", end=""
    )
    print(f"kernels {busy:.2f} ms a step; host ms: " + ", ".join(f"{part} {ms:.2f}" for part, ms in host.items()))
    for kernel, values in sorted(times.items(), key=lambda item: -sum(item[1]))[:22]:
        total = sum(values) / max(1, profiled)
        print(f"{total:8.3f} ms {total / busy:6.1%} {len(values) / max(1, profiled):7.1f} x  {kernel[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--engine", action="append", default=[])
    args = parser.parse_args()
    engine = make_engine(args.model, args.engine)
    warm = [Request(i, [1000 + i] * 64, SamplingParams(max_tokens=8, ignore_eos=True)) for i in range(64)]
    list(engine.generate(warm))
    for row in planned(WORKLOADS[args.workload](args.scale)):
        params = SamplingParams(max_tokens=row.outputs, ignore_eos=True)
        engine.add(Request(row.row, row.tokens.tolist(), params, shared_with_next=row.shared_with_next))

    def more(field: str, count: int) -> Callable[[], Callable[[], bool]]:
        def steps() -> Callable[[], bool]:
            end = getattr(engine.stats, field) + count
            return lambda: getattr(engine.stats, field) >= end

        return steps

    report("prefill", engine, more("prefill_steps", 4))
    run_until(engine, more("decode_steps", 20)())
    report("decode", engine, more("decode_steps", 15))


if __name__ == "__main__":
    main()
