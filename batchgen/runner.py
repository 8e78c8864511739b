"""The life of a job: `run_job` reads from top to bottom. What is wrong is found before the model loads."""

import os
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from batchgen.answers import Answers
from batchgen.calibration import measure_prior
from batchgen.data.manifest import Manifest
from batchgen.data.output import OutputFolder
from batchgen.data.resume import Resume
from batchgen.data.rows import OutputRow, Row
from batchgen.errors import InputError, RowError
from batchgen.inputs import Inputs, open_inputs
from batchgen.interrupt import GRACE_S, StopRequest
from batchgen.job.spec import Job
from batchgen.job.units import parse_size
from batchgen.observe.progress import Progress
from batchgen.observe.report import PhaseClock, Report, check_failed_rows
from batchgen.planning.plan import Counts
from batchgen.prompts.builder import PromptBuilder, PromptResult
from batchgen.prompts.first_rows import watch_first_rows
from batchgen.prompts.stream import prompt_stream
from batchgen.watchdog import Watchdog
from batchgen.windows import PlannedPrompt, PlannedPrompts

if TYPE_CHECKING:
    from batchgen.engine import Engine

_GO_ON = Resume()


def run_job(
    job: Job, *, quiet: bool = False, log_json: bool = False, resume: Resume = _GO_ON, grace: float = GRACE_S
) -> Report:
    """Run a job, or what is left of it, and return what this run did.

    After a signal it ends within `grace` seconds. Raises a BatchgenError with the exit code of what went wrong.
    Finished rows stay; the same call goes on from them.
    """
    clock = PhaseClock()
    with Progress(quiet=quiet, as_json=log_json) as progress:
        stop = StopRequest(job.limits.runtime, grace, progress.last_words)
        with clock.phase("open"):
            inputs = open_inputs(job)
            output = inputs.open_output(resume)
        watchdog = Watchdog(job.limits.stall, grace, progress.last_words, output)
        with stop.ends_in_time(output.keep_unsent), watchdog, output:
            inputs.log_warnings()
            total, done = (rows * job.generate.n for rows in (output.manifest.num_rows, output.num_finished_rows))
            engine = counts = None
            retried = 0
            if output.pending():
                with planned_prompts(inputs, output) as prompts:
                    with clock.phase("load"):
                        engine = load_engine(inputs)
                    watchdog.look_at(partial(_num_moves, engine, prompts))
                    progress.begin(total, done)
                    with stop, closing(answer_rows(engine, inputs, output, prompts, clock, stop)) as rows:
                        for row in rows:
                            with clock.phase("write"):
                                output.add(row)
                            retried += row.attempts > 1
                            progress.update(output_tokens=row.output_tokens)
                    counts = prompts.counts
            report = _report(engine, total - done, counts, clock, retried)
            manifest = output.finish(report.to_json())
        progress.close()
        if not quiet:
            progress.write(_last_words(report, manifest, job), report=report.to_json())
    check_failed_rows(manifest.rows_by_status, job.limits.failed_rows, job.output.path)
    return report


def load_engine(inputs: Inputs) -> "Engine":
    """Load the model into an engine with the job's options. Raises EngineError, or JobFileError for wrong weights."""
    from batchgen.engine import Engine, EngineConfig

    options = inputs.job.engine
    config = EngineConfig(
        device=options.device,
        dtype=options.dtype,
        max_length=inputs.max_length,
        page_size=options.page_size,
        kv_bytes=None if options.kv_memory is None else parse_size(options.kv_memory),
        max_batch_rows=options.max_batch_rows,
        max_batch_tokens=options.max_batch_tokens,
        prefix_caching=options.prefix_caching,
        batch_invariant=options.batch_invariant,
        threads=options.threads,
    )
    return Engine.load(inputs.model_path, config, num_tokens=inputs.tokenizer.vocab_size)


def planned_prompts(inputs: Inputs, output: OutputFolder) -> PlannedPrompts:
    """The prompts of all rows still to do."""
    num_finished = output.num_finished_rows
    builder = inputs.builder(datetime.fromisoformat(output.manifest.created))
    num_workers = inputs.num_workers(output.manifest.num_rows - num_finished)
    stream = prompt_stream(builder, inputs.rows(output.pending()), num_workers)
    # Only a job that begins: a resumed one has rows that went well.
    prompts = stream if num_finished else watch_first_rows(stream)
    return PlannedPrompts(inputs.job, prompts, inputs.source.schema.names)


def answer_rows(
    engine: "Engine",
    inputs: Inputs,
    output: OutputFolder,
    prompts: PlannedPrompts,
    clock: PhaseClock,
    stop: StopRequest,
) -> Generator[OutputRow]:
    """The output rows of all prompts, as they finish."""
    builder = inputs.builder(datetime.fromisoformat(output.manifest.created))
    with clock.phase("calibrate"):
        prior = measure_prior(engine, inputs, builder, stop)
    answers = Answers(inputs.job, inputs.tokenizer, inputs.source.carried, inputs.constraints, prior, inputs.thinking)
    yield from generate(engine, answers, prompts.in_order(engine.limits.page_size, stop.check), clock, stop)


def generate(
    engine: "Engine", answers: Answers, prompts: Iterable[PlannedPrompt], clock: PhaseClock, stop: StopRequest
) -> Iterator[OutputRow]:
    """Feed the engine and run it step by step; rows come out as they finish."""
    source = iter(prompts)
    while True:
        for prompt in _next_prompts(engine, source, clock):
            stop.check()
            asked = answers.ask(prompt)
            if isinstance(asked, list):
                yield from asked
            else:
                engine.add(asked)
        if not engine.busy:
            return
        stop.check()
        began, decoded = time.perf_counter(), engine.stats.decode_steps
        completions = engine.step()
        clock.add("decode" if engine.stats.decode_steps > decoded else "prefill", time.perf_counter() - began)
        for completion in completions:
            found = answers.finish(completion)
            if isinstance(found, list):
                yield from found
            else:
                engine.add(found)


def _next_prompts(engine: "Engine", source: Iterator[PlannedPrompt], clock: PhaseClock) -> Iterator[PlannedPrompt]:
    """Prompts while the engine has room in its queue."""
    while engine.num_waiting < engine.config.max_waiting:
        with clock.phase("tokenize wait"):
            prompt = next(source, None)
        if prompt is None:
            return
        yield prompt


def _num_moves(engine: "Engine", prompts: PlannedPrompts) -> int:
    stats = engine.stats
    return stats.prefill_steps + stats.decode_steps + prompts.num_read


def _report(engine: "Engine | None", rows: int, planned: Counts | None, clock: PhaseClock, retried: int) -> Report:
    stats = engine and engine.stats
    merged_tokens = planned.merged_tokens if planned else 0
    return Report(
        rows=rows,
        prompt_tokens=stats.prompt_tokens + merged_tokens if stats else 0,
        cached_tokens=stats.cached_tokens + merged_tokens if stats else 0,
        output_tokens=stats.output_tokens if stats else 0,
        forced_tokens=stats.forced_tokens if stats else 0,
        merged_rows=planned.merged_prompts if planned else 0,
        retried_rows=retried,
        planned_tokens=planned.computed_tokens if planned and stats else None,
        seconds=clock.total,
        phases=clock.seconds(),
        startup=engine.startup_seconds | {"graphs": engine.stats.graph_seconds} if engine else {},
    )


def _last_words(report: Report, manifest: Manifest, job: Job) -> str:
    path = job.output.path
    where = path if "://" in path else os.path.realpath(path)
    if report.rows == 0 and manifest.num_rows:
        return f"This job was finished at {manifest.finished}: nothing to do. Its rows are in {where}"
    return report.summary(manifest.rows_by_status, where)


@dataclass(frozen=True, slots=True)
class Preview:
    """One row of a preview: its prompt, and its answer or error."""

    row: int
    place: str
    text: str
    token_ids: tuple[int, ...]
    error: RowError | None
    output: str | None
    choices: tuple[str, ...] = ()
    """Each text to score with its tokens, behind this prompt."""


def preview_job(job: Job, *, rows: list[int] | None, first: int, generate: bool) -> Iterator[Preview]:
    """Show the prompts of a few rows (`rows`, else the `first`), and their answers if `generate`. Writes nothing.

    Raises JobFileError or InputError for what `run_job` would raise them for, and for a row that the input has not.
    """
    inputs = open_inputs(job)
    builder = inputs.builder(datetime.now().astimezone())
    chosen = islice(inputs.source.rows(), first) if rows is None else (_row(inputs, index) for index in rows)
    prompts = list(map(builder.build, chosen))
    answers = _preview_answers(inputs, builder, prompts) if generate else {}
    for prompt in prompts:
        token_ids = () if prompt.token_ids is None else tuple(prompt.token_ids.tolist())
        found = answers.get(prompt.row.index, [])
        error = prompt.error or next((row.error for row in found if row.error), None)
        output = "\n---\n".join(map(_answer_text, found)) if found and not error else None
        choices = tuple(_choice_text(inputs, *pair) for pair in zip(prompt.labels, prompt.choices, strict=True))
        yield Preview(prompt.row.index, prompt.row.place, prompt.text, token_ids, error, output, choices)


def _row(inputs: Inputs, index: int) -> Row:
    row = next(inputs.source.rows(index, index + 1), None)
    if row is None:
        raise InputError(f"there is no row {index}: the input has {inputs.source.num_rows:,} rows, counted from 0")
    return row


def _choice_text(inputs: Inputs, label: str, token_ids: tuple[int, ...]) -> str:
    tokens = (f"{inputs.tokenizer.decode([i], skip_special_tokens=False)!r} {i}" for i in token_ids)
    return f"{label!r} = {', '.join(tokens)}"


def _answer_text(row: OutputRow) -> str:
    """An answer as a preview shows it: its thinking part, the text, the probabilities of choices or its score."""
    thought = [] if row.reasoning is None else [f"(thinking) {row.reasoning}"]
    numbers = [f"{label}: {value:.4f}" for label, value in (row.label_probs or {}).items()]
    if row.score is not None:
        numbers.append(f"score: {row.score:.4f}, {row.score_mean:.4f} a token")
    return "\n".join([*thought, row.output or "", *numbers])


def _preview_answers(inputs: Inputs, builder: PromptBuilder, prompts: list[PromptResult]) -> dict[int, list[OutputRow]]:
    """The output rows of prompts, by input row."""
    engine = load_engine(inputs)
    found: dict[int, list[OutputRow]] = {}
    with StopRequest() as stop:
        prior = measure_prior(engine, inputs, builder, stop)
        answers = Answers(inputs.job, inputs.tokenizer, lambda values: {}, inputs.constraints, prior, inputs.thinking)
        for row in generate(engine, answers, map(PlannedPrompt, prompts), PhaseClock(), stop):
            found.setdefault(row.row, []).append(row)
    return {row: sorted(samples, key=lambda sample: sample.sample) for row, samples in found.items()}
