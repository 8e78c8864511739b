"""The plan of a window: which prompts run, in which order, in which groups, and how many tokens that computes."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.config import LEAST_COPIED
from batchgen.planning.groups import choose_groups
from batchgen.planning.order import Order, planned_order
from batchgen.planning.spool import Ints, PromptTokens, Tokens
from batchgen.planning.tree import PrefixTree, prefix_tree


class Counts(NamedTuple):
    """What a plan comes to. Counts of windows add up."""

    prompts: int = 0
    prompt_tokens: int = 0
    merged_prompts: int = 0
    """Prompts whose answer is taken from an equal one."""
    merged_tokens: int = 0
    """Their tokens."""
    distinct_tokens: int = 0
    """Nodes of the tree of tokens: to compute if every shared token were computed once."""
    computed_tokens: int = 0
    """Prompt tokens to compute: also the last one of each prompt, and those too few inside a page to be copied."""

    def plus(self, other: "Counts") -> "Counts":
        """Both together."""
        return Counts(*(one + two for one, two in zip(self, other, strict=True)))

    def without_sharing(self) -> "Counts":
        """The same prompts, each of them computed as a whole."""
        return self._replace(computed_tokens=self.prompt_tokens - self.merged_tokens)


class Groups(NamedTuple):
    """Group g: `rows[g]` prompts, one of them number `first[g]`, which begin with the same `prefix[g]` tokens."""

    prefix: Tokens
    rows: Ints
    first: Ints


class Plan(NamedTuple):
    """`order` are the prompts to run, and `shared` the tokens that each has in common with the one before it.

    Fewer tokens than are worth a copy count as none where nothing else is shared. `group` is the group of each of them,
    -1 for none. `merged_into[i]` is the prompt that answers for prompt i: itself for those in `order`.
    """

    order: Ints
    shared: Tokens
    group: Tokens
    merged_into: Ints
    groups: Groups
    counts: Counts


def make_plan(prompts: PromptTokens, outputs: Tokens, merge_keys: Ints, page_size: int) -> Plan:
    """Plan one window. `outputs` are the tokens that each answer may have; see Spool for `merge_keys`."""
    if not len(prompts.lengths):
        return in_input_order(prompts)
    tree = prefix_tree(prompts).without_nodes_above(min(LEAST_COPIED, page_size))
    lengths = prompts.lengths[tree.order]
    leaders = _leaders(tree, lengths, merge_keys[tree.order])
    runs = leaders == np.arange(len(leaders))
    order = _without(planned_order(tree, lengths, outputs[tree.order]), runs)
    node_of = choose_groups(tree, runs.astype(np.int64), page_size)[order.places]
    groups, group = _groups(tree, node_of, tree.order[order.places], page_size)
    merged_into = np.empty(len(leaders), np.int64)
    merged_into[tree.order] = tree.order[leaders]
    length = lengths[order.places]
    cached = _reused(np.minimum(order.shared, np.maximum(length - 1, 0)), page_size)
    counts = Counts(
        prompts=len(lengths),
        prompt_tokens=int(lengths.sum(dtype=np.int64)),
        merged_prompts=int((~runs).sum()),
        merged_tokens=int(lengths[~runs].sum(dtype=np.int64)),
        distinct_tokens=int((lengths - tree.shared).sum(dtype=np.int64)),
        computed_tokens=int((length - cached).sum(dtype=np.int64)),
    )
    return Plan(tree.order[order.places], order.shared, group, merged_into, groups, counts)


def in_input_order(prompts: PromptTokens) -> Plan:
    """No plan: every prompt runs, in the order in which it came, and nothing is known of what it shares."""
    numbers = np.arange(len(prompts.lengths))
    none, no_ints = np.empty(0, np.int32), np.empty(0, np.int64)
    zero = np.zeros(len(numbers), np.int32)
    total = int(prompts.lengths.sum(dtype=np.int64))
    counts = Counts(prompts=len(numbers), prompt_tokens=total, distinct_tokens=total, computed_tokens=total)
    return Plan(numbers, zero, zero - 1, numbers, Groups(none, no_ints, no_ints), counts)


def _leaders(tree: PrefixTree, lengths: Tokens, keys: Ints) -> Ints:
    """For each place, the first place with the same tokens and the same key."""
    places = np.arange(len(lengths))
    equals_last = np.zeros(len(lengths), np.bool_)
    equals_last[1:] = (tree.shared[1:] == lengths[1:]) & (lengths[1:] == lengths[:-1])
    text = np.cumsum(~equals_last)
    by_key = np.lexsort((places, keys, text))
    text, keys = text[by_key], keys[by_key]
    is_leader = np.append(True, (text[1:] != text[:-1]) | (keys[1:] != keys[:-1]))[: len(places)] | (keys < 0)
    leaders = np.empty(len(places), np.int64)
    leaders[by_key] = by_key[np.flatnonzero(is_leader)[np.cumsum(is_leader) - 1]]
    return leaders


def _reused(shared: Tokens, page_size: int) -> Tokens:
    """The tokens that are not computed again, of those shared: whole pages, and inside a page those worth a copy."""
    inside = shared % page_size
    return np.where(inside < LEAST_COPIED, shared - inside, shared)


def _without(order: Order, runs: npt.NDArray[np.bool_]) -> Order:
    """Leave out the places that do not run. What two prompts share, all between them share."""
    kept = np.flatnonzero(runs[order.places])
    # The least of what was shared on the way from the last kept one to this one.
    after_last = np.append(0, kept[:-1] + 1)
    bounds = np.stack((after_last, kept + 1), 1).ravel()
    shared = np.append(order.shared, np.int32(0))
    least = np.minimum.reduceat(shared, bounds)[::2] if len(kept) else shared[:0]
    return Order(order.places[kept], least.astype(np.int32))


def _groups(tree: PrefixTree, node_of: Tokens, numbers: Ints, page_size: int) -> tuple[Groups, Tokens]:
    """Number the groups in the order of their first prompts."""
    nodes, first, index, rows = np.unique(node_of, return_index=True, return_inverse=True, return_counts=True)
    by_first = np.argsort(first)
    by_first = by_first[nodes[by_first] >= 0]
    number = np.full(len(nodes), -1, np.int32)
    number[by_first] = np.arange(len(by_first))
    prefix = (tree.depths[nodes[by_first]] // page_size * page_size).astype(np.int32)
    return Groups(prefix, rows[by_first], numbers[first[by_first]]), number[index]
