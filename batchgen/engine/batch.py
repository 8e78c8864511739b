"""From a scheduled step to its arrays. Host memory only; nothing here loops over tokens or pages."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.sequence import Ints, RowTable, Sequence
from batchgen.engine.step import Chunk, Step

Ids = npt.NDArray[np.int32]


_NEVER = np.iinfo(np.int32).max


class Scored(NamedTuple):
    """Edges [first, end) of a sequence's trie: their log-probabilities come out of the step."""

    seq: Sequence
    first: int
    end: int


class Tree(NamedTuple):
    """Where each sequence's trie of targets begins, int32 [B], and where the subtree of each node ends, [B, N]."""

    start: Ids
    until: Ids

    @classmethod
    def none(cls, kv_lens: Ids) -> "Tree":
        """Of sequences of these lengths that end in no trie."""
        return cls(kv_lens, np.full((len(kv_lens), 1), _NEVER, np.int32))


class Batch(NamedTuple):
    """One step: T tokens of B sequences, of which the logits of U tokens are wanted, for S draws and K scores."""

    token_ids: Ints | None
    """int64 [T]; None: each row's last drawn token, which the host may not have seen yet."""
    rows: Ints
    """int64 [B]: the row of each sequence."""
    positions: Ints
    slots: Ints
    block_table: Ids
    query_start: Ids
    kv_lens: Ids
    max_query_len: int
    max_kv_len: int
    tree: Tree | None
    """Sequences end in tries of targets: attention has to know what is not an ancestor of what."""
    wanted: Ints | None
    """int64 [U]: indices into the T tokens; None: all of them, in order."""
    draws: list[Sequence]
    draw_rows: Ints
    """int64 [S]: the row of each sequence that draws a token."""
    draw_from: Ints | None
    """int64 [S]: indices into the U wanted tokens; None: all of them, in order."""
    draw_index: Ints
    """int64 [S]: how many tokens the sequence has drawn before."""
    constrained: Ints
    """int64 [C]: numbers of the draws that follow a grammar."""
    scores: list[Scored]
    score_from: Ints
    """int64 [K]: indices into the U wanted tokens, in order."""
    score_ids: Ints
    copies: Ints
    """int64 [2, N]: slots whose keys and values other sequences take over, from and to."""
    first_draw: bool
    """Whether all draws come right behind a fill (a prefill step) or none does."""
    filled: list[Sequence]
    """Scoring sequences that this step completes."""


def build_batch(step: Step, table: RowTable, page_size: int) -> Batch:
    """The arrays of a step whose tokens `table.computed` counts already."""
    return _prefill_batch(step, table, page_size) if step.chunks else _decode_batch(step, table, page_size)


def _decode_batch(step: Step, table: RowTable, page_size: int) -> Batch:
    rows = step.rows
    kv_lens = table.computed[rows]
    positions = kv_lens - 1
    return Batch(
        token_ids=None,
        rows=rows,
        positions=positions,
        slots=_slots(table, rows, positions, page_size),
        block_table=_block_table(table, rows),
        query_start=np.arange(len(rows) + 1, dtype=np.int32),
        kv_lens=kv_lens.astype(np.int32),
        max_query_len=1,
        max_kv_len=int(kv_lens.max()),
        tree=None,
        wanted=None,
        draws=step.sequences,
        draw_rows=rows,
        draw_from=None,
        draw_index=positions - table.first_position[rows],
        constrained=np.flatnonzero(table.constrained[rows]),
        scores=[],
        score_from=_NO_INTS,
        score_ids=_NO_INTS,
        copies=step.copies,
        first_draw=False,
        filled=[],
    )


def _prefill_batch(step: Step, table: RowTable, page_size: int) -> Batch:
    chunks = step.chunks
    rows = np.array([chunk.seq.row for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    kv_lens = np.array([chunk.end for chunk in chunks], np.int64)
    lengths = kv_lens - starts
    query_start = np.concatenate(([0], np.cumsum(lengths)))
    places = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], lengths)
    outputs = _prefill_outputs(chunks, query_start)
    draw_rows = np.array([seq.row for seq in outputs.draws], np.int64)
    wanted_for = np.concatenate((np.array(outputs.draw_tokens, np.int64), *outputs.score_tokens))
    wanted, sources = np.unique(wanted_for, return_inverse=True)
    draws = len(outputs.draws)
    in_order = not outputs.scores and draws == len(wanted)
    return Batch(
        token_ids=np.concatenate([chunk.seq.fill[chunk.start : chunk.end] for chunk in chunks]).astype(np.int64),
        rows=rows,
        positions=_positions(chunks, query_start, places),
        slots=_slots(table, np.repeat(rows, lengths), places, page_size),
        block_table=_block_table(table, rows),
        query_start=query_start.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        max_query_len=int(lengths.max()),
        max_kv_len=int(kv_lens.max()),
        tree=_tree(chunks, kv_lens),
        wanted=wanted,
        draws=outputs.draws,
        draw_rows=draw_rows,
        draw_from=None if in_order else sources[:draws],
        draw_index=table.computed[draw_rows] - 1 - table.first_position[draw_rows],
        constrained=np.flatnonzero(table.constrained[draw_rows]),
        scores=outputs.scores,
        score_from=sources[draws:],
        score_ids=np.concatenate((_NO_INTS, *outputs.score_ids)),
        copies=step.copies,
        first_draw=True,
        filled=[chunk.seq for chunk in chunks if chunk.seq.scoring and chunk.end == len(chunk.seq.fill)],
    )


class _Outputs(NamedTuple):
    draws: list[Sequence]
    draw_tokens: list[int]
    scores: list[Scored]
    score_tokens: list[Ints]
    score_ids: list[Ints]


def _prefill_outputs(chunks: list[Chunk], query_start: Ints) -> _Outputs:
    """What is wanted of the chunks' tokens: a draw from the last one of a finished fill, or scores after the prompt."""
    outputs = _Outputs([], [], [], [], [])
    for (seq, start, end, branches), first in zip(chunks, query_start.tolist(), strict=False):
        if seq.trie is None:
            if end == len(seq.fill):
                drawing = [seq, *(branch for branch in branches if len(branch.fill) == branch.prompt_length)]
                outputs.draws.extend(drawing)
                outputs.draw_tokens.extend([first + end - start - 1] * len(drawing))
            continue
        last = seq.prompt_length - 1
        edges = slice(*np.searchsorted(seq.trie.edge_from, (start - last, end - last)).tolist())
        if edges.start < edges.stop:
            outputs.scores.append(Scored(seq, edges.start, edges.stop))
            outputs.score_tokens.append(seq.trie.edge_from[edges] + (first + last - start))
            outputs.score_ids.append(seq.trie.edge_ids[edges])
    return outputs


def _positions(chunks: list[Chunk], query_start: Ints, places: Ints) -> Ints:
    """Where each token stands in its text, given where it lies in the KV: nodes of a trie may share their place."""
    positions = places
    for (seq, start, end, _), first in zip(chunks, query_start.tolist(), strict=False):
        if seq.trie is not None and end > seq.prompt_length:
            positions = places.copy() if positions is places else positions
            begin = max(start, seq.prompt_length)
            depths = seq.trie.depths[begin - seq.prompt_length : end - seq.prompt_length]
            positions[first + begin - start : first + end - start] = seq.prompt_length + depths
    return positions


def _tree(chunks: list[Chunk], kv_lens: Ints) -> Tree | None:
    """None when no trie in the step has branches: each of its tokens then follows on all before it."""
    tries = [
        (index, seq.prompt_length, seq.trie.until)
        for index, (seq, _, end, _) in enumerate(chunks)
        if seq.trie is not None and end > seq.prompt_length and not seq.trie.is_chain
    ]
    if not tries:
        return None
    start = kv_lens.astype(np.int32)
    until = np.full((len(chunks), max(len(ends) for _, _, ends in tries)), _NEVER, np.int32)
    for index, prompt_length, ends in tries:
        start[index] = prompt_length
        until[index, : len(ends)] = prompt_length + ends
    return Tree(start, until)


def _slots(table: RowTable, rows: Ints, positions: Ints, page_size: int) -> Ints:
    """Where in the KV cache each token is written: page * page_size + offset."""
    pages, offsets = np.divmod(positions, page_size)
    return table.block_table[rows, pages].astype(np.int64) * page_size + offsets


def _block_table(table: RowTable, rows: Ints) -> Ids:
    """The pages of the given rows. Beyond a row's own pages lies what its predecessors left, which nobody reads."""
    return table.block_table[rows, : int(table.num_pages[rows].max())]


_NO_INTS = np.empty(0, np.int64)
