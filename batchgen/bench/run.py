"""Runs the standard workloads through the engine, and a peer beside it, and writes down what came out."""

import gc
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import yaml

from batchgen.bench.choices import NAME as CHOICES
from batchgen.bench.choices import score
from batchgen.bench.peer import check_importable, peer_messages
from batchgen.bench.planned import PlannedRow, in_file_order, planned
from batchgen.bench.result import Result
from batchgen.bench.roofline import roofline
from batchgen.bench.schema import NAME as SCHEMA
from batchgen.bench.schema import Run, schema_runs
from batchgen.bench.workloads import GEOMETRIES, MAX_TOKEN_ID, WORKLOADS
from batchgen.engine import Engine, EngineConfig, EngineStats, Request, SamplingParams
from batchgen.errors import EngineError, JobFileError

if TYPE_CHECKING:
    import torch

    from batchgen.models.decoder import Model


@dataclass(frozen=True, slots=True)
class Bench:
    """What to run: a geometry's name or a config.json, workloads by name, and how."""

    model: str
    workloads: Sequence[str]
    scale: float = 1.0
    engine: EngineConfig = field(default_factory=EngineConfig)
    order: Literal["planned", "file"] = "planned"
    """In which our engine gets the rows: that of `batchgen run`, or that of the workload."""
    peer: str | None = None
    peer_options: str = "{}"
    peer_sorted: bool = False
    """Give the peer its prompts in the order in which our engine gets them, not in that of the workload."""
    peer_path: str | None = None
    """A folder with the peer's packages, for its process alone."""
    peer_limit: float = 600.0
    """Seconds for its start, and for each workload."""

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
    unknown = [name for name in bench.workloads if name not in (*WORKLOADS, SCHEMA)]
    if unknown:
        raise JobFileError(f"no workload {', '.join(unknown)}: there are {', '.join([*WORKLOADS, SCHEMA])}")
    if bench.peer is not None and {CHOICES, SCHEMA} <= set(bench.workloads):
        raise JobFileError(f"{CHOICES} and {SCHEMA} need a tokenizer each: run them beside a peer in two calls")
    if bench.peer is not None:
        check_importable(bench.peer, bench.peer_path)
    yield from _run_own(bench)
    if bench.peer is not None:
        _free_gpu_memory()
        yield from _run_peer(bench, bench.peer)


def _run_own(bench: Bench) -> Iterator[Result]:
    import torch

    from batchgen.engine.device import choose_device, choose_dtype

    began = time.perf_counter()
    device = choose_device(bench.engine.device)
    dtype = choose_dtype(bench.engine.dtype, device)
    engine, model, startup = _start(bench, device, dtype)
    kv_bytes = engine.limits.num_pages * engine.limits.page_size * model.kv_bytes_per_token
    startup_s = time.perf_counter() - began
    on_gpu = device.type == "cuda"
    before = engine.stats
    for name, work, seconds in _runs(bench, engine):
        steps = _since(before, engine.stats)
        before = engine.stats
        yield Result(
            **_what(bench, name, len(work), sum(out for _, out in work), seconds),
            engine="batchgen",
            version=version("batchgen"),
            hardware=torch.cuda.get_device_name(device) if on_gpu else _cpu_name(),
            precision=str(dtype).removeprefix("torch."),
            settings={key: value for key, value in asdict(bench.engine).items() if value is not None},
            order=bench.order,
            roofline_share=round(roofline(work, model.config, kv_bytes=kv_bytes).total / seconds, 3)
            if on_gpu
            else None,
            host_ms_per_step=_ms_per_step(steps, steps.host_seconds) if on_gpu else None,
            step_ms=_ms_per_step(steps, seconds),
            cached_tokens=steps.cached_tokens,
            forced_tokens=steps.forced_tokens or None,
            mask_ms_per_step=_ms_per_step(steps, steps.mask_seconds) if steps.masks else None,
            memory_gib=round(torch.cuda.max_memory_allocated(device) / 2**30, 1) if on_gpu else None,
            startup_s=round(startup_s, 1),
            startup=startup,
        )


def _runs(bench: Bench, engine: Engine) -> Iterator[Run]:
    """The workloads through our engine, one after another."""
    for name in bench.workloads:
        if name == SCHEMA:
            yield from schema_runs(engine, bench.config(), bench.scale)
            continue
        work = WORKLOADS[name](bench.scale)
        began = time.perf_counter()
        answer = score if name == CHOICES else _generate
        answer(engine, in_file_order(work) if bench.order == "file" else planned(work))
        yield Run(name, work, time.perf_counter() - began)


def _start(bench: Bench, device: "torch.device", dtype: "torch.dtype") -> tuple[Engine, "Model", dict[str, float]]:
    """An engine that has answered a first batch, its model, and the seconds that each part of this took."""
    from batchgen.models.load import load_model

    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(bench.config()))
        model = load_model(folder, device=device, dtype=dtype, dummy=True, max_length=bench.engine.max_length)
    weights = time.perf_counter() - began
    engine = Engine(model, bench.engine)
    began = time.perf_counter()
    first = in_file_order([(tokens, 16) for tokens, _ in WORKLOADS["even"](64 / 2048)])
    _generate(engine, first)
    if CHOICES in bench.workloads:
        score(engine, first)
    first_batch = time.perf_counter() - began
    gc.freeze()
    parts = {"weights": weights, **engine.startup_seconds, "first batch": first_batch}
    return engine, model, {part: round(seconds, 2) for part, seconds in parts.items()}


def _generate(engine: Engine, rows: Sequence[PlannedRow]) -> None:
    requests = (
        Request(
            row.row,
            row.tokens,
            SamplingParams(max_tokens=row.outputs, ignore_eos=True),
            shared_with_next=row.shared_with_next,
        )
        for row in rows
    )
    drawn, wanted = sum(len(answer.token_ids) for answer in engine.generate(requests)), sum(row.outputs for row in rows)
    if drawn != wanted:
        raise EngineError(f"{drawn} tokens were generated of {wanted}: the figures would be wrong")


def _run_peer(bench: Bench, peer: str) -> Iterator[Result]:
    options = {
        "config": bench.config(),
        "workloads": list(bench.workloads),
        "scale": bench.scale,
        "engine": {"max_model_len": 4096, **json.loads(bench.peer_options)},
        "planned": bench.peer_sorted,
    }
    for found in peer_messages(peer, options, path=bench.peer_path, limit=bench.peer_limit):
        rows, drawn = found["rows"], found["output_tokens"]
        yield Result(
            **_what(bench, found["workload"], rows, drawn, found["seconds"]),
            engine=peer,
            version=found["version"],
            hardware=found["hardware"],
            precision=found["precision"],
            settings=json.loads(bench.peer_options),
            order="planned" if bench.peer_sorted else "file",
            cached_tokens=found["cached_tokens"],
            startup_s=round(found["startup_s"], 1),
        )


def _what(bench: Bench, name: str, rows: int, drawn: int, seconds: float) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "model": bench.model,
        "workload": name if bench.scale == 1 else f"{name} x{bench.scale:g}",
        "rows": rows,
        "seconds": round(seconds, 2),
        "rows_s": round(rows / seconds, 2),
        "out_tok_s": round(drawn / seconds, 1),
        "command": "batchgen " + " ".join(sys.argv[1:]),
    }


def _since(before: EngineStats, after: EngineStats) -> EngineStats:
    return EngineStats(**{name: value - getattr(before, name) for name, value in asdict(after).items()})


def _ms_per_step(steps: EngineStats, seconds: float) -> float:
    return round(1000 * seconds / max(1, steps.prefill_steps + steps.decode_steps), 3)


def _free_gpu_memory() -> None:
    """Give the memory of an engine that is no longer used back to the GPU, for another process."""
    import torch

    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def _cpu_name() -> str:
    cpu = Path("/proc/cpuinfo")
    names = [line for line in cpu.read_text().splitlines() if line.startswith("model name")] if cpu.exists() else []
    name = names[0].split(":")[1].strip() if names else platform.machine()
    return f"{os.cpu_count()} cores of {name}"
