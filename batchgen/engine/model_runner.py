"""Runs batches on the device: owns the KV pages and the last token of every row, which feeds the next step there."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.batch import Batch, Tree
from batchgen.engine.config import Limits
from batchgen.engine.cuda_graphs import DecodeInputs, PrefillInputs, StepGraphs, Steps
from batchgen.engine.decode_work import DecodePlanner
from batchgen.engine.request import TokenLogprob
from batchgen.engine.sampler import Sampled, Sampler
from batchgen.engine.sequence import Ints
from batchgen.engine.transfer import Array, Download, upload
from batchgen.models.config import ModelConfig
from batchgen_kernels import AttentionMetadata, TokenTree, chosen_logprobs
from batchgen_kernels.attention_gpu import PREFILL_ROWS

KVPages = tuple[Tensor, Tensor]
_NO_SCORES: npt.NDArray[np.float32] = np.empty(0, np.float32)
LARGE_HIDDEN_SIZE = 2048
"""Of models whose steps keep a GPU busy for longer than the host takes to launch them."""


class CausalModel(Protocol):
    """What the engine asks of a model; batchgen.models.decoder.Model has it."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    max_length: int
    """Positions that the model has rotary tables for."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: list[KVPages],
        meta: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        """Write the KV of T tokens and return the hidden states `[S, H]` of those in `rows` (None: all)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[S, vocab_size]`."""

    def make_batch_invariant(self) -> None:
        """Let nothing but a row itself have a say in its bits, on a GPU. Raises EngineError where that can't be had."""


class StepOutput(NamedTuple):
    """What the host reads of a step: per draw a token and whether its logits were finite, per score a number."""

    tokens: Ints
    finite: npt.NDArray[np.bool_]
    logprobs: dict[int, TokenLogprob]
    """Of the draws that want them, by their number."""
    scores: npt.NDArray[np.float32]


class LaunchedStep:
    """A step that the device may still be busy with."""

    def __init__(self, batch: Batch, sampled: Sampled | None, scores: Tensor | None) -> None:
        self.batch = batch
        logprobs = (sampled and sampled.logprobs) or ()
        self._sampled = Download([sampled.ids, sampled.finite, *logprobs] if sampled else [])
        self._scores = Download([] if scores is None else [scores])

    def read(self) -> StepOutput:
        """Wait for the step and bring its results to the host."""
        scores = next(iter(self._scores.wait()), _NO_SCORES)
        if not self.batch.draws:
            return StepOutput(np.empty(0, np.int64), np.empty(0, np.bool_), {}, scores)
        tokens, finite, *logprobs = self._sampled.wait()
        return StepOutput(tokens, finite, self._logprobs(tokens, logprobs) if logprobs else {}, scores)

    def _logprobs(self, tokens: Ints, logprobs: list[Array]) -> dict[int, TokenLogprob]:
        asked = ((number, seq.request.params.logprobs) for number, seq in enumerate(self.batch.draws))
        wanted = [(number, count) for number, count in asked if count is not None]
        values = zip(*(array.tolist() for array in logprobs), strict=True)
        return {
            number: TokenLogprob(int(tokens[number]), chosen, tuple(zip(ids[:count], top[:count], strict=True)))
            for (number, count), (chosen, ids, top) in zip(wanted, values, strict=True)
        }


class ModelRunner:
    """Owns everything on the device but the weights. On a GPU all its work is on one stream of its own.

    With `batch_invariant`, attention of a token is done the same way whatever else is in the step. Without
    `share_pages`, no rows read pages together.
    """

    def __init__(
        self,
        model: CausalModel,
        limits: Limits,
        num_tokens: int,
        *,
        cuda_graphs: bool = True,
        batch_invariant: bool = False,
        share_pages: bool = True,
    ) -> None:
        self._model, self._num_tokens, self._batch_invariant = model, num_tokens, batch_invariant
        config, device = model.config, model.device
        shape = (limits.num_pages, config.num_kv_heads, limits.page_size, config.head_dim)
        # Zeros: what a kernel loads and masks must be a number, since 0 * NaN is NaN.
        self._kv = [
            (torch.zeros(shape, dtype=model.dtype, device=device), torch.zeros(shape, dtype=model.dtype, device=device))
            for _ in range(config.num_layers)
        ]
        # The last row is nobody's: a graph's batch is padded with it.
        self._last_tokens = torch.zeros(limits.max_rows + 1, dtype=torch.int64, device=device)
        self._sampler = Sampler(limits.max_rows + 1, num_tokens, device)
        self._stream: AbstractContextManager[object] = nullcontext()
        self._graphs: StepGraphs | None = None
        self._planner: DecodePlanner | None = None
        self._always_trees = False
        if device.type == "cuda":
            stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            self._stream = torch.cuda.stream(stream)
            item_bytes = model.dtype.itemsize
            # A window may hide what others share; one that holds every sequence hides nothing.
            windowed = any(window and window < model.max_length for window in config.layer_windows)
            share = share_pages and not (batch_invariant or windowed)
            self._planner = DecodePlanner(config, limits.page_size, item_bytes, share=share)
            # Beside a trie other kernels run, for all rows of a step: then they always do. A window has no tries.
            self._always_trees = batch_invariant and not windowed
            if cuda_graphs:
                steps = Steps(self._decode, self._decode_and_draw, self._prefill)
                # The launches of a large model's prefill steps are shorter than the steps themselves.
                small = config.hidden_size < LARGE_HIDDEN_SIZE
                self._graphs = StepGraphs(steps, self._planner, limits, device, prefill=small)

    @torch.inference_mode()
    def launch(self, batch: Batch, masks: Callable[[], Tensor] | None = None) -> LaunchedStep:
        """Queue one step on the device. Nothing here waits for it.

        `masks` makes the token masks of the draws that follow a grammar; it is called once all before them is queued.
        """
        with self._stream:
            if self._graphs and batch.token_ids is None and self._sampler.plain(batch.rows):
                return LaunchedStep(batch, self._graphs.draw(batch), None)
            hidden = self._hidden(batch)
            if not len(hidden):
                return LaunchedStep(batch, None, None)
            return LaunchedStep(batch, self._sample(hidden, batch, masks), self._score(hidden, batch))

    @property
    def captured(self) -> tuple[int, float]:
        """CUDA graphs captured so far, and the seconds that it took."""
        return self._graphs.captured if self._graphs else (0, 0.0)

    @torch.inference_mode()
    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN."""
        with self._stream:
            for tensor in (tensor for layer in self._kv for tensor in layer):
                tensor[pages] = torch.nan

    def _hidden(self, batch: Batch) -> Tensor:
        """The hidden states of the tokens that are wanted: by a graph, or else launch by launch."""
        if self._always_trees and batch.token_ids is not None and batch.tree is None:
            batch = batch._replace(tree=Tree.none(batch.kv_lens))
        if self._graphs:
            hidden = self._graphs.decode(batch) if batch.token_ids is None else self._graphs.prefill(batch)
            if hidden is not None:
                return hidden
        arrays: list[Array] = [batch.rows, batch.positions, batch.slots]
        arrays += batch.block_table, batch.query_start, batch.kv_lens
        plan, work = None, None
        if self._planner and batch.token_ids is None:
            plan = self._planner.plan(batch, batch.kv_lens)
            arrays += plan[:4]
        elif batch.tree is not None:
            arrays += batch.tree
        rows, positions, slots, block_table, query_start, kv_lens, *others = self._upload(*arrays)
        tree = None if batch.tree is None else TokenTree(*others)
        max_query_len = batch.max_query_len
        if self._planner and plan:
            work = self._planner.on_device(others, plan.num_parts)
        elif self._batch_invariant:  # short prompts are no reason for another kernel, or for smaller tiles
            max_query_len = max(PREFILL_ROWS, max_query_len)
        copies = self._upload(batch.copies)[0] if batch.copies.size else None
        return self._model(
            self._last_tokens[rows] if batch.token_ids is None else self._upload(batch.token_ids)[0],
            positions,
            slots,
            self._kv,
            AttentionMetadata(block_table, query_start, kv_lens, max_query_len, batch.max_kv_len, work, tree, copies),
            None if batch.wanted is None else self._upload(batch.wanted)[0],
        )

    def _decode(self, inputs: DecodeInputs, meta: AttentionMetadata) -> Tensor:
        return self._model(self._last_tokens[inputs.rows], inputs.positions, inputs.slots, self._kv, meta, None)

    def _decode_and_draw(self, inputs: DecodeInputs, meta: AttentionMetadata) -> Sampled:
        hidden = self._decode(inputs, meta)
        sampled = self._sampler.draw(self._logits(hidden), hidden, inputs.rows, inputs.draw_index)
        self._last_tokens[inputs.rows] = sampled.ids
        return sampled

    def _prefill(self, inputs: PrefillInputs, meta: AttentionMetadata) -> Tensor:
        return self._model(inputs.token_ids, inputs.positions, inputs.slots, self._kv, meta, inputs.wanted)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Logits of the tokens that can be drawn; the embedding may be padded beyond them."""
        return self._model.logits(hidden)[:, : self._num_tokens].contiguous()

    def _sample(self, hidden: Tensor, batch: Batch, masks: Callable[[], Tensor] | None) -> Sampled | None:
        if not batch.draws:
            return None
        if batch.first_draw:
            self._sampler.assign(batch.draws)
        if batch.draw_from is not None:
            hidden = hidden[self._upload(batch.draw_from)[0]]
        logits = self._logits(hidden)  # launched before the masks are made
        sampled = self._sampler.sample(logits, hidden, batch, masks() if masks and len(batch.constrained) else None)
        self._last_tokens[self._upload(batch.draw_rows)[0]] = sampled.ids
        return sampled

    def _score(self, hidden: Tensor, batch: Batch) -> Tensor | None:
        """Float32 [K], from the logits of no more tokens at a time than a decode step has: tries may have thousands."""
        if not len(batch.score_ids):
            return None
        rows, ids = self._upload(batch.score_from, batch.score_ids)
        most = len(self._last_tokens)
        starts = range(0, len(hidden), most)
        ends = np.searchsorted(batch.score_from, [start + most for start in starts]).tolist()
        return torch.cat(
            [
                chosen_logprobs(self._logits(hidden[start : start + most]), rows[begin:end] - start, ids[begin:end])
                for start, begin, end in zip(starts, [0, *ends[:-1]], ends, strict=True)
            ]
        )

    def _upload(self, *arrays: Array) -> list[Tensor]:
        return upload(arrays, self._model.device)
