"""What attention has to do in a decode step: made on the host, where the lengths are known, and padded for a graph."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.batch import Batch, Ids
from batchgen.engine.sequence import Ints
from batchgen.engine.shared_runs import ReadingCosts, shared_runs
from batchgen.models.config import ModelConfig
from batchgen_kernels import DecodeWork, SharedRuns, WorkArrays, WorkRoom, decode_work


class DecodePlanner:
    """Makes the work of a model's decode steps.

    With `share`, rows that begin with the same pages read them together where that is faster. The last bits of a row's
    result then depend on whom it shares them with.
    """

    def __init__(self, config: ModelConfig, page_size: int, item_bytes: int, *, share: bool) -> None:
        self._num_q_heads, self._num_kv_heads = config.num_q_heads, config.num_kv_heads
        self._page_size, self._costs = page_size, ReadingCosts.of(config, page_size, item_bytes)
        self._share = share
        self._rows: Ints | None = None
        self._runs: SharedRuns | None = None

    def plan(self, batch: Batch, kv_lens: Ids) -> WorkArrays:
        """The work of a decode step. `kv_lens` are the batch's, behind which there may be padding."""
        if self._share and batch.rows is not self._rows:  # there is a new array whenever a row comes or goes
            self._rows = batch.rows
            self._runs = shared_runs(batch.block_table, batch.kv_lens, self._page_size, self._costs.saved)
        return decode_work(kv_lens, self._runs, self._num_q_heads, self._num_kv_heads)

    def padding(self, size: int) -> WorkArrays:
        """The work of a step of `size` rows that are all padding: one key each."""
        return decode_work(np.ones(size, np.int32), None, self._num_q_heads, self._num_kv_heads)

    def room(self, num_rows: int, items_per_row: int, *, shared: bool) -> WorkRoom:
        """The room that a graph gives to work of this size."""
        heads = {"num_q_heads": self._num_q_heads, "num_kv_heads": self._num_kv_heads}
        return WorkRoom.of(num_rows, items_per_row, shared=shared, **heads)

    def on_device(self, arrays: Sequence[Tensor], num_parts: int) -> DecodeWork:
        """The work that the first four of its fields were uploaded of."""
        items, row_parts, shared_items, members = arrays
        arrivals = torch.zeros(len(row_parts), self._num_kv_heads, dtype=torch.int32, device=row_parts.device)
        return DecodeWork(items, row_parts, shared_items, members, arrivals, num_parts)
