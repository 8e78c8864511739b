"""Runs the standard workloads through the engine, and a peer beside it, and writes down what came out."""

import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from batchgen.bench.roofline import roofline
from batchgen.bench.workloads import GEOMETRIES, MAX_TOKEN_ID, WORKLOADS, Workload
from batchgen.engine import Engine, EngineConfig, EngineStats, Request, SamplingParams
from batchgen.errors import EngineError, JobFileError


@dataclass(frozen=True, slots=True)
class Result:
    """One workload on one engine. Seconds leave start-up out; fields that an engine does not tell are None."""

    date: str
    hardware: str
    engine: str
    version: str
    model: str
    precision: str
    workload: str
    rows: int
    seconds: float
    rows_s: float
    out_tok_s: float
    settings: dict[str, Any]
    command: str
    roofline_share: float | None = None
    host_ms_per_step: float | None = None
    cached_tokens: int | None = None
    memory_gib: float | None = None
    startup_s: float | None = None

    def to_json(self) -> str:
        """One line of results.jsonl."""
        return json.dumps({name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True, slots=True)
class Bench:
    """What to run: a geometry's name or a config.json, workloads by name, and how."""

    model: str
    workloads: Sequence[str]
    scale: float = 1.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    peer: str | None = None
    peer_options: str = "{}"
    peer_sorted: bool = False

    def config(self) -> dict[str, Any]:
        """The model's config. Raises JobFileError."""
        if self.model in GEOMETRIES:
            return GEOMETRIES[self.model]
        path = Path(self.model)
        if not path.is_file():
            known = ", ".join(GEOMETRIES)
            raise JobFileError(f"model {self.model!r} is neither a geometry ({known}) nor a config.json")
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if config.get("vocab_size", 0) < MAX_TOKEN_ID:
            raise JobFileError(f"{path}: the workloads use token ids up to {MAX_TOKEN_ID:,}; vocab_size is smaller")
        return config


def make_bench(workloads: Sequence[str], engine: Sequence[str], **settings: Any) -> Bench:
    """A bench from the command line's texts; `engine` are `field=value` of EngineConfig. Raises JobFileError."""
    names = {field.name for field in fields(EngineConfig)}
    given: dict[str, Any] = {}
    for option in engine:
        name, _, value = option.partition("=")
        if name not in names:
            raise JobFileError(f"--engine {option}: there is no field {name!r}; fields: {', '.join(sorted(names))}")
        given[name] = yaml.safe_load(value)
    return Bench(workloads=workloads or tuple(WORKLOADS), engine=EngineConfig(**given), **settings)


def run_bench(bench: Bench, out: str | None = None) -> Iterator[Result]:
    """Run the workloads one after another, first on our engine, then on the peer; append each result to `out`.

    Raises JobFileError for what there is not, EngineError when an engine fails.
    """
    for result in _run(bench):
        if out is not None:
            with open(out, "a", encoding="utf-8") as file:
                file.write(result.to_json() + "\n")
        yield result


def _run(bench: Bench) -> Iterator[Result]:
    unknown = [name for name in bench.workloads if name not in WORKLOADS]
    if unknown:
        raise JobFileError(f"no workload {', '.join(unknown)}: there are {', '.join(WORKLOADS)}")
    if bench.peer is not None and find_spec(bench.peer) is None:
        raise EngineError(f"--peer {bench.peer}: no package of that name can be imported here")
    yield from _run_own(bench)
    if bench.peer is not None:
        yield from _run_vllm(bench)


def _run_own(bench: Bench) -> Iterator[Result]:
    import torch

    from batchgen.engine.device import choose_device, choose_dtype
    from batchgen.models.load import load_model

    began = time.perf_counter()
    device = choose_device(bench.engine.device)
    dtype = choose_dtype(bench.engine.dtype, device)
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config()))
        model = load_model(folder, device=device, dtype=dtype, dummy=True, max_length=bench.engine.max_length)
    engine = Engine(model, bench.engine)
    _generate(engine, [(work, 16) for work, _ in WORKLOADS["even"](64 / 2048)])
    gc.freeze()
    startup = time.perf_counter() - began
    for name in bench.workloads:
        work = WORKLOADS[name](bench.scale)
        before = engine.stats
        began = time.perf_counter()
        _generate(engine, work)
        seconds = time.perf_counter() - began
        steps = _since(before, engine.stats)
        on_gpu = device.type == "cuda"
        bound = (
            roofline(
                work,
                model.config,
                kv_bytes=engine.limits.num_pages * engine.limits.page_size * model.kv_bytes_per_token,
            ).total
            if on_gpu
            else None
        )
        yield Result(
            **_what(bench, name, work, seconds),
            engine="batchgen",
            version=version("batchgen"),
            hardware=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
            precision=str(dtype).removeprefix("torch."),
            settings={key: value for key, value in asdict(bench.engine).items() if value is not None},
            roofline_share=None if bound is None else round(bound / seconds, 3),
            host_ms_per_step=_host_ms_per_step(steps) if on_gpu else None,
            cached_tokens=steps.cached_tokens,
            memory_gib=round(torch.cuda.max_memory_allocated(device) / 2**30, 1) if on_gpu else None,
            startup_s=round(startup, 1),
        )


def _generate(engine: Engine, work: Workload) -> None:
    requests = (
        Request(row, tokens.tolist(), SamplingParams(max_tokens=out, ignore_eos=True))
        for row, (tokens, out) in enumerate(work)
    )
    drawn = sum(len(completion.token_ids) for completion in engine.generate(requests))
    if drawn != sum(out for _, out in work):
        raise EngineError(f"{drawn} tokens were generated of {sum(out for _, out in work)}: the figures would be wrong")


def _run_vllm(bench: Bench) -> Iterator[Result]:
    options = {
        "config": bench.config(),
        "workloads": list(bench.workloads),
        "scale": bench.scale,
        "engine": {"max_model_len": 4096, **json.loads(bench.peer_options)},
        "sort": bench.peer_sorted,
    }
    command = [sys.executable, "-m", "batchgen.bench.vllm_peer", json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                yield _vllm_result(bench, json.loads(line.removeprefix("RESULT ")))
    if process.returncode:
        raise EngineError(f"vLLM ended with exit code {process.returncode}: its messages are above")


def _vllm_result(bench: Bench, found: dict[str, Any]) -> Result:
    work = WORKLOADS[found["workload"]](bench.scale)
    return Result(
        **_what(bench, found["workload"], work, found["seconds"]),
        engine="vllm",
        version=found["version"],
        hardware=found["hardware"],
        precision=found["precision"],
        settings={**json.loads(bench.peer_options), "sorted": bench.peer_sorted},
        cached_tokens=found["cached_tokens"],
        startup_s=round(found["startup_s"], 1),
    )


def _what(bench: Bench, name: str, work: Workload, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": bench.model,
        "workload": name if bench.scale == 1 else f"{name} x{bench.scale:g}",
        "rows": len(work),
        "seconds": round(seconds, 2),
        "rows_s": round(len(work) / seconds, 2),
        "out_tok_s": round(sum(out for _, out in work) / seconds, 1),
        "command": "batchgen " + " ".join(sys.argv[1:]),
    }


def _since(before: EngineStats, after: EngineStats) -> EngineStats:
    return EngineStats(**{name: value - getattr(before, name) for name, value in asdict(after).items()})


def _host_ms_per_step(steps: EngineStats) -> float:
    seconds = steps.schedule_seconds + steps.launch_seconds + steps.collect_seconds
    return round(1000 * seconds / max(1, steps.prefill_steps + steps.decode_steps), 3)


def _cpu_name() -> str:
    cpu = Path("/proc/cpuinfo")
    names = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    name = names[0].split(":")[1].strip() if names else platform.machine()
    return f"{os.cpu_count()} cores of {name}"


def table(results: Sequence[Result]) -> str:
    """The results as text, one line each."""
    lines = [
        f"{'engine':<18}{'workload':<14}{'rows':>7}{'s':>9}{'rows/s':>10}{'out tok/s':>11}{'roofline':>10}"
        f"{'host ms':>9}"
    ]
    for r in results:
        share = "" if r.roofline_share is None else f"{r.roofline_share:.0%}"
        host = "" if r.host_ms_per_step is None else f"{r.host_ms_per_step:.2f}"
        lines.append(
            f"{r.engine + ' ' + r.version:<18}{r.workload:<14}{r.rows:>7,}{r.seconds:>9.1f}{r.rows_s:>10.1f}"
            f"{r.out_tok_s:>11,.0f}{share:>10}{host:>9}"
        )
    return "\n".join(lines)
