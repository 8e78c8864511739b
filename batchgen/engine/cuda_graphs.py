"""Steps as CUDA graphs: one launch instead of some hundred.

A graph is captured for sizes that are rounded up, when such a step first comes. Its inputs lie in one buffer of its
own, which one copy fills; what is padding reads and writes the padding page.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import Batch
from batchgen.engine.config import Limits, num_pages
from batchgen.engine.decode_work import DecodePlanner
from batchgen.engine.kv_cache import PADDING_PAGE
from batchgen.engine.sampler import Sampled
from batchgen.engine.transfer import Array, pack, unpack
from batchgen_kernels import AttentionMetadata, WorkArrays, WorkRoom

_KV_LENS = [1024 * 4**power for power in range(8)]
"""Bounds of the KV length that graphs are captured for. Attention skips what lies beyond a row's own length."""
_PREFILL_SIZES = 8
"""Prefill steps are padded to eighths of the largest one."""
_TOKENS_PER_PROMPT = 16
"""Prompts of a padded prefill step have this many tokens or more on average; other steps are not captured."""


class DecodeInputs(NamedTuple):
    """A decode step of B rows. int64 [B], but kv_lens int32 [B], block_table int32 [B, pages], and its DecodeWork."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    draw_index: Tensor
    kv_lens: Tensor
    block_table: Tensor
    items: Tensor
    row_parts: Tensor
    shared_items: Tensor
    members: Tensor


class PrefillInputs(NamedTuple):
    """A prefill step of T tokens and B prompts.

    int64 [T], [T], [T], [B] and [2, T]; int32 [B + 1], [B] and [B, pages]. Copies from a slot to itself are padding.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
    copies: Tensor
    query_start: Tensor
    kv_lens: Tensor
    block_table: Tensor


class Steps(NamedTuple):
    """What is captured."""

    decode: Callable[[DecodeInputs, AttentionMetadata], Tensor]
    """A decode step, to its hidden states."""
    draw: Callable[[DecodeInputs, AttentionMetadata], Sampled]
    """A decode step, to its tokens."""
    prefill: Callable[[PrefillInputs, AttentionMetadata], Tensor]
    """A prefill step, to its hidden states."""


class _Shape(NamedTuple):
    """What a graph is captured for."""

    name: str
    size: int
    """Rows, or tokens of a prefill step."""
    max_kv_len: int
    items_per_row: int = 0
    """Of a decode step: own items of attention work, on average, rounded up to a power of two."""
    shared: bool = False
    """Whether rows read pages together."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Tensor | Sampled


class StepGraphs:
    """The graphs of an engine's steps. They share their memory: a step's output lives until the next one is queued."""

    def __init__(
        self, steps: Steps, planner: DecodePlanner, limits: Limits, device: torch.device, *, prefill: bool
    ) -> None:
        self._steps, self._planner, self._limits, self._device = steps, planner, limits, device
        self._batch_sizes = batch_sizes(limits.max_rows)
        eighth = max(1, limits.max_tokens // _PREFILL_SIZES)
        self._prefill_sizes = [eighth * (i + 1) for i in range(_PREFILL_SIZES)] if prefill else []
        self._max_kv_len = _round_up(limits.max_length, limits.page_size)
        self._graphs: dict[_Shape, _Graph] = {}
        self._warm: set[tuple[str, int, bool]] = set()
        self._pool: Any = None
        self._seconds = 0.0

    @property
    def captured(self) -> tuple[int, float]:
        """Graphs captured so far, and the seconds that it took."""
        return len(self._graphs), self._seconds

    def decode(self, batch: Batch) -> Tensor:
        """Queue a decode step; its hidden states."""
        output = self._decode("decode", batch)
        assert isinstance(output, Tensor)
        return output[: len(batch.rows)]

    def draw(self, batch: Batch) -> Sampled:
        """Queue a decode step; its tokens."""
        output = self._decode("draw", batch)
        assert isinstance(output, Sampled)
        return Sampled(output.ids[: len(batch.rows)], output.finite[: len(batch.rows)], None)

    def prefill(self, batch: Batch) -> Tensor | None:
        """Queue a prefill step; the hidden states that are wanted. None: no graph is for such a step."""
        size = next((size for size in self._prefill_sizes if size >= len(batch.positions)), None)
        if size is None or batch.token_ids is None or batch.wanted is None or batch.tree is not None:
            return None
        prompts = size // _TOKENS_PER_PROMPT
        if max(len(batch.wanted), len(batch.rows) + 1) > prompts or batch.copies.shape[1] > size:
            return None
        max_kv_len = max(self._max_kv_len, _round_up(self._prefill_sizes[0], self._limits.page_size))
        shape = _Shape("prefill", size, max_kv_len)
        output = self._replay(shape, self._prefill_arrays(batch, shape))
        assert isinstance(output, Tensor)
        return output[: len(batch.wanted)]

    def _decode(self, name: str, batch: Batch) -> Tensor | Sampled:
        index = next(i for i, size in enumerate(self._batch_sizes) if size >= len(batch.rows))
        max_kv_len = min(next(bound for bound in _KV_LENS if bound >= batch.max_kv_len), self._max_kv_len)
        kv_lens = np.ones(self._batch_sizes[index], np.int32)
        kv_lens[: len(batch.rows)] = batch.kv_lens
        work = self._planner.plan(batch, kv_lens)
        items_per_row = _power_of_2(num_pages(len(work.items), len(kv_lens)))
        shape = _Shape(name, len(kv_lens), max_kv_len, items_per_row, shared=len(work.members) > 0)
        output = self._replay(shape, self._decode_arrays(batch, shape, work))
        if index and (smaller := shape._replace(size=self._batch_sizes[index - 1])) not in self._graphs:
            # It comes when rows finish. The GPU is busy now; then it would wait.
            self._graphs[smaller] = self._capture(smaller)
        return output

    def _replay(self, shape: _Shape, arrays: Sequence[Array]) -> Tensor | Sampled:
        if shape not in self._graphs:
            self._graphs[shape] = self._capture(shape)
        graph, inputs, output = self._graphs[shape]
        inputs.copy_(pack(arrays), non_blocking=True)
        graph.replay()
        return output

    def _capture(self, shape: _Shape) -> _Graph:
        began = time.perf_counter()
        arrays = self._padding(shape)
        inputs = pack(arrays).to(self._device, non_blocking=True)
        tensors = unpack(inputs, arrays)
        kind = shape.name, shape.max_kv_len, shape.shared
        if kind not in self._warm:
            self._run(shape, tensors)  # kernels and cuBLAS are set up outside of a capture
            self._warm.add(kind)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            output = self._run(shape, tensors)
        finally:
            graph.capture_end()
        self._seconds += time.perf_counter() - began
        return _Graph(graph, inputs, output)

    def _run(self, shape: _Shape, tensors: Sequence[Tensor]) -> Tensor | Sampled:
        if shape.name == "prefill":
            prefill = PrefillInputs(*tensors)
            _, _, _, _, copies, query_start, kv_lens, block_table = prefill
            meta = AttentionMetadata(
                block_table, query_start, kv_lens, len(prefill.token_ids), shape.max_kv_len, copies=copies
            )
            return self._steps.prefill(prefill, meta)
        inputs = DecodeInputs(*tensors)
        starts = torch.arange(shape.size + 1, dtype=torch.int32, device=self._device)
        work = self._planner.on_device(inputs[-4:], self._room(shape).num_parts)
        meta = AttentionMetadata(inputs.block_table, starts, inputs.kv_lens, 1, shape.max_kv_len, work)
        return self._steps.draw(inputs, meta) if shape.name == "draw" else self._steps.decode(inputs, meta)

    def _padding(self, shape: _Shape) -> Sequence[Array]:
        """The arrays of a step that is all padding."""
        if shape.name == "prefill":
            return self._prefill_arrays(None, shape)
        return self._decode_arrays(None, shape, self._planner.padding(shape.size))

    def _room(self, shape: _Shape) -> WorkRoom:
        return self._planner.room(shape.size, shape.items_per_row, shared=shape.shared)

    def _decode_arrays(self, batch: Batch | None, shape: _Shape, work: WorkArrays) -> Sequence[Array]:
        """The fields of DecodeInputs, padded to the shape. No batch is all padding."""
        arrays = [np.full(shape.size, value, np.int64) for value in (self._limits.max_rows, 0, 0, 0)]
        kv_lens = np.ones(shape.size, np.int32)
        if batch is not None:
            kv_lens[: len(batch.rows)] = batch.kv_lens
            for array, values in zip(arrays, (batch.rows, batch.positions, batch.slots, batch.draw_index), strict=True):
                array[: len(values)] = values
        padded = self._room(shape).pad(work)
        return [*arrays, kv_lens, self._block_table(batch, shape.size, shape.max_kv_len), *padded[:4]]

    def _prefill_arrays(self, batch: Batch | None, shape: _Shape) -> Sequence[Array]:
        """The fields of PrefillInputs; tokens of padding are a prompt of their own, behind the others."""
        size, prompts = shape.size, shape.size // _TOKENS_PER_PROMPT
        arrays = [np.zeros(length, np.int64) for length in (size, size, size, prompts)]
        copies = np.zeros((2, size), np.int64)
        query_start = np.full(prompts + 1, size, np.int32)
        query_start[0] = 0
        kv_lens = np.ones(prompts, np.int32)
        kv_lens[0] = size
        if batch is not None and batch.token_ids is not None and batch.wanted is not None:
            count = len(batch.rows)
            copies[:, : batch.copies.shape[1]] = batch.copies
            query_start[: count + 1] = batch.query_start
            kv_lens[:count] = batch.kv_lens
            kv_lens[count] = max(1, size - len(batch.positions))
            for array, values in zip(
                arrays, (batch.token_ids, batch.positions, batch.slots, batch.wanted), strict=True
            ):
                array[: len(values)] = values
        return [*arrays, copies, query_start, kv_lens, self._block_table(batch, prompts, shape.max_kv_len)]

    def _block_table(self, batch: Batch | None, size: int, max_kv_len: int) -> Array:
        table = np.full((size, num_pages(max_kv_len, self._limits.page_size)), PADDING_PAGE, np.int32)
        if batch is not None:
            width = min(batch.block_table.shape[1], table.shape[1])
            table[: len(batch.rows), :width] = batch.block_table[:, :width]
        return table


def batch_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that decode graphs are captured for.

    Few of them: below 128 rows a step takes the time that reading the weights takes, and above 384 a matrix product is
    as fast with its rows rounded up to a multiple of 128.
    """
    sizes = [16, 64, 128, 192, 256, 320, 384, *range(512, max_rows, 128)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _round_up(length: int, page_size: int) -> int:
    return num_pages(length, page_size) * page_size
