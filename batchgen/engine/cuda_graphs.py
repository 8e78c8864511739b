"""Decode steps as CUDA graphs: one launch instead of some hundred.

A graph is captured for a number of rows and a KV length, both rounded up, when such a step first comes. Its inputs lie
in one buffer of its own, which one copy fills; the rest of the batch is padding, which attends to the padding page.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import Batch
from batchgen.engine.config import Limits, num_pages
from batchgen.engine.kv_cache import PADDING_PAGE
from batchgen.engine.sampler import Sampled
from batchgen.engine.transfer import Array, pack, unpack

_KV_LENS = [1024 * 4**power for power in range(8)]
"""Bounds of the KV length that graphs are captured for. Attention skips what lies beyond a row's own length."""


class DecodeInputs(NamedTuple):
    """What changes from step to step, for B rows: int64 [B], but kv_lens int32 [B] and block_table int32 [B, pages]."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    draw_index: Tensor
    kv_lens: Tensor
    block_table: Tensor


Output = Tensor | Sampled
DecodeStep = Callable[[DecodeInputs, int, bool], Output]
"""A step from its inputs, the bound of its KV lengths, and whether it draws tokens or ends with the hidden states."""


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Output


class DecodeGraphs:
    """The graphs of an engine's decode steps. They share their memory, so only one may run at a time."""

    def __init__(self, step: DecodeStep, limits: Limits, device: torch.device) -> None:
        self._step, self._limits, self._device = step, limits, device
        self._sizes = batch_sizes(limits.max_rows)
        self._max_kv_len = num_pages(limits.max_length, limits.page_size) * limits.page_size
        self._graphs: dict[tuple[int, int, bool], _Graph] = {}
        self._compiled: set[tuple[int, bool]] = set()
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, batch: Batch, draws: bool) -> Output:
        """Queue a decode step. Its output is overwritten by the next one's: queue what reads it before that."""
        count = len(batch.rows)
        size = next(size for size in self._sizes if size >= count)
        max_kv_len = min(next(bound for bound in _KV_LENS if bound >= batch.max_kv_len), self._max_kv_len)
        key = (size, max_kv_len, draws)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, inputs, output = self._graphs[key]
        inputs.copy_(pack(self._padded(batch, size, max_kv_len)), non_blocking=True)
        graph.replay()
        if isinstance(output, Sampled):
            return Sampled(output.ids[:count], output.finite[:count], None)
        return output[:count]

    def _padded(self, batch: Batch | None, size: int, max_kv_len: int) -> Sequence[Array]:
        """The fields of DecodeInputs, padded to `size` rows. No batch is all padding."""
        block_table = np.full((size, num_pages(max_kv_len, self._limits.page_size)), PADDING_PAGE, np.int32)
        padding_row = self._limits.max_rows
        arrays = [np.full(size, value, np.int64) for value in (padding_row, 0, 0, 0)]
        kv_lens = np.ones(size, np.int32)
        if batch is not None:
            count, width = batch.block_table.shape
            width = min(width, block_table.shape[1])
            block_table[:count, :width] = batch.block_table[:, :width]
            kv_lens[:count] = batch.kv_lens
            real = (batch.rows, batch.positions, batch.slots, batch.draw_index)
            for array, values in zip(arrays, real, strict=True):
                array[:count] = values
        return [*arrays, kv_lens, block_table]

    def _capture(self, size: int, max_kv_len: int, draws: bool) -> _Graph:
        arrays = self._padded(None, size, max_kv_len)
        inputs = pack(arrays).to(self._device, non_blocking=True)
        step_inputs = DecodeInputs(*unpack(inputs, arrays))
        if (max_kv_len, draws) not in self._compiled:
            self._step(step_inputs, max_kv_len, draws)  # kernels and cuBLAS are set up outside of a capture
            self._compiled.add((max_kv_len, draws))
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            output = self._step(step_inputs, max_kv_len, draws)
        finally:
            graph.capture_end()
        return _Graph(graph, inputs, output)


def batch_sizes(max_rows: int) -> list[int]:
    """Numbers of rows that graphs are captured for: steps of an eighth or less, so that little is padding."""
    sizes = [size for size in (8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256) if size < max_rows]
    sizes += range(320, max_rows, 64)
    return [*sizes, max_rows]
