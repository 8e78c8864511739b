"""The order in which prompts run: through the prefix tree, so that what a prefix is needed for runs without a break."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.planning.spool import Ints, Tokens
from batchgen.planning.tree import PrefixTree


class Order(NamedTuple):
    """`places` are the tree's places in the order to run; `shared` the tokens that each has in common with the last."""

    places: Ints
    shared: Tokens


def planned_order(tree: PrefixTree, lengths: Tokens, outputs: Tokens) -> Order:
    """Depth first through the tree. `lengths` and `outputs` are the prompts', by place.

    At each node the branches come first, those with most output for the tokens that they have to compute before the
    others, so that the job's end is no crowd of few long answers; then the prompts that hang from the node itself, the
    longest outputs first. Those that end at the node come last: nobody needs the page that such a prompt computes anew
    for its last token.
    """
    num_leaves, inner = len(lengths), np.arange(1, tree.num_nodes)
    parents = np.concatenate((tree.parents[inner], tree.leaf_parents))
    starts = np.concatenate((tree.starts[inner], np.arange(num_leaves)))
    sizes = np.concatenate((tree.stops[inner] - tree.starts[inner], np.ones(num_leaves, np.int64)))
    rates = np.concatenate((_output_rates(tree, inner, lengths, outputs), outputs.astype(np.float64)))
    ended = (lengths == tree.depths[tree.leaf_parents]).astype(np.int8)
    kinds = np.concatenate((np.zeros(len(inner), np.int8), 1 + ended))
    children = np.lexsort((starts, -rates, kinds, parents))
    parents, sizes = parents[children], sizes[children]
    # Where a child begins, counted from its parent's first place.
    ends = np.cumsum(sizes)
    is_first = np.append(True, parents[1:] != parents[:-1])
    offsets = ends - sizes
    offsets -= np.repeat(offsets[is_first], np.diff(np.append(np.flatnonzero(is_first), len(parents))))
    offset_of = np.empty(len(children), np.int64)
    offset_of[children] = offsets
    begins = np.zeros(tree.num_nodes, np.int64)
    for begin, end in zip(tree.levels[1:-1], tree.levels[2:], strict=True):
        begins[begin:end] = begins[tree.parents[begin:end]] + offset_of[begin - 1 : end - 1]
    leaf_begins = begins[tree.leaf_parents] + offset_of[len(inner) :]
    places = np.empty(num_leaves, np.int64)
    places[leaf_begins] = np.arange(num_leaves)
    shared = np.zeros(num_leaves, np.int32)
    is_inner = offset_of[: len(inner)] > 0
    shared[begins[inner[is_inner]]] = tree.depths[tree.parents[inner[is_inner]]]
    is_later = offset_of[len(inner) :] > 0
    shared[leaf_begins[is_later]] = tree.depths[tree.leaf_parents[is_later]]
    return Order(places, shared)


def _output_rates(tree: PrefixTree, nodes: Ints, lengths: Tokens, outputs: Tokens) -> npt.NDArray[np.float64]:
    """Output tokens of each node's prompts for every token that they have to compute below the node's parent."""
    computed = np.append(0, np.cumsum(lengths - tree.shared, dtype=np.int64))
    drawn = np.append(0, np.cumsum(outputs, dtype=np.int64))
    starts, stops = tree.starts[nodes], tree.stops[nodes]
    # The first prompt may share less with the one before it than with the parent's other prompts.
    above = tree.depths[tree.parents[nodes]] - tree.shared[starts]
    to_compute = np.maximum(1, computed[stops] - computed[starts] - above)
    return np.asarray((drawn[stops] - drawn[starts]) / to_compute)
