"""How the CPU computes a step's attention: which sequences go through one product together, and over which pages.

Every query has one base piece, which holds its own position: alone (a long chunk) or in a padded batch of sequences of
about the same length. Pages that several sequences begin with are a piece of their own for all their queries at once,
and so is the context in front of a long chunk. The pieces of a query are merged by log-sum-exp, which is exact.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_kernels.metadata import AttentionMetadata

LONG_QUERY = 128  # tokens; a longer chunk is a piece of its own
PADDING = 1.25  # a batch's padded size over its real size, at most
BATCH_KEYS = 16384  # gathered tokens of a batch, at most
SHARED_KEYS = 512  # gathered tokens that sharing must save


class Piece(NamedTuple):
    """N blocks of queries, each over its own pages."""

    tokens: Tensor  # int64 [N, m]: tokens of the flat batch; a shorter block repeats its last one
    pages: Tensor  # int64 [N, p]
    skip: int  # keys of the first page that don't belong to the piece
    num_keys: int  # keys after them that do
    causal: bool  # key j is seen by queries j and later; otherwise by all that the mask lets through
    mask: Tensor | None = None  # float32 [N, 1, m, num_keys], added to the scores
    unwritten: Tensor | None = None  # int64 [2, n]: (block, key) past a sequence's end, where NaN may lie


class Plan(NamedTuple):
    """`base` holds every token once; `shared` are further keys of some of them."""

    base: tuple[Piece, ...]
    shared: tuple[Piece, ...]


class _Block(NamedTuple):
    """Query tokens [first, first + size) of one sequence, of which the last sits at position `length` - 1."""

    first: int
    size: int
    length: int
    sequence: int


def _shared_runs(
    pages: Sequence[Sequence[int]], members: Sequence[int], begin: int, depth: int, page_size: int
) -> Iterator[tuple[list[int], int, int]]:
    """(sequences, begin, end) for every run of pages that several sequences have in common, from the front on.

    `members` are alike up to page `depth`, and pages from `begin` on belong to no run yet.
    """
    groups = defaultdict(list)
    for member in members:
        if len(pages[member]) > depth:
            groups[pages[member][depth]].append(member)
    for group in groups.values():
        if len(group) == 1:
            continue
        first, end = pages[group[0]], depth + 1
        common = min(len(pages[member]) for member in group)
        while end < common and all(pages[member][end] == first[end] for member in group):
            end += 1
        pays = (len(group) - 1) * (end - begin) * page_size >= SHARED_KEYS
        if pays:
            yield group, begin, end
        yield from _shared_runs(pages, group, end if pays else begin, end, page_size)


def _batches(blocks: list[_Block], sizes: dict[_Block, int]) -> Iterator[list[_Block]]:
    """Blocks of about the same number of keys (`sizes`) and queries, together."""
    batch: list[_Block] = []
    real = widest = 0
    for block in sorted(blocks, key=lambda block: (sizes[block], block.size), reverse=True):
        keys = sizes[batch[0]] if batch else 0
        queries = max(block.size, widest)
        area = block.size * sizes[block]
        padded = (len(batch) + 1) * keys * queries
        if batch and (padded > PADDING * (real + area) or (len(batch) + 1) * keys > BATCH_KEYS):
            yield batch
            batch, real, queries = [], 0, block.size
        batch.append(block)
        real, widest = real + area, queries
    if batch:
        yield batch


def _padded(
    batch: list[_Block], meta: AttentionMetadata, first_pages: list[int], page_size: int, window: int | None
) -> Piece:
    """A batch of blocks as one piece, each over its pages from `first_pages` of its sequence on."""
    table = meta.block_table.long()
    first = torch.tensor([first_pages[block.sequence] for block in batch])
    if window is not None:
        visible = torch.tensor([max(0, b.length - b.size - window + 1) // page_size for b in batch])
        first = torch.maximum(first, visible)
    length = torch.tensor([block.length for block in batch])
    size = torch.tensor([block.size for block in batch])
    steps = torch.minimum(torch.arange(int(size.max())), size.unsqueeze(1) - 1)
    num_keys = int((length - first * page_size).max())
    columns = first.unsqueeze(1) + torch.arange(-(-num_keys // page_size))
    sequences = torch.tensor([block.sequence for block in batch])
    pages = table[sequences.unsqueeze(1), columns.clamp(max=table.shape[1] - 1)]
    query_at = (length - size).unsqueeze(1) + steps
    key_at = (first * page_size).unsqueeze(1) + torch.arange(num_keys)
    behind = query_at.unsqueeze(2) - key_at.unsqueeze(1)
    hidden = behind < 0 if window is None else (behind < 0) | (behind >= window)
    if meta.tree is not None:
        hidden |= query_at.unsqueeze(2) >= meta.tree.seen_until(sequences, key_at).unsqueeze(1)
    mask = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf).unsqueeze(1) if hidden.any() else None
    tokens = torch.tensor([block.first for block in batch]).unsqueeze(1) + steps
    past_end = key_at >= length.unsqueeze(1)
    unwritten = past_end.nonzero().T if past_end.any() else None
    return Piece(tokens, pages, 0, num_keys, False, mask, unwritten)


def _tokens(block: _Block) -> Tensor:
    return torch.arange(block.first, block.first + block.size).unsqueeze(0)


def _long(block: _Block, table: Tensor, page_size: int) -> Piece:
    """The new tokens of a long chunk among themselves."""
    start = block.length - block.size
    pages = table[block.sequence, start // page_size : -(-block.length // page_size)]
    return Piece(_tokens(block), pages.unsqueeze(0), start % page_size, block.size, True)


def _context(block: _Block, table: Tensor, first_page: int, page_size: int) -> Piece | None:
    """The new tokens of a long chunk over what lies before them, from `first_page` on."""
    start = block.length - block.size
    num_keys = start - first_page * page_size
    if num_keys <= 0:
        return None
    pages = table[block.sequence, first_page : -(-start // page_size)]
    return Piece(_tokens(block), pages.unsqueeze(0), 0, num_keys, False)


def make_plan(meta: AttentionMetadata, page_size: int, window: int | None) -> Plan:
    """The pieces of a step. A window makes every piece a padded batch: what it hides can't be shared."""
    table = meta.block_table.long()
    starts, lengths = meta.query_start.tolist(), meta.kv_lens.tolist()
    trees = lengths if meta.tree is None else meta.tree.start.tolist()
    blocks = [
        _Block(first, last - first, length, i)
        for i, (first, last, length) in enumerate(zip(starts, starts[1:], lengths, strict=False))
        if last > first
    ]
    first_pages = [0] * len(lengths)
    shared: list[Piece] = []
    if window is None:
        rows = table.tolist()
        ends = {b.sequence: min(b.length - b.size, trees[b.sequence]) // page_size for b in blocks}
        before = {sequence: rows[sequence][:end] for sequence, end in ends.items()}
        pages = [before.get(i, []) for i in range(len(rows))]
        by_sequence = {block.sequence: block for block in blocks}
        for group, begin, end in _shared_runs(pages, range(len(rows)), 0, 0, page_size):
            tokens = torch.cat([_tokens(by_sequence[i]) for i in group], dim=1)
            run = table[group[0], begin:end].unsqueeze(0)
            shared.append(Piece(tokens, run, 0, (end - begin) * page_size, False))
            for i in group:
                first_pages[i] = end
        parts = [part for block in blocks for part in _apart_from_tree(block, trees[block.sequence])]
        long = [block for block in parts if block.size > LONG_QUERY and block.length <= trees[block.sequence]]
        masked = [block for block in parts if block.size <= LONG_QUERY or block.length > trees[block.sequence]]
        blocks = [part for block in masked for part in _split(block)]
        contexts = (_context(block, table, first_pages[block.sequence], page_size) for block in long)
        shared.extend(piece for piece in contexts if piece is not None)
    else:
        long = []
        blocks = [part for block in blocks for part in _split(block)]
    sizes = {block: block.length - first_pages[block.sequence] * page_size for block in blocks}
    base = [_long(block, table, page_size) for block in long]
    base.extend(_padded(b, meta, first_pages, page_size, window) for b in _batches(blocks, sizes))
    return Plan(tuple(base), tuple(shared))


def _apart_from_tree(block: _Block, tree: int) -> Iterator[_Block]:
    """The tokens before the tree that begins at position `tree`, and those of the tree: only those need a mask.

    Few of them stay together: they are a piece with a mask anyway.
    """
    in_tree = min(block.size, block.length - tree)
    if block.size <= LONG_QUERY or in_tree <= 0:
        yield block
        return
    before = block.size - in_tree
    if before:
        yield _Block(block.first, before, block.length - in_tree, block.sequence)
    yield _Block(block.first + before, in_tree, block.length, block.sequence)


def _split(block: _Block) -> Iterator[_Block]:
    """A long block as several short ones, so that masks stay small."""
    for done in range(0, block.size, LONG_QUERY):
        size = min(LONG_QUERY, block.size - done)
        length = block.length - block.size + done + size
        yield _Block(block.first + done, size, length, block.sequence)
