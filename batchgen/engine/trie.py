"""The targets of a request as a trie: what several of them begin with is computed once."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Target = tuple[int, ...]
Ids = npt.NDArray[np.int32]
Ints = npt.NDArray[np.int64]

_CACHE_SIZE = 256  # kinds of targets: on most jobs all rows have the same


class Trie(NamedTuple):
    """Token sequences that go on from one prompt: M nodes to compute, K edges whose log-probabilities are wanted.

    A node is a token that another one follows; nodes are in preorder, so that each one's subtree is a run of them. An
    edge is a token at its place: its log-probability comes from the node before it, or from the prompt's last token.
    """

    tokens: Ids
    """[M]"""
    depths: Ints
    """[M]: the first token behind the prompt has depth 0."""
    until: Ints
    """[M]: the node behind the last one of the subtree."""
    edge_from: Ints
    """[K], in order: 0 is the prompt's last token, 1 the first node."""
    edge_ids: Ints
    """[K]: the token of each edge."""
    edges: Ints
    """The edges of the first target, then those of the second, and so on."""
    ends: Ints
    """[targets]: where the edges of each target end in `edges`."""

    @property
    def is_chain(self) -> bool:
        """Whether no node has two nodes behind it, so that each one follows on all before it."""
        return bool((self.until == len(self.tokens)).all())

    def by_target(self, values: npt.NDArray[np.float64]) -> list[tuple[float, ...]]:
        """The values of all edges [K] as those of each target's tokens."""
        flat = values[self.edges].tolist()
        return [tuple(flat[begin:end]) for begin, end in pairwise([0, *self.ends.tolist()])]


def make_tries(targets: Sequence[Target], room: int, *, chains_only: bool = False) -> Iterator[tuple[list[int], Trie]]:
    """Tries of at most `room` nodes that together hold all targets, each with the numbers of its targets.

    A target that is longer alone has a trie of its own. `chains_only`: no trie has branches.
    """
    order = sorted(range(len(targets)), key=targets.__getitem__)
    parts = [order]
    while parts:
        part = parts.pop()
        # One target alone is a text to score, and another one in each row.
        trie = (make_trie if len(part) == 1 else _known_trie)(tuple(targets[number] for number in part))
        fits = len(trie.tokens) <= room and (trie.is_chain or not chains_only)
        if fits or len(part) == 1:
            yield part, trie
        else:
            half = len(part) // 2
            parts += [part[half:], part[:half]]


def make_trie(targets: tuple[Target, ...]) -> Trie:
    """The trie of targets that are sorted: then new nodes come in preorder."""
    nodes: dict[tuple[int, int], int] = {}
    edges: dict[tuple[int, int], int] = {}
    depths: list[int] = []
    until: list[int] = []
    path: list[int] = []
    for target in targets:
        at, walked = 0, []
        for depth, token in enumerate(target):
            path.append(edges.setdefault((at, token), len(edges)))
            if depth == len(target) - 1:
                break
            if (at, token) not in nodes:
                nodes[at, token] = len(nodes) + 1
                depths.append(depth)
                until.append(0)
            at = nodes[at, token]
            walked.append(at - 1)
        for node in walked:
            until[node] = len(nodes)
    edge_from = np.array([at for at, _ in edges], np.int64)
    order = np.argsort(edge_from, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return Trie(
        tokens=np.array([token for _, token in nodes], np.int32),
        depths=np.array(depths, np.int64),
        until=np.array(until, np.int64),
        edge_from=edge_from[order],
        edge_ids=np.array([token for _, token in edges], np.int64)[order],
        edges=place[np.array(path, np.int64)],
        ends=np.cumsum([len(target) for target in targets]),
    )


_known_trie = lru_cache(_CACHE_SIZE)(make_trie)
