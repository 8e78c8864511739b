"""Prompts in the order that computes least: read window by window, kept on local disk, planned, and handed on.

While the model loads, and while the engine works on one window, a thread reads the next.
"""

import pickle
import threading
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import NamedTuple, Self, TypeVar

import numpy as np
import xxhash

from batchgen import openai_params
from batchgen.data.rows import Row
from batchgen.errors import RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Job
from batchgen.job.units import parse_tokens
from batchgen.planning.plan import Counts, Plan, make_plan
from batchgen.planning.spool import Ints, Spool
from batchgen.prompts.builder import PromptResult
from batchgen.row_params import brings_seed, row_generate

_MOST_FAILED = 10_000  # rows without a prompt are held in memory: so many end a window
_BLOCK_ROWS = 4096
_LOOK_SECONDS = 0.2
_NO_LIMIT = 2**31 - 1
_LARGEST_KEY = 2**63 - 1
_T = TypeVar("_T")


class PlannedPrompt(NamedTuple):
    """A prompt to run, the equal ones that get the same answer, and the tokens that the next one begins with too."""

    prompt: PromptResult
    merged: tuple[PromptResult, ...] = ()
    shared_with_next: int = 0


@dataclass(slots=True)
class Window:
    """Rows that are planned together. `failed` have no prompt; those that have one wait in the spool.

    `truncated` counts the prompts among them that were cut to fit.
    """

    spool: Spool = field(default_factory=Spool)
    failed: list[PromptResult] = field(default_factory=list)
    truncated: int = 0
    shares: bool = True
    """Whether the engine keeps KV cache for prompts to come."""

    def plan(self, page_size: int) -> Plan:
        """The plan of the prompts."""
        plan = make_plan(self.spool.tokens(), self.spool.outputs, self.spool.merge_keys, page_size)
        return plan if self.shares else plan._replace(counts=plan.counts.without_sharing())

    def prompts(self, plan: Plan) -> Iterator[PlannedPrompt]:
        """What failed first, then the prompts in planned order."""
        yield from map(PlannedPrompt, self.failed)
        merged = _Merged(plan.merged_into)
        self.spool.announce(plan.order[:_BLOCK_ROWS].tolist())
        for begin in range(0, len(plan.order), _BLOCK_ROWS):
            self.spool.announce(plan.order[begin + _BLOCK_ROWS : begin + 2 * _BLOCK_ROWS].tolist())
            numbers = plan.order[begin : begin + _BLOCK_ROWS].tolist()
            shared = plan.shared[begin + 1 : begin + 1 + _BLOCK_ROWS].tolist()
            # What the next window begins with is not known: all of the last prompt is kept for it.
            for number, shared_with_next in zip_longest(numbers, shared, fillvalue=_NO_LIMIT):
                prompt = self.prompt(number)
                assert prompt.token_ids is not None
                others = tuple(map(self.prompt, merged.into(number)))
                yield PlannedPrompt(prompt, others, min(shared_with_next, len(prompt.token_ids)))

    def prompt(self, number: int) -> PromptResult:
        """A prompt of the spool, with the values of its row that were kept."""
        prompt: PromptResult = pickle.loads(self.spool.record(number))
        return replace(prompt, token_ids=self.spool.token_ids(number))


class _Merged:
    """Prompts that others answer for, by those others."""

    def __init__(self, merged_into: Ints) -> None:
        others = np.flatnonzero(merged_into != np.arange(len(merged_into)))
        self._others = others[np.argsort(merged_into[others], kind="stable")]
        self._into = merged_into[self._others]

    def into(self, number: int) -> list[int]:
        """The prompts merged into this one."""
        begin, end = np.searchsorted(self._into, (number, number + 1))
        found: list[int] = self._others[begin:end].tolist()
        return found


class WindowReader:
    """Cuts a job's prompts into windows. `kept` are the columns whose values stay."""

    def __init__(self, job: Job, kept: Collection[str]) -> None:
        self._job, self._generate = job, job.generate
        self._kept = frozenset(kept) | (openai_params.COLUMNS if job.input.format == "openai" else frozenset())
        self._rows, self._tokens = _sizes(job.plan.window)
        self._stopped = threading.Event()
        self.num_read = 0
        """Prompts read so far."""

    def stop(self) -> None:
        """End the window that is being read."""
        self._stopped.set()

    def read(self, prompts: Iterator[PromptResult]) -> Window | None:
        """The next window; None when there is nothing left. The caller closes its spool."""
        with ExitStack() as undo:
            window = Window(shares=self._job.engine.prefix_caching)
            undo.callback(window.spool.close)
            for prompt in prompts:
                self.num_read += 1
                if prompt.token_ids is None:
                    window.failed.append(prompt)
                else:
                    self._keep(window.spool, prompt)
                    window.truncated += prompt.truncated_tokens > 0
                if self._stopped.is_set() or self._is_full(window):
                    break
            if not len(window.spool) and not window.failed:
                return None
            undo.pop_all()
            return window

    def _is_full(self, window: Window) -> bool:
        rows = len(window.spool) + len(window.failed)
        return rows >= self._rows or window.spool.num_tokens >= self._tokens or len(window.failed) >= _MOST_FAILED

    def _keep(self, spool: Spool, prompt: PromptResult) -> None:
        assert prompt.token_ids is not None
        row = prompt.row
        generate = row_generate(self._job, prompt)
        values = {name: value for name, value in row.values.items() if name in self._kept}
        record = replace(prompt, row=Row(row.index, values, row.place), token_ids=None, text="")
        spool.append(
            prompt.token_ids,
            pickle.dumps(record, pickle.HIGHEST_PROTOCOL),
            outputs=_expected_outputs(generate),
            merge_key=self._merge_key(generate, prompt),
        )

    def _merge_key(self, generate: Generate | RowError, prompt: PromptResult) -> int:
        """The same for prompts that get the same answer when their tokens are the same; -1 where that can't be said.

        It can when the likeliest token or choice is taken, or when rows ask for the same seed.
        """
        if isinstance(generate, RowError):
            return -1
        is_certain = generate.is_certain
        if generate is self._generate:
            return hash((prompt.choices, prompt.labels)) >> 1 & _LARGEST_KEY if is_certain else -1
        if not is_certain and not brings_seed(self._job, prompt):
            return -1
        fields = generate.model_dump_json(exclude={"seed"} if is_certain else None)
        return int(xxhash.xxh3_64_intdigest(f"{fields} {prompt.choices} {prompt.labels}".encode()) & _LARGEST_KEY)


class PlannedPrompts:
    """A job's prompts in planned order, as a context: inside, a thread reads one window ahead, beginning at once.

    `counts` are what the windows planned so far come to; None when the job keeps the order of its input. The prompts
    are closed at the end.
    """

    def __init__(self, job: Job, prompts: Generator[PromptResult], kept: Collection[str]) -> None:
        self._reader = WindowReader(job, kept)
        self._prompts = prompts
        self._thread = ThreadPoolExecutor(1, "batchgen-plan")
        self._coming: Future[Window | None] | None = None
        self.counts = None if job.plan.order == "input" else Counts()

    @property
    def num_read(self) -> int:
        """Prompts that wait in windows or were handed on."""
        return self._reader.num_read

    def __enter__(self) -> Self:
        if self.counts is not None:
            self._coming = self._thread.submit(self._reader.read, self._prompts)
        return self

    def __exit__(self, *error: object) -> None:
        self._reader.stop()
        self._thread.shutdown(wait=True)
        if self._coming is not None:
            self._coming.add_done_callback(_close)
        self._prompts.close()

    def in_order(self, page_size: int, wait: Callable[[], None]) -> Iterator[PlannedPrompt]:
        """All of them. `wait` is called now and then while there is nothing to hand on."""
        if self.counts is None or self._coming is None:
            yield from map(PlannedPrompt, self._prompts)
            return
        while (window := _result(self._coming, wait)) is not None:
            with window.spool:
                planning = self._thread.submit(window.plan, page_size)
                self._coming = self._thread.submit(self._reader.read, self._prompts)
                plan = _result(planning, wait)
                self.counts = self.counts.plus(plan.counts)
                yield from window.prompts(plan)


def _expected_outputs(generate: Generate | RowError) -> int:
    """The tokens that an answer may have."""
    if isinstance(generate, RowError) or generate.scores:
        return 0
    return _NO_LIMIT if generate.max_tokens is None else generate.max_tokens * generate.n


def _sizes(window: str | int) -> tuple[float, float]:
    """Most rows and most tokens of a window."""
    if isinstance(window, int):
        return window, float("inf")
    return float("inf"), float("inf") if window == "all" else parse_tokens(window)


def _close(coming: "Future[Window | None]") -> None:
    """Nobody takes this window."""
    if coming.exception() is None and (window := coming.result()) is not None:
        window.spool.close()


def _result(coming: "Future[_T]", wait: Callable[[], None]) -> _T:
    while True:
        try:
            return coming.result(_LOOK_SECONDS)
        except NotYet:
            if coming.done():  # it failed with a timeout of its own
                raise
            wait()
