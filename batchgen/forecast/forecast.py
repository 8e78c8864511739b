"""`forecast_job` builds and plans all prompts of a job without running it, and says what running it will take."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from batchgen.forecast.estimate import (
    CacheFit,
    TimeEstimate,
    cache_fit,
    machine_estimate,
    page_size_of,
    pilot_estimate,
    run_pilot,
)
from batchgen.forecast.survey import Group, Survey, survey
from batchgen.inputs import Inputs, open_inputs
from batchgen.job.spec import Job, Prompt
from batchgen.observe.report import format_seconds
from batchgen.prompts.late_text import late_text
from batchgen.prompts.tokenizer import Tokenizer

_SHOWN_TOKENS = 24  # of each end of a group's prefix
_SHOWN_CHARS = 60
_LEAST_TOKENS, _LEAST_SHARE = 8, 0.01  # of a text, and of the computed tokens, that are worth an advice


@dataclass(frozen=True, slots=True)
class ShownGroup:
    """A group, with the start and the end of the text that its rows share."""

    rows: int
    prefix_tokens: int
    start: str
    end: str


@dataclass(frozen=True, slots=True)
class Advice:
    """A text that more rows could share if it came first, and the tokens that this would save in the first rows."""

    field: str
    text: str
    saved_tokens: int
    rows: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a job will compute. `prompts` have token ids; `failed` rows have none, counted by the kind of error."""

    rows: int
    prompts: int
    failed: dict[str, int]
    skipped: int
    truncated: int
    windows: int
    page_size: int
    prompt_tokens: int
    computed_tokens: int
    distinct_tokens: int
    merged_rows: int
    num_groups: int
    grouped_rows: int
    largest_groups: tuple[ShownGroup, ...]
    cache: CacheFit
    time: TimeEstimate | None
    advice: tuple[Advice, ...]
    note: str | None

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)

    def summary(self) -> str:
        """A few lines for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        failed = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.failed.items()))
        details = [
            f"{self.prompts:,} prompts",
            *([f"{sum(self.failed.values()):,} without ({failed})"] if failed else []),
        ]
        details += [f"{self.skipped:,} of them skipped"] if self.skipped else []
        details += [f"{self.truncated:,} cut to fit"] if self.truncated else []
        yield f"rows    {self.rows:,}: {', '.join(details)}"
        share = self.computed_tokens / max(1, self.prompt_tokens)
        yield (
            f"tokens  {self.prompt_tokens:,} of prompts, {self.computed_tokens:,} to compute ({share:.0%}); "
            f"{self.distinct_tokens:,} are distinct"
        )
        if self.merged_rows:
            yield f"equal   {self.merged_rows:,} rows take the answer of an equal prompt"
        yield f"groups  {self.num_groups:,} with {self.grouped_rows:,} rows" + (":" if self.largest_groups else "")
        for group in self.largest_groups:
            text = f'"{group.start}"' if not group.end else f'"{group.start}" ... "{group.end}"'
            yield f"        {group.rows:>9,} rows share {group.prefix_tokens:,} tokens: {text}"
        yield self._cache_line()
        yield self._time_line()
        for advice in self.advice:
            yield (
                f'advice  {advice.field} has "{_shorten(advice.text)}" behind what changes from row to row; '
                f"in front of it, it would save {advice.saved_tokens:,} tokens"
                + (f" of the first {advice.rows:,} rows" if advice.rows < self.rows else "")
                + ". It is another prompt then: try it first"
            )
        if self.note:
            yield f"note    {self.note}"

    def _cache_line(self) -> str:
        cache = self.cache
        fit = f"about {cache.rows_at_once:,} rows at once" if cache.fits else "the longest row does not fit"
        return (
            f"cache   {cache.tokens:,} tokens of {cache.bytes_per_token:,} bytes on {cache.machine}: {fit}; "
            f"the longest row has up to {cache.longest_row:,} tokens"
        )

    def _time_line(self) -> str:
        if self.time is None:
            return "time    not known: `--pilot 32` runs 32 rows to find out, `--machine h200` gives a GPU's"
        least = self.time.least_seconds
        return (
            f"time    {format_seconds(self.time.seconds)} for {self.computed_tokens:,} prompt and "
            f"{self.time.output_tokens:,} output tokens, by {self.time.basis}"
            + ("" if least is None else f"; no run takes less than {format_seconds(least)}")
        )


def forecast_job(job: Job, *, machine: str | None = None, pilot: int = 0, num_groups: int = 5) -> Forecast:
    """Plan a whole job. `pilot` rows are really run, for the length of answers and for the time here.

    A `machine` has a time of its own.
    Raises JobFileError or InputError for what `run_job` would raise them for.
    """
    inputs = open_inputs(job)
    page_size = page_size_of(inputs, machine)
    found = survey(inputs, page_size, num_largest=num_groups, num_samples=pilot)
    fit = cache_fit(inputs, found, machine)
    time = None
    pilot_run = run_pilot(inputs, found.sample) if found.sample else None
    if machine is not None and len(found.lengths):
        time = machine_estimate(inputs, found, machine, fit, pilot_run)
    elif pilot_run is not None:
        time = pilot_estimate(found, pilot_run)
    return Forecast(
        rows=found.rows,
        prompts=found.counts.prompts,
        failed=dict(found.failed),
        skipped=found.skipped,
        truncated=found.truncated,
        windows=found.windows,
        page_size=page_size,
        prompt_tokens=found.counts.prompt_tokens,
        computed_tokens=found.counts.computed_tokens,
        distinct_tokens=found.counts.distinct_tokens,
        merged_rows=found.counts.merged_prompts,
        num_groups=found.num_groups,
        grouped_rows=found.grouped_rows,
        largest_groups=tuple(_shown(group, inputs.tokenizer) for group in found.largest),
        cache=fit,
        time=time,
        advice=tuple(_advice(inputs, found)),
        note=_note(job),
    )


def _note(job: Job) -> str | None:
    if job.plan.order == "input":
        return (
            "plan.order is input: the figures are those of the planned order. In the input's own, rows share whole "
            "pages as far as the cache still holds them, and equal prompts are all computed"
        )
    return None if job.engine.prefix_caching else "engine.prefix_caching is false: nothing is shared"


def _shown(group: Group, tokenizer: Tokenizer) -> ShownGroup:
    start = _one_line(tokenizer.decode(group.prefix[:_SHOWN_TOKENS], skip_special_tokens=False))
    is_long = len(group.prefix) > 2 * _SHOWN_TOKENS
    end = _one_line(tokenizer.decode(group.prefix[-_SHOWN_TOKENS:], skip_special_tokens=False)) if is_long else ""
    return ShownGroup(group.rows, len(group.prefix), start[:_SHOWN_CHARS], end[-_SHOWN_CHARS:])


def _advice(inputs: Inputs, found: Survey) -> Iterator[Advice]:
    """A text whose place in the templates spoils sharing: the first window is planned again with it in front."""
    prompt = inputs.job.prompt
    fields = _template_fields(prompt)
    late = late_text(*fields.values())
    if late is None or len(inputs.tokenizer.encode_plain(late.text)) < _LEAST_TOKENS:
        return
    job = inputs.job.model_copy(update={"prompt": _with_templates(prompt, late.moved)})
    moved = survey(replace(inputs, job=job), found.page_size, most_windows=1)
    saved = found.first_counts.computed_tokens - moved.counts.computed_tokens
    if saved > _LEAST_SHARE * found.first_counts.computed_tokens:
        yield Advice(list(fields)[late.source], late.text, saved, moved.rows)


def _template_fields(prompt: Prompt) -> dict[str, str]:
    """The templates of a prompt by the names of their fields, in the order in which they are put out."""
    if isinstance(prompt.messages, list):
        contents = {f"prompt.messages.{i}.content": message.get("content") for i, message in enumerate(prompt.messages)}
        return {name: content for name, content in contents.items() if isinstance(content, str)}
    named = {f"prompt.{name}": getattr(prompt, name) for name in ("text", "system", "user")}
    return {name: source for name, source in named.items() if source is not None}


def _with_templates(prompt: Prompt, sources: Sequence[str]) -> Prompt:
    """The prompt with other templates in the fields that `_template_fields` names."""
    names = [name.split(".") for name in _template_fields(prompt)]
    if not isinstance(prompt.messages, list):
        return prompt.model_copy(update={name: source for (_, name), source in zip(names, sources, strict=True)})
    messages = list(prompt.messages)
    for (_, _, place, _), source in zip(names, sources, strict=True):
        messages[int(place)] = {**messages[int(place)], "content": source}
    return prompt.model_copy(update={"messages": messages})


def _shorten(text: str) -> str:
    line = _one_line(text)
    return line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 3] + "..."


def _one_line(text: str) -> str:
    """A text of the data, without what would move the cursor or turn the line around."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))
