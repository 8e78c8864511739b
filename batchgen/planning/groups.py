"""One level of groups out of the prefix tree: the choice that saves most, by dynamic programming.

Every row belongs to one group or to none, and a group's rows share its prefix. It is read once for all of them, so a
group of m rows with a prefix of d tokens saves (m - 1) * d. A row goes to the deepest chosen node above it.
"""

import numpy as np
import numpy.typing as npt

from batchgen.planning.tree import PrefixTree

_Kinks = list[tuple[float, int]]


def choose_groups(tree: PrefixTree, weights: npt.NDArray[np.int64], page_size: int) -> npt.NDArray[np.int32]:
    """The node whose group each place of the tree belongs to; -1 for none.

    `weights` are how many rows each place stands for (a merged one for none). Prefixes are whole pages.
    """
    depths = tree.depths // page_size * page_size
    limits = _limits(tree, depths, weights)
    given = np.zeros(tree.num_nodes, np.int64)
    groups = np.full(tree.num_nodes, -1, np.int32)
    for begin, end in zip(tree.levels[1:-1], tree.levels[2:], strict=True):
        above = tree.parents[begin:end]
        chosen = given[above] < limits[begin:end]
        given[begin:end] = np.where(chosen, depths[begin:end], given[above])
        groups[begin:end] = np.where(chosen, np.arange(begin, end), groups[above])
    return groups[tree.leaf_parents]


def _limits(tree: PrefixTree, depths: npt.NDArray[np.int32], weights: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """For each node: it is chosen when the prefix chosen above it has fewer tokens than this.

    Let f(d) be the most that a node's rows save when a prefix of d tokens is chosen above. It is convex and piecewise
    linear, with as slope the rows that go to the group above. Choosing the node itself, of depth D, saves the sum of
    its children's f(D), less the D tokens of one read, whatever d is: so f is that constant up to some d, the node's
    limit, and the children's sum from there on. A function is kept by its kinks (d, growth of the slope), from 0 to D.
    """
    own = np.bincount(tree.leaf_parents, weights, tree.num_nodes).astype(np.int64)
    limits = np.zeros(tree.num_nodes)
    below: dict[int, _Kinks] = {}
    for node in np.flatnonzero(depths > 0)[::-1].tolist():
        depth, parent = int(depths[node]), int(tree.parents[node])
        kinks = [kink for kink in below.pop(node, []) if kink[0] < depth]
        if own[node]:
            kinks.append((0.0, int(own[node])))
        kinks.sort()
        limits[node] = _raise_floor(kinks, depth)
        if depths[parent] > 0:
            below.setdefault(parent, []).extend(kinks)
    return limits


def _raise_floor(kinks: _Kinks, depth: int) -> float:
    """Where the function with these kinks is `depth` below its value at `depth`; 0 if nowhere. Flattens it up to there.

    Only the kinks from there on remain, in place.
    """
    slope = sum(growth for _, growth in kinks)
    at, to_fall = float(depth), float(depth)
    for kept in range(len(kinks) - 1, -1, -1):
        kink, growth = kinks[kept]
        if slope * (at - kink) > to_fall:
            limit = at - to_fall / slope
            kinks[: kept + 1] = [(limit, slope)]
            return limit
        to_fall -= slope * (at - kink)
        at, slope = kink, slope - growth
    return 0.0
