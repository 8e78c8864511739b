"""Plans against what can be counted by hand: a trie of Python dictionaries, and every choice of groups there is."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.engine.config import LEAST_COPIED
from batchgen.planning.plan import Plan, in_input_order, make_plan
from batchgen.planning.spool import Spool
from batchgen.planning.tree import prefix_tree

Prompts = Sequence[Sequence[int]]

# Few tokens, so that prompts begin alike, equal one another and are prefixes of one another.
few_tokens = st.lists(st.integers(0, 2), max_size=6)
# A long shared beginning: longer than the window in which prompts are compared.
long_prefix = st.builds(
    lambda length, rest: [7] * length + rest, st.sampled_from([0, 30, 31, 32, 33, 63, 64, 65]), few_tokens
)
page_sizes = st.sampled_from([1, 2, 3, 4, 5, 8, 16])
prompt_sets = st.lists(st.one_of(few_tokens, long_prefix), max_size=24)


def plan_of(
    prompts: Prompts, page_size: int = 1, outputs: Sequence[int] | None = None, keys: Sequence[int] | None = None
) -> Plan:
    with Spool() as spool:
        for number, prompt in enumerate(prompts):
            spool.append(
                np.array(prompt, np.int32),
                b"",
                outputs=outputs[number] if outputs else 0,
                merge_key=keys[number] if keys else -1,
            )
        return make_plan(spool.tokens(), spool.outputs, spool.merge_keys, page_size)


def common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def trie_size(prompts: Prompts) -> int:
    """Nodes of the trie: distinct prefixes that are not empty."""
    return len({tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)})


def saved_by(plan: Plan) -> int:
    return int(((plan.groups.rows - 1) * plan.groups.prefix).sum())


def most_saved(prompts: Prompts, page_size: int) -> int:
    """The most that one level of groups can save, by trying every set of prefixes."""
    prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(page_size, len(prompt) + 1, page_size)}
    best = 0
    for size in range(len(prefixes) + 1):
        for chosen in itertools.combinations(prefixes, size):
            deepest = [max((len(p) for p in chosen if tuple(prompt[: len(p)]) == p), default=0) for prompt in prompts]
            best = max(best, sum(deepest) - sum(map(len, chosen)))
    return best


@given(prompt_sets)
@example([])
@example([[]])
@example([[1]])
@example([[1, 2], [1, 2], [1, 2]])
@example([[1], [1, 1], [1, 1, 1]])
def test_tree_is_the_sorted_prompts_and_what_neighbours_share(prompts: Prompts) -> None:
    with Spool() as spool:
        for prompt in prompts:
            spool.append(np.array(prompt, np.int32), b"")
        tree = prefix_tree(spool.tokens())
    assert tree.order.tolist() == sorted(range(len(prompts)), key=lambda i: (prompts[i], i))
    ordered = [prompts[i] for i in tree.order]
    assert tree.shared.tolist() == [common(*pair) for pair in itertools.pairwise([[], *ordered])]
    for node in range(tree.num_nodes):
        inside = ordered[tree.starts[node] : tree.stops[node]]
        assert all(prompt[: tree.depths[node]] == inside[0][: tree.depths[node]] for prompt in inside)
        assert node == 0 or tree.parents[node] < node


@given(prompt_sets, st.data())
def test_every_prompt_runs_once_and_shares_what_the_plan_says(prompts: Prompts, data: st.DataObject) -> None:
    outputs = data.draw(st.lists(st.integers(0, 3), min_size=len(prompts), max_size=len(prompts)))
    plan = plan_of(prompts, 1, outputs)
    assert sorted(plan.order.tolist()) == list(range(len(prompts)))
    ordered = [prompts[i] for i in plan.order]
    assert plan.shared.tolist() == [common(*pair) for pair in itertools.pairwise([[], *ordered])]


@given(prompt_sets, page_sizes)
def test_too_few_shared_tokens_are_none(prompts: Prompts, page_size: int) -> None:
    plan = plan_of(prompts, page_size)
    least = min(LEAST_COPIED, page_size)
    in_common = [common(*pair) for pair in itertools.pairwise([[], *(prompts[i] for i in plan.order)])]
    assert plan.shared.tolist() == [tokens if tokens >= least else 0 for tokens in in_common]


@given(prompt_sets)
def test_tokens_to_compute_are_the_nodes_of_the_trie(prompts: Prompts) -> None:
    plan = plan_of(prompts)
    assert plan.counts.prompt_tokens == sum(map(len, prompts))
    assert plan.counts.distinct_tokens == trie_size(prompts)
    in_order = sum(
        len(prompts[i]) - shared for i, shared in zip(plan.order.tolist(), plan.shared.tolist(), strict=True)
    )
    assert in_order == trie_size(prompts), "the order loses nothing of what can be shared"


@given(prompt_sets, page_sizes)
def test_shared_tokens_are_computed_once(prompts: Prompts, page_size: int) -> None:
    """Against an engine that forgets nothing. It computes the last token of a prompt, and what is not worth a copy."""
    computed = 0
    plan = plan_of(prompts, page_size)
    ordered = [prompts[i] for i in plan.order]
    for number, prompt in enumerate(ordered):
        shared = max((common(prompt, other) for other in ordered[:number]), default=0)
        shared = min(shared, max(0, len(prompt) - 1))
        computed += len(prompt) - (shared if shared % page_size >= LEAST_COPIED else shared // page_size * page_size)
    assert plan.counts.computed_tokens == computed


@given(prompt_sets, st.integers(1, 3))
def test_groups_share_their_prefix_and_are_whole_pages(prompts: Prompts, page_size: int) -> None:
    plan = plan_of(prompts, page_size)
    for number, (prefix, rows, first) in enumerate(zip(*plan.groups, strict=True)):
        members = [prompts[i] for i in plan.order[plan.group == number]]
        assert len(members) == rows >= 2
        assert prompts[first] in members
        assert prefix > 0
        assert prefix % page_size == 0
        assert {tuple(member[:prefix]) for member in members} == {tuple(prompts[first][:prefix])}


@given(st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=7), st.integers(1, 2))
@example([[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 1]], 1)
def test_no_choice_of_groups_saves_more(prompts: Prompts, page_size: int) -> None:
    prefixes = {tuple(p[:end]) for p in prompts for end in range(page_size, len(p) + 1, page_size)}
    if len(prefixes) <= 11:
        assert saved_by(plan_of(prompts, page_size)) == most_saved(prompts, page_size)


@given(prompt_sets)
def test_a_chosen_prefix_runs_without_a_break(prompts: Prompts) -> None:
    """The rows below a group's node, those of deeper groups among them, are neighbours."""
    plan = plan_of(prompts)
    ordered = [tuple(prompts[i]) for i in plan.order]
    for prefix, first in zip(plan.groups.prefix, plan.groups.first, strict=True):
        start = tuple(prompts[first][:prefix])
        places = [place for place, prompt in enumerate(ordered) if prompt[:prefix] == start]
        assert places == list(range(places[0], places[-1] + 1))


@given(prompt_sets, st.data())
def test_equal_prompts_with_equal_keys_are_merged(prompts: Prompts, data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.integers(-1, 2), min_size=len(prompts), max_size=len(prompts)))
    plan = plan_of(prompts, 1, keys=keys)
    first: dict[tuple[object, ...], int] = {}
    expected = [
        number if key < 0 else first.setdefault((key, *prompt), number)
        for number, (prompt, key) in enumerate(zip(prompts, keys, strict=True))
    ]
    assert plan.merged_into.tolist() == expected
    assert sorted(plan.order.tolist()) == sorted(set(expected))
    ordered = [prompts[i] for i in plan.order]
    assert plan.shared.tolist() == [common(*pair) for pair in itertools.pairwise([[], *ordered])]
    assert plan.counts.merged_prompts == len(prompts) - len(set(expected))
    assert plan.counts.merged_tokens == sum(len(p) for i, p in enumerate(prompts) if expected[i] != i)


def test_one_group_for_all() -> None:
    plan = plan_of([[*range(40), 100 + i] for i in range(50)], page_size=16)
    assert plan.groups.prefix.tolist() == [32]
    assert plan.groups.rows.tolist() == [50]
    assert plan.counts.distinct_tokens == 40 + 50
    assert plan.counts.computed_tokens == 41 + 49


def test_no_sharing_at_all_keeps_the_order_of_the_tokens() -> None:
    plan = plan_of([[3, 1], [2, 1], [1, 1]])
    assert plan.order.tolist() == [2, 1, 0]
    assert len(plan.groups.rows) == 0
    assert plan.counts.computed_tokens == plan.counts.prompt_tokens == 6


def test_a_prompt_equal_to_its_groups_prefix_belongs_to_it() -> None:
    plan = plan_of([[1, 2, 3], [1, 2], [1, 2, 4]])
    assert plan.groups.prefix.tolist() == [2]
    assert plan.groups.rows.tolist() == [3]


def test_groups_that_decode_much_come_early_and_long_outputs_first_in_a_group() -> None:
    prompts = [[1, 1, 1, 5], [1, 1, 1, 6], [2, 2, 2, 5], [2, 2, 2, 6], [2, 2, 2, 7]]
    plan = plan_of(prompts, outputs=[10, 20, 100, 300, 200])
    assert plan.order.tolist() == [3, 4, 2, 1, 0]


def test_longest_outputs_come_first_where_next_to_nothing_is_shared() -> None:
    """Beginning with the same few tokens is no reason to run together."""
    outputs = [10, 40, 20, 50, 30]
    plan = plan_of([[1, 1, 1, i, 7] for i in range(5)], page_size=16, outputs=outputs)
    assert [outputs[i] for i in plan.order] == [50, 40, 30, 20, 10]
    assert plan.counts.computed_tokens == 25
    assert plan.counts.distinct_tokens == 13


def test_input_order_plans_nothing() -> None:
    with Spool() as spool:
        for prompt in ([2, 1], [1], [2, 1]):
            spool.append(np.array(prompt, np.int32), b"", merge_key=0)
        plan = in_input_order(spool.tokens())
    assert plan.order.tolist() == plan.merged_into.tolist() == [0, 1, 2]
    assert plan.counts.computed_tokens == 5


@pytest.mark.parametrize("token", [0, 2**31 - 1])
def test_largest_and_smallest_token_ids_sort_right(token: int) -> None:
    plan = plan_of([[5, token], [5, 1], [5], [5, token, 0]])
    assert plan.counts.distinct_tokens == 4


def test_many_prompts_that_are_prefixes_of_one_another() -> None:
    """A tree as deep as it is large: nothing here may recurse."""
    plan = plan_of([[1] * length for length in range(1, 1500)])
    assert plan.counts.distinct_tokens == 1499
