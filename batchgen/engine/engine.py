"""The engine: requests of token ids in, completions in order of finishing out. `Engine.step` is the life of a step."""

import dataclasses
import gc
import time
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.admission import Admission
from batchgen.engine.batch import Batch, build_batch
from batchgen.engine.completions import NON_FINITE, completed, failed, scored
from batchgen.engine.config import EngineConfig
from batchgen.engine.device import choose_device, choose_dtype, resolve_limits
from batchgen.engine.kv_cache import PagePool
from batchgen.engine.masks import refused, token_masks, tokens_known
from batchgen.engine.model_runner import CausalModel, LaunchedStep, ModelRunner, StepOutput
from batchgen.engine.request import Completion, Request, RequestError
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.sequence import RowTable, Sequence
from batchgen.engine.stats import EngineStats
from batchgen.engine.step import Step
from batchgen.errors import EngineError, InternalError
from batchgen.models.load import load_model


class Engine:
    """Answers requests of token ids with one model.

    ```python
    engine = Engine.load("HuggingFaceTB/SmolLM2-135M-Instruct", EngineConfig())
    for completion in engine.generate([Request("a", token_ids)]):
        print(completion.request_id, completion.token_ids)
    ```
    `num_tokens` is the size of the tokenizer's vocabulary, where the model's embedding is padded beyond it: only
    smaller ids are drawn.
    """

    def __init__(
        self, model: CausalModel, config: EngineConfig | None = None, *, num_tokens: int | None = None
    ) -> None:
        self.config = config = _batch_invariant(model, config or EngineConfig())
        if config.threads:
            torch.set_num_threads(config.threads)
        vocab_size = model.config.vocab_size
        drawn = self._num_tokens = min(num_tokens or vocab_size, vocab_size)
        self._device = model.device
        began = time.perf_counter()
        self.limits = resolve_limits(config, model, drawn)
        sized = time.perf_counter()
        self._runner = ModelRunner(
            *(model, self.limits, drawn), cuda_graphs=config.cuda_graphs, batch_invariant=config.batch_invariant
        )
        self.startup_seconds = {"first steps": sized - began, "KV cache": time.perf_counter() - sized}
        """What making the engine took: the largest steps are run once to size the KV cache, which is then filled."""
        self._pool = PagePool(self.limits.num_pages, self._runner.poison if config.poison_freed_pages else None)
        self._table = RowTable(self.limits)
        self._stats = EngineStats()
        self._scheduler = Scheduler(config, self.limits, self._pool, self._table, self._stats)
        eos_ids = frozenset(model.config.eos_token_ids)
        windowed = any(model.config.layer_windows)
        self._admission = Admission(
            self.limits, vocab_size=vocab_size, num_tokens=drawn, eos_ids=eos_ids, windowed=windowed
        )
        self._in_flight: deque[LaunchedStep] = deque()
        self._done: list[Completion] = []

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig | None = None, *, num_tokens: int | None = None) -> "Engine":
        """Load a model (hub id, folder or .gguf file) and make its engine. Raises JobFileError or EngineError."""
        config = config or EngineConfig()
        device = choose_device(config.device)
        dtype = choose_dtype(config.dtype, device)
        began = time.perf_counter()
        try:
            model = load_model(path, device=device, dtype=dtype, max_length=config.max_length)
            loaded = time.perf_counter()
            engine = cls(model, config, num_tokens=num_tokens)
        except torch.OutOfMemoryError as error:
            raise EngineError(f"{path} does not fit on the GPU: take a smaller model ({error})") from error
        engine.startup_seconds = {"weights": loaded - began, **engine.startup_seconds}
        gc.freeze()  # what is there now stays: no collection has to walk through it
        return engine

    def add(self, request: Request) -> None:
        """Queue a request. A bad one comes back as a completion with the finish reason "error", one for each sample."""
        sequences = self._admission.sequences(request)
        if isinstance(sequences, RequestError):
            samples = 1 if request.targets else max(1, request.n)
            self._done.extend(failed(request, sample, sequences) for sample in range(samples))
            return
        self._stats.prompt_tokens += len(request.token_ids)
        for leader in sequences:
            self._stats.forced_tokens += sum(len(seq.outputs) for seq in (leader, *leader.branches))
            self._scheduler.add(leader)

    def step(self) -> list[Completion]:
        """The life of a step: schedule it, launch it, and collect the oldest one in flight. Returns who finished."""
        step = self._schedule()
        if step is not None:
            self._in_flight.extend(self._launch(step))
        if self._in_flight and (step is None or len(self._in_flight) > self.limits.lag):
            self._collect(self._in_flight.popleft())
        done, self._done = self._done, []
        return done

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Answer requests, in order of finishing. They are pulled as rows get free, `max_waiting` ahead."""
        source = iter(requests)
        try:
            while self._pull(source) or self.busy:
                yield from self.step()
        finally:
            self.abort_all()

    def abort_all(self) -> None:
        """Drop every request, with what has finished but not been fetched."""
        self._in_flight.clear()
        self._done.clear()
        self._scheduler.abort_all()

    @property
    def num_waiting(self) -> int:
        """Requests that have not begun."""
        return self._scheduler.num_waiting

    @property
    def num_running(self) -> int:
        """Sequences that are being computed."""
        return self._scheduler.num_running

    @property
    def stats(self) -> EngineStats:
        """What has been done so far."""
        graphs, seconds = self._runner.captured
        return dataclasses.replace(self._stats, graphs=graphs, graph_seconds=seconds)

    def forget_stats(self) -> None:
        """Count anew: what was done so far is no part of the work. Nothing may be under way."""
        for counter in dataclasses.fields(EngineStats):
            setattr(self._stats, counter.name, counter.default)

    def check(self) -> None:
        """Raise InternalError unless the KV pages add up: used, cached and free ones, and every page's users."""
        held = self._scheduler.held_pages
        self._pool.check([*self._table.tables(), held])
        if not self.busy and self._pool.num_used > len(held):
            raise InternalError(f"{self._pool.num_used} KV pages are used, but nothing runs")

    @property
    def busy(self) -> bool:
        """Whether anything waits, runs, or has finished and not been fetched."""
        return bool(self.num_waiting or self.num_running or self._in_flight or self._done)

    def _pull(self, source: Iterator[Request]) -> bool:
        """Queue requests up to `max_waiting`; before the first step, what fills it. False when there was none.

        So the device doesn't wait while requests are read that can be read during that step.
        """
        pulled, idle, tokens = False, not self.busy, 0
        while self.num_waiting + len(self._done) < self.config.max_waiting:
            before = self._stats.prompt_tokens
            request = next(source, None)
            if request is None:
                break
            self.add(request)
            pulled = True
            tokens += self._stats.prompt_tokens - before - request.shared_with_next
            if idle and tokens >= self.limits.max_tokens:
                break
        return pulled

    def _schedule(self) -> Step | None:
        start = time.perf_counter()
        step = self._scheduler.schedule(in_flight=bool(self._in_flight))
        self._stats.schedule_seconds += time.perf_counter() - start
        if step is None and not self._in_flight and self.num_waiting:
            raise InternalError(f"{self.num_waiting} requests wait, nothing runs, and none can be admitted")
        return step

    def _launch(self, step: Step) -> list[LaunchedStep]:
        """Launch a step, in halves when the GPU has no memory for the whole. What has run of it may run again."""
        start = time.perf_counter()
        batch = build_batch(step, self._table, self.limits.page_size)
        try:
            launched = self._runner.launch(batch, partial(self._masks, batch))
        except torch.OutOfMemoryError as error:
            halves = step.halves()
            if not halves:
                raise EngineError(f"the GPU has no memory for a step of a single token: {error}") from error
        else:
            self._stats.launch_seconds += time.perf_counter() - start
            return [launched]
        torch.cuda.empty_cache()
        self._scheduler.shrink()
        self._stats.split_steps += 1
        return [launched for half in halves for launched in self._launch(half)]

    def _masks(self, batch: Batch) -> Tensor:
        """The token masks of a step that is being launched. While the device computes it, earlier ones are read."""
        start = time.perf_counter()
        while self._in_flight and not tokens_known(batch):
            self._collect(self._in_flight.popleft())
        read = time.perf_counter()
        masks = token_masks(batch, self._num_tokens, self._device)
        self._stats.masks += len(masks)
        end = time.perf_counter()
        self._stats.mask_seconds += end - read
        self._stats.launch_seconds -= end - start  # all this happens inside of a launch
        return masks

    def _collect(self, step: LaunchedStep) -> None:
        """Hand the tokens of a step to their sequences, and see who is done."""
        start = time.perf_counter()
        output = step.read()
        read = time.perf_counter()
        self._collect_draws(step.batch, output)
        begin = 0
        for seq, first, end in step.batch.scores:
            seq.edge_logprobs[first:end] = output.scores[begin : begin + end - first]
            begin += end - first
        for seq in step.batch.filled:
            self._scheduler.finish(seq)
            if seq.scores is not None and seq.scores.add(seq):
                self._done.append(scored(seq, seq.scores))
        self._stats.wait_seconds += read - start
        self._stats.collect_seconds += time.perf_counter() - read

    def _collect_draws(self, batch: Batch, output: StepOutput) -> None:
        look = self._table.put_tokens(batch.draw_rows, batch.draw_index, output.tokens)
        not_allowed = refused(batch, output.tokens) if len(batch.constrained) else ()
        for number in np.flatnonzero(look | ~output.finite).tolist():
            seq, drawn, token = batch.draws[number], int(batch.draw_index[number]), int(output.tokens[number])
            if seq.finished:
                continue
            if len(seq.outputs) > drawn:  # what is there by now had to come
                self._stats.discarded_tokens += 1
                continue
            self._table.fetch_tokens(seq, drawn)
            if not output.finite[number]:
                self._done.append(failed(seq.request, seq.sample, NON_FINITE))
            else:
                reason = seq.accept(token, output.logprobs.get(number), allowed=number not in not_allowed)
                self._stats.forced_tokens += seq.num_forced
                if reason is None:
                    if seq.num_forced:
                        self._scheduler.fill_forced(seq)
                    continue
                self._done.append(completed(seq, reason, token))
            self._finish(seq, drawn + 1)

    def _finish(self, seq: Sequence, drawn: int) -> None:
        """Take out a sequence whose answer ends with its draw number `drawn`, counted from one."""
        self._stats.output_tokens += len(seq.outputs)
        self._stats.discarded_tokens += self._table.num_drawn(seq.row) - drawn
        self._scheduler.finish(seq)


def _batch_invariant(model: CausalModel, config: EngineConfig) -> EngineConfig:
    """What `batch_invariant` comes to: products of fixed sizes, and admission by whole answers.

    So nobody is preempted: tokens of an answer that are computed again, as part of a prompt, may have other last bits.
    Raises EngineError where it can't be had.
    """
    if not config.batch_invariant:
        return config
    if model.device.type == "cpu" and model.dtype == torch.float32:
        return dataclasses.replace(config, batch_invariant=False)  # it is so anyway
    if model.device.type == "cpu":
        raise EngineError("engine.batch_invariant in bfloat16 needs a GPU: on a CPU, take dtype: float32 for it")
    model.make_batch_invariant()
    return dataclasses.replace(config, output_reserve=1.0)
