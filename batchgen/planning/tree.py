"""The prefix tree of prompts, by sorting them: segments of rows that begin alike are split where they first differ.

All segments are split at once, level by level, so that numpy does the work: a node of the tree is a split segment.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from batchgen.planning.spool import WINDOW, Ints, PromptTokens, Tokens

_BLOCK_ROWS = 2**14


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Prompts in the order of their token ids, and the nodes at which they part.

    `order[k]` is the prompt at place k; equal prompts come in the order of their numbers. `shared[k]` are the tokens
    that it begins with like the one before it, and `leaf_parents[k]` is the node that it hangs from. Node v holds the
    places [starts[v], stops[v]), which share `depths[v]` tokens. Node 0 is the root, and a node comes after its parent.
    `levels` cuts the nodes into runs in which none is another's child.
    """

    order: Ints
    shared: Tokens
    leaf_parents: Tokens
    starts: Ints
    stops: Ints
    depths: Tokens
    parents: Tokens
    levels: list[int]

    @property
    def num_nodes(self) -> int:
        """Nodes, the root among them."""
        return len(self.depths)

    def without_nodes_above(self, depth: int) -> "PrefixTree":
        """The same tree without the nodes that share fewer tokens: what hung from them hangs from the root."""
        kept = self.depths >= depth
        kept[0] = True
        number = np.where(kept, np.cumsum(kept) - 1, 0).astype(np.int32)
        return replace(
            self,
            leaf_parents=number[self.leaf_parents],
            starts=self.starts[kept],
            stops=self.stops[kept],
            depths=self.depths[kept],
            parents=number[self.parents[kept]],
            levels=np.append(0, np.cumsum(kept))[self.levels].tolist(),
        )


@dataclass(slots=True)
class _Segments:
    """Ranges of places whose prompts share `depths` tokens, to be split below `parents`."""

    starts: Ints
    stops: Ints
    depths: Tokens
    parents: Tokens

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> "_Segments":
        return _Segments(self.starts[chosen], self.stops[chosen], self.depths[chosen], self.parents[chosen])

    def places(self) -> tuple[Ints, Tokens]:
        """All places in the segments, and the number of each one's segment."""
        sizes = self.stops - self.starts
        ends = np.cumsum(sizes)
        places = np.repeat(self.starts - (ends - sizes), sizes) + np.arange(ends[-1])
        return places, np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)


def prefix_tree(prompts: PromptTokens) -> PrefixTree:
    """Sort the prompts and find where they part."""
    builder = _Builder(prompts)
    num = len(prompts.lengths)
    zero = np.zeros(1, np.int32)
    segments = _Segments(np.zeros(1, np.int64), np.full(1, num), zero, zero)
    while len(segments.starts):
        segments = builder.split(segments)
    return builder.tree()


class _Builder:
    def __init__(self, prompts: PromptTokens) -> None:
        num = len(prompts.lengths)
        self._prompts = prompts
        self._windows = np.lib.stride_tricks.sliding_window_view(prompts.tokens, WINDOW)
        self._order = np.arange(num)
        self._shared = np.zeros(num, np.int32)
        self._leaf_parents = np.zeros(num, np.int32)
        zero = np.zeros(1, np.int32)
        self._nodes = [_Segments(np.zeros(1, np.int64), np.full(1, num), zero, zero)]
        self._levels = [0, 1]

    def tree(self) -> PrefixTree:
        """What came of it."""
        nodes = _joined(self._nodes)
        return PrefixTree(
            self._order,
            self._shared,
            self._leaf_parents,
            nodes.starts,
            nodes.stops,
            nodes.depths,
            nodes.parents,
            self._levels,
        )

    def split(self, segments: _Segments) -> _Segments:
        """Go on by up to WINDOW tokens in all segments, split those that part there, and return what is left to do."""
        segments = segments[segments.stops - segments.starts > 1]
        if not len(segments.starts):
            return segments
        common = self._common(segments)
        segments.depths = segments.depths + common
        longer = common == WINDOW
        parted = segments[~longer]
        if not len(parted.starts):
            return segments
        return _joined([segments[longer], self._children(parted)])

    def _common(self, segments: _Segments) -> Tokens:
        """Tokens beyond its depth, up to WINDOW, that all prompts of each segment share with its first one."""
        starts, lengths = self._prompts.starts, self._prompts.lengths
        places, segment = segments.places()
        rows, first = self._order[places], self._order[segments.starts]
        leads = np.empty((len(first), WINDOW), np.int32)
        for block in self._in_file_order(first):
            leads[block] = self._windows[starts[first[block]] + segments.depths[block]]
        first_left = lengths[first] - segments.depths
        same = np.empty(len(places), np.int32)
        for block in self._in_file_order(rows):
            row, which = rows[block], segment[block]
            depths = segments.depths[which]
            differs = self._windows[starts[row] + depths] != leads[which]
            until = np.where(differs.any(1), differs.argmax(1), WINDOW)
            same[block] = np.minimum(np.minimum(until, lengths[row] - depths), first_left[which])
        sizes = segments.stops - segments.starts
        return np.minimum.reduceat(same, np.cumsum(sizes) - sizes)

    def _children(self, parted: _Segments) -> _Segments:
        """Make each segment a node, sort its prompts by their next token, and return the segments below."""
        places, segment = parted.places()
        rows, depths = self._order[places], parted.depths[segment]
        ended = self._prompts.lengths[rows] == depths
        tokens = np.empty(len(rows), np.int32)
        for block in self._in_file_order(rows):
            tokens[block] = self._prompts.tokens[self._prompts.starts[rows[block]] + depths[block]]
        key = segment.astype(np.int64) << 32 | np.where(ended, 0, tokens.astype(np.int64) + 1)
        by_key = np.argsort(key, kind="stable")
        key, ended = key[by_key], ended[by_key]
        self._order[places] = rows[by_key]
        # A prompt that has ended is a child of its own, though others may equal it.
        heads = np.append(True, (key[1:] != key[:-1]) | ended[1:])
        new_segment = np.append(True, segment[1:] != segment[:-1])
        inner = heads & ~new_segment
        self._shared[places[inner]] = depths[inner]
        nodes = (self._levels[-1] + np.arange(len(parted.starts))).astype(np.int32)
        self._nodes.append(parted)
        self._levels.append(self._levels[-1] + len(nodes))
        self._leaf_parents[places] = nodes[segment]
        first = np.flatnonzero(heads)
        sizes = np.diff(np.append(first, len(places)))
        begin, which = places[first], segment[first]
        children = _Segments(begin, begin + sizes, parted.depths[which] + 1, nodes[which])
        return children[sizes > 1]

    def _in_file_order(self, rows: Ints) -> Iterator[Ints]:
        """Indices of `rows` in blocks, in the order in which the prompts lie in the file: its pages are read once."""
        by_file = np.argsort(rows)
        for begin in range(0, len(rows), _BLOCK_ROWS):
            yield by_file[begin : begin + _BLOCK_ROWS]
            self._prompts.release()


def _joined(parts: list[_Segments]) -> _Segments:
    return _Segments(
        np.concatenate([part.starts for part in parts]),
        np.concatenate([part.stops for part in parts]),
        np.concatenate([part.depths for part in parts]),
        np.concatenate([part.parents for part in parts]),
    )
