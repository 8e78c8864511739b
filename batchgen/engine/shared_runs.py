"""Which rows of a decode batch begin with the same KV pages, so that attention reads those once for all of them."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.batch import Ids
from batchgen_kernels import SharedRuns

LEAST_BYTES = {2: 1 << 20, 4: 1 << 18}
"""By the least number of rows: keys and values of a layer that a run must have in common to be read faster together.

Measured on an H200 for 8 KV heads of 128 and 2 of 64: docs/benchmarks/kernels.md, Shared prefixes."""
LEAST_SAVED_BYTES = 1 << 25
"""What all runs of a batch together must save of a layer's bytes, for the launch that they take."""


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
    saved: int
    inner: list[_Node]


def shared_runs(block_table: Ids, kv_lens: Ids, page_size: int, page_bytes: int) -> SharedRuns | None:
    """The runs that save most when every row is in one at most: the best level of the prefix tree on each path.

    `block_table` [B, pages] may hold anything behind a row's own pages. A row's last token is never shared.
    `page_bytes` are the keys and values of a page in one layer. None: there is nothing that is worth it.
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
    nodes = _best_nodes(common, page_bytes)
    if sum((node.last - node.first - 1) * node.pages for node in nodes) * page_bytes < LEAST_SAVED_BYTES:
        return None
    return SharedRuns(
        members=np.concatenate([np.sort(rows[node.first : node.last]) for node in nodes]).astype(np.int32),
        sizes=np.array([node.last - node.first for node in nodes], np.int32),
        num_keys=np.array([node.pages * page_size for node in nodes], np.int32),
    )


def _best_nodes(common: npt.NDArray[np.int64], page_bytes: int) -> list[_Node]:
    """Of the tree whose leaves i and i + 1 have `common[i]` pages in common: the nodes that save most, none in another.

    A node of n rows saves n - 1 readings of its pages. The tree is walked by a stack of nodes that are still open.
    """
    open_nodes = [_Open(0, 0, 0, [])]
    changes = np.flatnonzero(np.diff(common, prepend=-1)).tolist()
    for at, pages in (*((at, int(common[at])) for at in changes), (len(common), 0)):
        first, saved, inner = at, 0, list[_Node]()
        while open_nodes[-1].pages > pages:
            closed = open_nodes.pop()
            first, saved, inner = closed.first, closed.saved + saved, closed.inner + inner
            node = _Node(first, at + 1, closed.pages)
            whole = (at - first) * closed.pages
            if whole >= saved and _pays(at + 1 - first, closed.pages * page_bytes):
                saved, inner = whole, [node]
        if open_nodes[-1].pages < pages:
            open_nodes.append(_Open(first, pages, 0, []))
        open_nodes[-1].saved += saved
        open_nodes[-1].inner += inner
    return open_nodes[0].inner


def _pays(num_rows: int, num_bytes: int) -> bool:
    return any(num_rows >= rows and num_bytes >= least for rows, least in LEAST_BYTES.items())
