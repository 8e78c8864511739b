"""The quickstart job on this machine: batchgen, transformers `generate`, and llama.cpp if xllamacpp is installed.

    python scripts/bench_cpu.py [--rows 500] [--rounds 2] [--batch-sizes 8,16,32,64]

Every engine gets the same token ids and gives one label a row, by what it has for it: batchgen scores the choices or
generates a token, the others generate a token. Each run is a process of its own; engines take turns, and the best of
the rounds counts for each. Loading is left out. transformers runs static batches, sorted by length to pad little.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

JOB = Path(__file__).resolve().parent.parent / "jobs" / "quickstart.yaml"


def prompts(rows: int) -> tuple[str, list[list[int]], list[tuple[tuple[int, ...], ...]]]:
    """The model's path, and each row's prompt and choices as token ids."""
    from batchgen.inputs import open_inputs
    from batchgen.job.load import load_job

    inputs = open_inputs(load_job(JOB, [f"input.limit={rows}", "output.path=/nowhere"]))
    builder = inputs.builder(datetime.now().astimezone())
    built = [builder.build(row) for row in inputs.source.rows()]
    return str(inputs.model_path), [b.token_ids.tolist() for b in built], [b.choices for b in built]


def timed(run: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def batchgen_choices(rows: int, setting: str) -> float:
    return _batchgen(rows, scoring=True)


def batchgen_generate(rows: int, setting: str) -> float:
    return _batchgen(rows, scoring=False)


def _batchgen(rows: int, *, scoring: bool) -> float:
    from batchgen.engine import Engine, EngineConfig, Request, SamplingParams

    path, ids, choices = prompts(rows)
    engine = Engine.load(path, EngineConfig())
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    requests = [
        Request(row, tokens, params, targets=targets if scoring else ())
        for row, (tokens, targets) in enumerate(zip(ids, choices, strict=True))
    ]
    list(engine.generate([Request("warm", list(range(1000, 1100)), params)]))
    return timed(lambda: list(engine.generate(requests)))


def transformers_generate(rows: int, setting: str) -> float:
    """Greedy `generate` in bfloat16 over the same weights; `setting` is the batch size."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from batchgen.models.gguf import GGUFFile
    from batchgen.models.gguf_config import hf_config
    from batchgen.models.gguf_weights import open_gguf

    path, ids, _ = prompts(rows)
    with GGUFFile(path) as file:
        config = LlamaConfig(**hf_config(file))
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    checkpoint = open_gguf(Path(path), torch.bfloat16)
    state = {name: checkpoint.read(name) for name in checkpoint.names()}
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert missing == ["lm_head.weight"], missing  # tied
    model.tie_weights()
    size = int(setting)
    order = sorted(ids, key=len)

    def run(batches: Sequence[list[list[int]]]) -> None:
        for batch in batches:
            longest = max(map(len, batch))
            tokens = torch.tensor([[0] * (longest - len(row)) + row for row in batch])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in batch])
            model.generate(tokens, attention_mask=mask, max_new_tokens=1, do_sample=False, pad_token_id=0)

    run([order[:2]])
    return timed(lambda: run([order[i : i + size] for i in range(0, len(order), size)]))


def llama_cpp(rows: int, setting: str) -> float:
    """llama.cpp's server in this process, with its prompt cache; `setting` is the number of slots."""
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    path, ids, _ = prompts(rows)
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_parallel = int(setting)
    params.n_ctx = 512 * int(setting)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)

    def ask(tokens: list[int]) -> object:
        return server.handle_completions({"prompt": tokens, "n_predict": 1, "temperature": 0, "cache_prompt": True})

    ask(ids[0])
    with ThreadPoolExecutor(int(setting)) as pool:
        return timed(lambda: list(pool.map(ask, ids)))


ENGINES: dict[str, Callable[[int, str], float]] = {
    f.__name__: f for f in (batchgen_choices, batchgen_generate, transformers_generate, llama_cpp)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch-sizes", default="8,16,32,64")
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "SETTING"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("SECONDS", ENGINES[options.one[0]](options.rows, options.one[1]))
        return
    runs = [("batchgen_choices", ""), ("batchgen_generate", "")]
    runs += [("transformers_generate", size) for size in options.batch_sizes.split(",")]
    runs += [("llama_cpp", slots) for slots in ("1", "4")] if _installed("xllamacpp") else []
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.rounds):
        for run in runs:
            best[run] = min(best[run], _in_own_process(options.rows, *run))
    peer = min(seconds for (engine, _), seconds in best.items() if engine == "transformers_generate")
    print(f"{platform.processor() or platform.machine()}, {options.rows} rows, best of {options.rounds}")
    print(json.dumps({name: _installed(name) for name in ("batchgen", "torch", "transformers", "xllamacpp")}))
    for (engine, setting), seconds in best.items():
        print(f"{engine:24}{setting:>4}{seconds:9.1f} s{options.rows / seconds:9.1f} rows/s{peer / seconds:8.2f}x")


def _in_own_process(rows: int, engine: str, setting: str) -> float:
    command = [sys.executable, __file__, "--rows", str(rows), "--one", engine, setting]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(next(line for line in done.stdout.splitlines() if line.startswith("SECONDS")).split()[1])


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
