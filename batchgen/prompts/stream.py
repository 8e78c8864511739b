"""Prompts in the order of their rows, built ahead of the engine: by worker processes, or in place."""

import itertools
import logging
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing.connection import wait

from batchgen.data.rows import Row
from batchgen.errors import EngineError
from batchgen.prompts.builder import PromptBuilder, PromptRecipe, PromptResult
from batchgen.prompts.marks import texts_in

_log = logging.getLogger(__name__)

_ROWS_PER_TASK = 64
_CHARS_PER_TASK = 2**19
_TASKS_AHEAD = 4  # for each worker

_NO_ROW = Row(-1, {}, "")
_builder: PromptBuilder | None = None  # of a worker process


def prompt_stream(builder: PromptBuilder | PromptRecipe, rows: Iterable[Row], workers: int) -> Generator[PromptResult]:
    """Build the prompt of each row, in order.

    With `workers` processes (started fresh, never forked), at most a few tasks of 64 rows or half a million characters
    are under way for each: memory does not grow with the input. A dead worker raises EngineError. With 0 workers, rows
    are built one by one as they are asked for. Warns once of texts that bring their own BOS.
    """
    is_warned = False
    for result in _results(builder, rows, workers):
        if result.has_own_bos and not is_warned:
            is_warned = True
            _log.warning("%s: the text begins with a BOS token, so none is added (told once)", result.row.place)
        yield result


def _results(builder: PromptBuilder | PromptRecipe, rows: Iterable[Row], workers: int) -> Iterator[PromptResult]:
    if workers == 0:
        here = builder if isinstance(builder, PromptBuilder) else PromptBuilder(builder)
        yield from map(here.build, rows)
        return
    recipe = builder.recipe if isinstance(builder, PromptBuilder) else builder
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(recipe,))
    pending: deque[tuple[list[Row], Future[list[PromptResult]]]] = deque()
    tasks = _tasks(rows)
    try:
        while True:
            for task in itertools.islice(tasks, workers * _TASKS_AHEAD - len(pending)):
                pending.append((task, pool.submit(_build, task)))
            if not pending:
                return
            task, future = pending.popleft()
            yield from map(_with_row, future.result(), task)
    except BrokenProcessPool as error:
        raise EngineError(
            "a process that builds prompts died (killed for its memory, perhaps). "
            "Run the job again to resume; engine.prompt_workers sets how many there are"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _with_row(result: PromptResult, row: Row) -> PromptResult:
    return replace(result, row=row)


def _tasks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    task: list[Row] = []
    chars = 0
    for row in rows:
        task.append(row)
        chars += sum(map(len, texts_in(list(row.values.values()))))
        if len(task) == _ROWS_PER_TASK or chars >= _CHARS_PER_TASK:
            yield task
            task, chars = [], 0
    if task:
        yield task


def _start_worker(recipe: PromptRecipe) -> None:
    global _builder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _builder = PromptBuilder(recipe)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _build(rows: list[Row]) -> list[PromptResult]:
    assert _builder is not None
    # The parent has the rows: only what is new goes back.
    return [replace(_builder.build(row), row=_NO_ROW) for row in rows]
