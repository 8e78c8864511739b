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
from batchgen.engine.kv_cache import PADDING_PAGE
from batchgen.engine.sampler import Sampled
from batchgen.engine.transfer import Array, pack, unpack
from batchgen_kernels import AttentionMetadata

_KV_LENS = [1024 * 4**power for power in range(8)]
"""Bounds of the KV length that graphs are captured for. Attention skips what lies beyond a row's own length."""
_PREFILL_SIZES = 8
"""Prefill steps are padded to eighths of the largest one."""
_TOKENS_PER_PROMPT = 16
"""Prompts of a padded prefill step have this many tokens or more on average; other steps are not captured."""


class DecodeInputs(NamedTuple):
    """A decode step of B rows. int64 [B], but kv_lens int32 [B] and block_table int32 [B, pages]."""

    rows: Tensor
    positions: Tensor
    slots: Tensor
    draw_index: Tensor
    kv_lens: Tensor
    block_table: Tensor


class PrefillInputs(NamedTuple):
    """A prefill step of T tokens and B prompts: int64 [T], [T], [T] and [B]; int32 [B + 1], [B] and [B, pages]."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    wanted: Tensor
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


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    output: Tensor | Sampled


class StepGraphs:
    """The graphs of an engine's steps. They share their memory: a step's output lives until the next one is queued."""

    def __init__(self, steps: Steps, limits: Limits, device: torch.device, *, prefill: bool) -> None:
        self._steps, self._limits, self._device = steps, limits, device
        self._batch_sizes = batch_sizes(limits.max_rows)
        eighth = max(1, limits.max_tokens // _PREFILL_SIZES)
        self._prefill_sizes = [eighth * (i + 1) for i in range(_PREFILL_SIZES)] if prefill else []
        self._max_kv_len = _round_up(limits.max_length, limits.page_size)
        self._graphs: dict[tuple[str, int, int], _Graph] = {}
        self._warm: set[tuple[str, int]] = set()
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
        if size is None or batch.token_ids is None or batch.wanted is None:
            return None
        prompts = size // _TOKENS_PER_PROMPT
        if max(len(batch.wanted), len(batch.rows) + 1) > prompts:
            return None
        max_kv_len = max(self._max_kv_len, _round_up(self._prefill_sizes[0], self._limits.page_size))
        output = self._replay("prefill", size, max_kv_len, self._prefill_arrays(batch, size, max_kv_len))
        assert isinstance(output, Tensor)
        return output[: len(batch.wanted)]

    def _decode(self, name: str, batch: Batch) -> Tensor | Sampled:
        index = next(i for i, size in enumerate(self._batch_sizes) if size >= len(batch.rows))
        size = self._batch_sizes[index]
        max_kv_len = min(next(bound for bound in _KV_LENS if bound >= batch.max_kv_len), self._max_kv_len)
        output = self._replay(name, size, max_kv_len, self._decode_arrays(batch, size, max_kv_len))
        if index and (smaller := (name, self._batch_sizes[index - 1], max_kv_len)) not in self._graphs:
            # It comes when rows finish. The GPU is busy now; then it would wait.
            self._graphs[smaller] = self._capture(*smaller)
        return output

    def _replay(self, name: str, size: int, max_kv_len: int, arrays: Sequence[Array]) -> Tensor | Sampled:
        key = (name, size, max_kv_len)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, inputs, output = self._graphs[key]
        inputs.copy_(pack(arrays), non_blocking=True)
        graph.replay()
        return output

    def _capture(self, name: str, size: int, max_kv_len: int) -> _Graph:
        began = time.perf_counter()
        make_arrays = self._prefill_arrays if name == "prefill" else self._decode_arrays
        arrays = make_arrays(None, size, max_kv_len)
        inputs = pack(arrays).to(self._device, non_blocking=True)
        tensors = unpack(inputs, arrays)
        if (name, max_kv_len) not in self._warm:
            self._run(name, tensors, max_kv_len)  # kernels and cuBLAS are set up outside of a capture
            self._warm.add((name, max_kv_len))
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
        try:
            output = self._run(name, tensors, max_kv_len)
        finally:
            graph.capture_end()
        self._seconds += time.perf_counter() - began
        return _Graph(graph, inputs, output)

    def _run(self, name: str, tensors: Sequence[Tensor], max_kv_len: int) -> Tensor | Sampled:
        if name == "prefill":
            prefill = PrefillInputs(*tensors)
            _, _, _, _, query_start, kv_lens, block_table = prefill
            meta = AttentionMetadata(block_table, query_start, kv_lens, len(prefill.token_ids), max_kv_len)
            return self._steps.prefill(prefill, meta)
        inputs = DecodeInputs(*tensors)
        query_start = torch.arange(len(inputs.rows) + 1, dtype=torch.int32, device=self._device)
        meta = AttentionMetadata(inputs.block_table, query_start, inputs.kv_lens, 1, max_kv_len)
        return self._steps.draw(inputs, meta) if name == "draw" else self._steps.decode(inputs, meta)

    def _decode_arrays(self, batch: Batch | None, size: int, max_kv_len: int) -> Sequence[Array]:
        """The fields of DecodeInputs, padded to `size` rows. No batch is all padding."""
        arrays = [np.full(size, value, np.int64) for value in (self._limits.max_rows, 0, 0, 0)]
        kv_lens = np.ones(size, np.int32)
        if batch is not None:
            kv_lens[: len(batch.rows)] = batch.kv_lens
            for array, values in zip(arrays, (batch.rows, batch.positions, batch.slots, batch.draw_index), strict=True):
                array[: len(values)] = values
        return [*arrays, kv_lens, self._block_table(batch, size, max_kv_len)]

    def _prefill_arrays(self, batch: Batch | None, size: int, max_kv_len: int) -> Sequence[Array]:
        """The fields of PrefillInputs, padded to `size` tokens: they are a prompt of their own, behind the others."""
        prompts = size // _TOKENS_PER_PROMPT
        arrays = [np.zeros(length, np.int64) for length in (size, size, size, prompts)]
        query_start = np.full(prompts + 1, size, np.int32)
        query_start[0] = 0
        kv_lens = np.ones(prompts, np.int32)
        kv_lens[0] = size
        if batch is not None and batch.token_ids is not None and batch.wanted is not None:
            count = len(batch.rows)
            query_start[: count + 1] = batch.query_start
            kv_lens[:count] = batch.kv_lens
            kv_lens[count] = max(1, size - len(batch.positions))
            for array, values in zip(
                arrays, (batch.token_ids, batch.positions, batch.slots, batch.wanted), strict=True
            ):
                array[: len(values)] = values
        return [*arrays, query_start, kv_lens, self._block_table(batch, prompts, max_kv_len)]

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


def _round_up(length: int, page_size: int) -> int:
    return num_pages(length, page_size) * page_size
