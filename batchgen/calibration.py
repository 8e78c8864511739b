"""What the model prefers among a job's choices anyway, whatever the row: scored once, before the first row.

The prompts are the same ones on each run of the job, and run alone, so a resumed job has the prior that it began with.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import TYPE_CHECKING

from batchgen.data.rows import Row
from batchgen.engine.request import Completion, Request
from batchgen.errors import JobFileError
from batchgen.inputs import Inputs
from batchgen.interrupt import StopRequest
from batchgen.labels import choice_scores, log_prior, normalized
from batchgen.prompts.builder import PromptBuilder, PromptResult

if TYPE_CHECKING:
    from batchgen.engine import Engine

CONTENT_FREE = ("N/A", "[MASK]", "")
BATCH_ROWS = 256
_RUN_ROWS = 8  # read next to one another: each run is a place to go to in the files


def measure_prior(
    engine: "Engine", inputs: Inputs, builder: PromptBuilder, stop: StopRequest
) -> tuple[float, ...] | None:
    """The log-probability of each choice before any row is read; None for a job that does not calibrate.

    Raises JobFileError when none of the prompts can be scored.
    """
    generate = inputs.job.generate
    if generate.calibrate is None:
        return None
    is_batch = generate.calibrate == "batch"
    prompts = (
        map(builder.build, inputs.rows(spread_rows(inputs.source.num_rows)))
        if is_batch
        else _content_free(inputs, builder)
    )
    logprobs = [done.target_logprobs for done in _scored(engine, prompts, stop) if done.target_logprobs is not None]
    engine.forget_stats()  # these are no rows of the output, and none was planned
    if not logprobs:
        raise JobFileError(f"{inputs.job.where('generate.calibrate')}: no prompt to calibrate with could be scored")
    normalize = generate.length_normalize
    return log_prior(normalized(choice_scores(one, length_normalize=normalize)) for one in logprobs)


def spread_rows(num_rows: int) -> list[range]:
    """BATCH_ROWS rows in short runs, evenly over the input: a sorted input begins with the rows of one label."""
    if num_rows <= BATCH_ROWS:
        return [range(num_rows)] if num_rows else []
    runs = BATCH_ROWS // _RUN_ROWS
    return [range(begin, begin + _RUN_ROWS) for begin in (run * num_rows // runs for run in range(runs))]


def _content_free(inputs: Inputs, builder: PromptBuilder) -> Iterator[PromptResult]:
    """The job's templates over rows that have one of the texts in every column."""
    for text in CONTENT_FREE:
        prompt = builder.build(Row(0, dict.fromkeys(builder.templates.columns, text), f"the input {text!r}"))
        if prompt.error is not None:
            raise JobFileError(
                f"{inputs.job.where('generate.calibrate')}: there is no prompt with {text!r} in every column "
                f"({prompt.error.kind}: {prompt.error.message}); write `calibrate: batch` or leave it out"
            )
        yield prompt


def _scored(engine: "Engine", prompts: Iterable[PromptResult], stop: StopRequest) -> Iterator[Completion]:
    asked: list[Hashable] = []
    for number, prompt in enumerate(prompts):
        if prompt.token_ids is not None:
            engine.add(Request(("prior", number), prompt.token_ids, targets=prompt.choices))
            asked.append(("prior", number))
    done: dict[Hashable, Completion] = {}
    while engine.busy:
        stop.check()
        done |= {completion.request_id: completion for completion in engine.step()}
    yield from map(done.__getitem__, asked)
