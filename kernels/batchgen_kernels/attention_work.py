"""What a step of decode attention has to do, as a list of items that fill a GPU evenly.

An item is a range of keys: of one row, or of a block of rows that have the pages of these keys in common and go through
one product. A row's own keys are cut every SPLIT_KEYS, whatever its batch, so that without shared pages its result
depends on nothing but itself.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.metadata import AttentionMetadata, DecodeWork

Ids = npt.NDArray[np.int32]

SPLIT_KEYS = 1024
MAX_SPLITS = 32
"""Of a row's own keys: splits of long rows are longer."""
SHARED_HEADS = 64
"""Query heads of a KV head, over all rows of a block, that share a product."""
SHARED_PROGRAMS = 512
"""Programs that the shared keys of a step are cut into: a few for every multiprocessor."""
MAX_SHARED_SPLITS = 8
_WHOLE_PAGES = 128
"""Shared keys are cut at multiples of the largest page size."""


class SharedRuns(NamedTuple):
    """Rows whose block tables begin with the same pages: G runs."""

    members: Ids
    """int32 [R]: rows, those of the first run first. A row is in one run at most."""
    sizes: Ids
    """int32 [G]: rows of each run."""
    num_keys: Ids
    """int32 [G]: keys in the pages that a run has in common; whole pages, and fewer than any of its rows has."""


class WorkArrays(NamedTuple):
    """The fields of DecodeWork on the host."""

    items: Ids
    row_parts: Ids
    shared_items: Ids
    members: Ids
    num_parts: int

    def to_device(self, num_kv_heads: int, device: torch.device) -> DecodeWork:
        """The same on a device. Waits for the copies."""
        arrivals = torch.zeros(len(self.row_parts), num_kv_heads, dtype=torch.int32, device=device)
        items, row_parts, shared_items, members = (torch.from_numpy(array).to(device) for array in self[:4])
        return DecodeWork(items, row_parts, shared_items, members, arrivals, self.num_parts)


class WorkRoom(NamedTuple):
    """How many entries of each kind a captured step has room for."""

    num_items: int
    num_shared_items: int
    num_members: int
    num_parts: int

    @classmethod
    def of(cls, num_rows: int, items_per_row: int, *, shared: bool, num_q_heads: int, num_kv_heads: int) -> "WorkRoom":
        """Room for `num_rows` rows with `items_per_row` own items on average, and for anything that they may share."""
        num_items = num_rows * items_per_row
        if not shared:
            return cls(num_items, 0, 0, num_items if items_per_row > 1 else 0)
        # There are two rows or more in a run, and one block or more; cutting them adds up to SHARED_PROGRAMS.
        blocks = -(-num_rows // min(2, block_rows(num_q_heads // num_kv_heads)))
        num_shared = blocks + SHARED_PROGRAMS // num_kv_heads
        return cls(num_items, num_shared, num_rows, num_items + num_rows * MAX_SHARED_SPLITS)

    def pad(self, work: WorkArrays) -> WorkArrays:
        """The work with empty items and members behind it."""
        items = np.zeros((self.num_items, 4), np.int32)
        shared_items = np.zeros((self.num_shared_items, 5), np.int32)
        members = np.zeros(self.num_members, np.int32)
        for room, array in ((items, work.items), (shared_items, work.shared_items), (members, work.members)):
            room[: len(array)] = array
        return WorkArrays(items, work.row_parts, shared_items, members, self.num_parts)


def decode_work(kv_lens: Ids, runs: SharedRuns | None, num_q_heads: int, num_kv_heads: int) -> WorkArrays:
    """The work of a decode step of B rows with `kv_lens` [B], longest items first."""
    starts, num_shared = np.zeros_like(kv_lens), np.zeros_like(kv_lens)
    shared_items, members = np.empty((0, 5), np.int32), np.empty(0, np.int32)
    if runs is not None:
        members = runs.members
        shared_items, parts = _shared_items(runs, num_q_heads // num_kv_heads, num_kv_heads)
        starts[members] = np.repeat(runs.num_keys, runs.sizes)
        num_shared[members] = np.repeat(parts, runs.sizes)
    own = kv_lens - starts
    split = np.full_like(own, SPLIT_KEYS)
    while (long := own > MAX_SPLITS * split).any():
        split[long] *= 2
    num_own = -(-own // split)
    row, index = _repeated(num_own)
    begin = starts[row] + index * split[row]
    end = np.minimum(begin + split[row], kv_lens[row])
    items = np.stack((row, begin, end, num_shared[row] + index), axis=1)[np.argsort(begin - end, kind="stable")]
    num_parts = num_own + num_shared
    stored = np.where(num_parts > 1, num_parts, 0)
    row_parts = np.stack((np.cumsum(stored) - stored, num_parts, num_shared, split), axis=1).astype(np.int32)
    return WorkArrays(items, row_parts, shared_items, members, int(stored.sum()))


def _shared_items(runs: SharedRuns, group: int, num_kv_heads: int) -> tuple[Ids, Ids]:
    """The items of shared keys, and how many parts each run makes of its rows' results."""
    block = block_rows(group)
    blocks = -(-runs.sizes // block)
    keys = int((blocks * runs.num_keys.astype(np.int64)).sum()) * num_kv_heads // SHARED_PROGRAMS
    split = np.maximum(-(-runs.num_keys // MAX_SHARED_SPLITS), max(keys, SPLIT_KEYS))
    split = -(-split // _WHOLE_PAGES) * _WHOLE_PAGES
    parts = -(-runs.num_keys // split)
    run, index = _repeated(blocks * parts)
    part, number = index // blocks[run], index % blocks[run]
    first = (np.cumsum(runs.sizes) - runs.sizes)[run] + number * block
    count = np.minimum(block, runs.sizes[run] - number * block)
    begin = part * split[run]
    end = np.minimum(begin + split[run], runs.num_keys[run])
    return np.stack((first, count, begin, end, part), axis=1).astype(np.int32), parts


def block_rows(group: int) -> int:
    """Rows that go through one product, when `group` query heads have a KV head in common."""
    return max(1, SHARED_HEADS // group)


def _repeated(counts: Ids) -> tuple[Ids, Ids]:
    """For each of all things, `counts` of every owner: its owner, and its number with it."""
    owner = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return owner, np.arange(len(owner), dtype=np.int32) - (np.cumsum(counts) - counts).astype(np.int32)[owner]


def default_work(meta: AttentionMetadata, num_kv_heads: int) -> DecodeWork:
    """The work of a decode step whose lengths the host doesn't know: items for every row of `max_kv_len` keys.

    Those beyond a row's own length are empty. Nothing is shared.
    """
    lengths, num_rows = meta.kv_lens, len(meta.kv_lens)
    split = torch.full_like(lengths, SPLIT_KEYS)
    longest = SPLIT_KEYS
    while longest * MAX_SPLITS < meta.max_kv_len:
        split, longest = torch.where(lengths > MAX_SPLITS * split, 2 * split, split), 2 * longest
    splits = min(-(-meta.max_kv_len // SPLIT_KEYS), MAX_SPLITS)
    row = torch.arange(num_rows, dtype=torch.int32, device=lengths.device).unsqueeze(1).expand(-1, splits)
    part = torch.arange(splits, dtype=torch.int32, device=lengths.device).expand(num_rows, -1)
    begin = part * split.unsqueeze(1)
    end = torch.minimum(begin + split.unsqueeze(1), lengths.unsqueeze(1))
    items = torch.stack((row, begin, end, part), dim=2).flatten(0, 1)
    none = torch.zeros_like(lengths)
    row_parts = torch.stack((row[:, 0] * splits, (lengths + split - 1) // split, none, split), dim=1)
    return DecodeWork(
        items=items,
        row_parts=row_parts.to(torch.int32),
        shared_items=items.new_empty(0, 5),
        members=items.new_empty(0),
        arrivals=lengths.new_zeros(num_rows, num_kv_heads),
        num_parts=num_rows * splits if splits > 1 else 0,
    )
