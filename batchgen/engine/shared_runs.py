"""Which rows of a decode batch begin with the same KV pages, so that attention reads those once for all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.engine.batch import Ids
from batchgen.engine.sequence import Ints
from batchgen.models.config import ModelConfig
from batchgen_kernels import SharedRuns
from batchgen_kernels.attention_work import block_rows

LAUNCH_BYTES = 13e6
"""A launch, in bytes that are read meanwhile: what the runs of a batch must save together."""


class ReadingCosts(NamedTuple):
    """What it costs a decode step to read keys and values together or apart, in bytes of a layer.

    Fitted to the table of docs/benchmarks/kernels.md, "Shared prefixes": an H200, 8 KV heads of 128 and 2 of 64.
    """

    page_bytes: int
    """Keys and values of a page."""
    program_bytes: float
    """Per block of rows that go through one product: the start of its programs."""
    row_bytes: float
    """Per row: a part of its result is written, read and merged."""
    block_rows: int

    @classmethod
    def of(cls, config: ModelConfig, page_size: int, item_bytes: int) -> "ReadingCosts":
        """The costs of a model."""
        return cls(
            page_bytes=2 * page_size * config.kv_size * item_bytes,
            program_bytes=50_000 * config.num_kv_heads,
            row_bytes=43 * config.q_size,
            block_rows=block_rows(config.num_q_heads // config.num_kv_heads),
        )

    def saved(self, num_rows: int, num_pages: int) -> float:
        """Bytes saved when these rows read these pages together. Apart, all but the first find them in the L2 cache."""
        apart = num_rows * num_pages * self.page_bytes * 2 / 3
        blocks = -(-num_rows // self.block_rows)
        return apart - num_pages * self.page_bytes - blocks * self.program_bytes - num_rows * self.row_bytes


class _Node(NamedTuple):
    """Rows [first, last) of the sorted batch, which have `pages` pages in common."""

    first: int
    last: int
    pages: int


@dataclass(slots=True)
class _Open:
    """A node whose last row isn't known yet, and what the best nodes inside save."""

    first: int
    pages: int
    saved: float
    inner: list[_Node]


def shared_runs(
    block_table: Ids, kv_lens: Ids, page_size: int, saved: Callable[[int, int], float], least: float = LAUNCH_BYTES
) -> SharedRuns | None:
    """The runs that save most when every row is in one at most: the best level of the prefix tree on each path.

    `block_table` [B, pages] may hold anything behind a row's own pages. A row's last token is never shared.
    `saved` says what a run of that many rows and pages saves. None: all runs together save less than `least`.
    """
    _, inverse, counts = np.unique(block_table[:, 0], return_inverse=True, return_counts=True)
    candidates = np.flatnonzero(counts[inverse] > 1)
    if not len(candidates):
        return None
    whole = (kv_lens[candidates] - 1) // page_size
    table = np.where(np.arange(block_table.shape[1]) < whole[:, None], block_table[candidates], -1)
    # As bytes, rows that begin with the same pages come next to each other, whatever the order.
    order = np.argsort(table.view(np.dtype((np.void, table.itemsize * table.shape[1]))).ravel(), kind="stable")
    rows, table, whole = candidates[order], table[order], whole[order]
    differs = np.ones((len(rows) - 1, table.shape[1] + 1), np.bool_)
    differs[:, :-1] = table[1:] != table[:-1]
    common = np.minimum(differs.argmax(axis=1), np.minimum(whole[1:], whole[:-1]))
    nodes, total = _best_nodes(common, saved)
    if not nodes or total < least:
        return None
    return SharedRuns(
        members=np.concatenate([np.sort(rows[node.first : node.last]) for node in nodes]).astype(np.int32),
        sizes=np.array([node.last - node.first for node in nodes], np.int32),
        num_keys=np.array([node.pages * page_size for node in nodes], np.int32),
    )


def _best_nodes(common: Ints, saved: Callable[[int, int], float]) -> tuple[list[_Node], float]:
    """Of the tree whose leaves i and i + 1 have `common[i]` pages in common: the nodes that save most, none in another.

    The tree is walked by a stack of the nodes that are still open.
    """
    open_nodes = [_Open(0, 0, 0.0, [])]
    changes = np.flatnonzero(np.diff(common, prepend=-1)).tolist()
    for at, pages in (*((at, int(common[at])) for at in changes), (len(common), 0)):
        first, most, inner = at, 0.0, list[_Node]()
        while open_nodes[-1].pages > pages:
            closed = open_nodes.pop()
            first, most, inner = closed.first, closed.saved + most, closed.inner + inner
            whole = saved(at + 1 - first, closed.pages)
            if whole > 0 and whole >= most:
                most, inner = whole, [_Node(first, at + 1, closed.pages)]
        if open_nodes[-1].pages < pages:
            open_nodes.append(_Open(first, pages, 0.0, []))
        open_nodes[-1].saved += most
        open_nodes[-1].inner += inner
    return open_nodes[0].inner, open_nodes[0].saved
