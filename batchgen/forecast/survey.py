"""All prompts of a job, built and planned without a model: what there is to compute."""

import heapq
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import numpy as np

from batchgen.inputs import Inputs
from batchgen.planning.plan import Counts, Plan
from batchgen.planning.spool import Tokens
from batchgen.prompts.builder import PromptResult
from batchgen.prompts.stream import prompt_stream
from batchgen.windows import Window, WindowReader


class Group(NamedTuple):
    """A group of rows, by the tokens that they begin with."""

    saved: int
    rows: int
    prefix: tuple[int, ...]


@dataclass
class Survey:
    """What all windows come to. The arrays have an entry for each prompt that runs, in planned order.

    `shared[i]` is the prefix that prompt i reads together with its group, `outputs[i]` the tokens that it may answer.
    `failed` counts rows without a prompt by the kind of error, `skipped` ones among them.
    """

    page_size: int
    rows: int = 0
    windows: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: int = 0
    truncated: int = 0
    counts: Counts = field(default_factory=Counts)
    first_counts: Counts = field(default_factory=Counts)
    """Of the first window."""
    num_groups: int = 0
    grouped_rows: int = 0
    largest: list[Group] = field(default_factory=list)
    sample: list[PromptResult] = field(default_factory=list)
    _lengths: list[Tokens] = field(default_factory=list)
    _shared: list[Tokens] = field(default_factory=list)
    _outputs: list[Tokens] = field(default_factory=list)

    @property
    def lengths(self) -> Tokens:
        """Tokens of each prompt."""
        return _joined(self._lengths)

    @property
    def shared(self) -> Tokens:
        """Tokens that each prompt's group shares; 0 for none."""
        return _joined(self._shared)

    @property
    def outputs(self) -> Tokens:
        """Most tokens of each answer; 0 for choices."""
        return _joined(self._outputs)

    def add(self, window: Window, plan: Plan, num_largest: int, sample_every: int) -> None:
        """Count one more window."""
        self.windows += 1
        self.rows += len(window.spool) + len(window.failed)
        self.failed.update(prompt.error.kind for prompt in window.failed if prompt.error is not None)
        self.truncated += window.truncated
        self.skipped += sum(prompt.skipped for prompt in window.failed)
        self.counts = self.counts.plus(plan.counts)
        self.first_counts = plan.counts if self.windows == 1 else self.first_counts
        self._lengths.append(window.spool.tokens().lengths[plan.order])
        self._outputs.append(window.spool.outputs[plan.order])
        prefix = np.append(plan.groups.prefix, np.int32(0))  # group -1 has none
        self._shared.append(prefix[plan.group].astype(np.int32))
        self.num_groups += len(plan.groups.rows)
        self.grouped_rows += int(plan.groups.rows.sum())
        self._add_largest(window, plan, num_largest)
        self.sample += map(window.prompt, range(0, len(window.spool), sample_every))

    def _add_largest(self, window: Window, plan: Plan, num_largest: int) -> None:
        saved = (plan.groups.rows - 1) * plan.groups.prefix
        for group in np.argsort(-saved, kind="stable")[:num_largest].tolist():
            prefix = window.spool.token_ids(int(plan.groups.first[group]))[: plan.groups.prefix[group]]
            self.largest.append(Group(int(saved[group]), int(plan.groups.rows[group]), tuple(prefix.tolist())))
        self.largest = heapq.nlargest(num_largest, self.largest)


def survey(
    inputs: Inputs, page_size: int, *, num_largest: int = 0, num_samples: int = 0, most_windows: int | None = None
) -> Survey:
    """Build and plan all prompts, or those of `most_windows`.

    Keeps the `num_largest` groups that save most, and about `num_samples` prompts.
    """
    found = Survey(page_size)
    reader = WindowReader(inputs.job, ())
    rows = inputs.source.num_rows
    sample_every = max(1, rows // num_samples) if num_samples else rows + 1
    builder = inputs.builder(datetime.now().astimezone())
    with closing(prompt_stream(builder, inputs.source.rows(), inputs.num_workers(rows))) as prompts:
        while found.windows != most_windows and (window := reader.read(prompts)) is not None:
            with window.spool:
                found.add(window, window.plan(page_size), num_largest, sample_every)
    del found.sample[num_samples:]
    return found


def _joined(parts: list[Tokens]) -> Tokens:
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
