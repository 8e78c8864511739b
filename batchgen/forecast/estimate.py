"""Whether a job fits into the KV cache, and how long it takes: by a pilot that really ran, or by runs on a GPU."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.answers import Answers
from batchgen.bench.roofline import bound, kv_bytes_per_token, weight_bytes
from batchgen.bench.workloads import GEOMETRIES
from batchgen.engine.config import physical_memory
from batchgen.forecast.survey import Survey
from batchgen.inputs import Inputs
from batchgen.interrupt import StopRequest
from batchgen.job.units import parse_size
from batchgen.models.config import from_config
from batchgen.observe.report import PhaseClock
from batchgen.prompts.builder import PromptResult
from batchgen.runner import generate, load_engine
from batchgen.windows import PlannedPrompt

MACHINES = {"h200": 141e9}
"""Memory of the GPUs that a forecast can be made for without one, in bytes."""
_USED_SHARE = 0.9  # of a GPU's memory, by weights and KV cache


class Reached(NamedTuple):
    """The least and the most of the roofline that benchmarks of a model reached."""

    model: str
    least: float
    most: float


REACHED = {"h200": (Reached("llama-8b", 0.77, 0.938), Reached("qwen-0.5b", 0.63, 0.797))}
"""From docs/benchmarks/results.jsonl, without those that follow a grammar."""


@dataclass(frozen=True, slots=True)
class CacheFit:
    """KV cache in tokens: how many it holds, what one token takes, and how many average rows fit at once.

    `longest_row` has one sample: the others can come later.
    """

    machine: str
    bytes_per_token: int
    weight_bytes: int
    tokens: int
    longest_row: int
    rows_at_once: int

    @property
    def fits(self) -> bool:
        """Whether the longest row fits."""
        return self.longest_row <= self.tokens


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """Seconds of generating, and what they are based on. `least_seconds`: no run is faster, when that is known."""

    seconds: float
    output_tokens: int
    basis: str
    least_seconds: float | None = None


class Pilot(NamedTuple):
    """What running a few rows told: seconds a computed and a drawn token, output tokens a row, and tokens of choices.

    The last are computed behind each prompt.
    """

    rows: int
    prefill: float
    decode: float
    outputs: float
    behind: float


def page_size_of(inputs: Inputs, machine: str | None) -> int:
    """The page size that the engine would take."""
    options = inputs.job.engine
    return options.page_size or (64 if machine is not None or options.device == "cuda" else 16)


def cache_fit(inputs: Inputs, found: Survey, machine: str | None) -> CacheFit:
    """How the job fits into the KV cache of a machine, this one's CPU when none is named."""
    options = inputs.job.engine
    scale = 2 if options.dtype == "float32" else 1
    per_token, weights = scale * kv_bytes_per_token(inputs.config), scale * weight_bytes(inputs.config)
    if options.kv_memory is not None:
        room = float(parse_size(options.kv_memory))
    else:
        room = physical_memory() / 4 if machine is None else MACHINES[machine] * _USED_SHARE - weights
    outputs = _outputs(inputs, found)
    own = (found.lengths - found.shared + outputs).mean() if len(outputs) else 1.0
    tokens = max(0, int(room // per_token))
    return CacheFit(
        machine=machine or "this machine's CPU",
        bytes_per_token=per_token,
        weight_bytes=weights,
        tokens=tokens,
        longest_row=int((found.lengths + -(-outputs // inputs.job.generate.n)).max(initial=0)),
        rows_at_once=min(len(outputs), int(tokens // max(1.0, own))),
    )


def machine_estimate(inputs: Inputs, found: Survey, machine: str, fit: CacheFit, pilot: Pilot | None) -> TimeEstimate:
    """The time on a machine: its roofline, and what benchmarks of the model nearest in size reached of that.

    Answers are as long as the job allows, or as those of a pilot.
    """
    outs = np.maximum(_outputs(inputs, found), 1)
    answers = "of max_tokens"
    if pilot is not None:
        outs = np.minimum(outs, max(1, round(pilot.outputs)))
        answers = f"of {pilot.outputs:,.1f} tokens, as those of {pilot.rows:,} rows run here"
    lengths, shared = found.lengths.astype(np.int64), found.shared.astype(np.int64)
    kv_bytes = float(max(1, fit.tokens * fit.bytes_per_token))
    least = bound(lengths, shared, outs, found.counts.computed_tokens, inputs.config, kv_bytes=kv_bytes)
    reached = min(REACHED[machine], key=lambda run: abs(math.log(_bench_weights(run.model) / fit.weight_bytes)))
    return TimeEstimate(
        seconds=least.total * 2 / (reached.least + reached.most),
        output_tokens=int(outs.sum()),
        basis=(
            f"the {reached.least:.0%} to {reached.most:.0%} of its roofline that one {machine.upper()} reached with "
            f"{reached.model} in bfloat16; answers {answers}"
        ),
        least_seconds=least.total,
    )


def _bench_weights(model: str) -> int:
    return weight_bytes(from_config(GEOMETRIES[model], model))


def run_pilot(inputs: Inputs, prompts: Sequence[PromptResult]) -> Pilot:
    """Run these prompts here."""
    engine = load_engine(inputs)
    answers = Answers(inputs.job, inputs.tokenizer, lambda values: {}, inputs.constraints, thinking=inputs.thinking)
    clock = PhaseClock()
    with StopRequest() as stop:
        rows = list(generate(engine, answers, map(PlannedPrompt, prompts), clock, stop))
    stats, seconds = engine.stats, clock.seconds()
    behind = stats.computed_tokens - stats.recomputed_tokens - (stats.prompt_tokens - stats.cached_tokens)
    return Pilot(
        rows=len(prompts),
        prefill=seconds["prefill"] / max(1, stats.computed_tokens),
        decode=seconds["decode"] / max(1, stats.output_tokens),
        outputs=sum(row.output_tokens for row in rows) / len(prompts),
        behind=behind / len(prompts),
    )


def pilot_estimate(found: Survey, pilot: Pilot) -> TimeEstimate:
    """The time here, when all rows are as those of the pilot."""
    rows = len(found.lengths)
    output_tokens = round(pilot.outputs * rows)
    return TimeEstimate(
        seconds=pilot.prefill * (found.counts.computed_tokens + pilot.behind * rows) + pilot.decode * output_tokens,
        output_tokens=output_tokens,
        basis=(
            f"{pilot.rows:,} rows run here: {_rate(pilot.prefill)} prompt tokens/s, {_rate(pilot.decode)} output "
            f"tokens/s, {pilot.outputs:,.1f} output tokens a row"
        ),
    )


def _rate(seconds: float) -> str:
    return f"{1 / seconds:,.0f}" if seconds else "no"


def _outputs(inputs: Inputs, found: Survey) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Most tokens of each answer, as far as the model's length allows."""
    return np.minimum(found.outputs.astype(np.int64), inputs.max_length - found.lengths)
