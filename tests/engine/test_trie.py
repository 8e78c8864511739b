"""Targets as a trie: what it holds, what it shares, and how it is cut when there is little room."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.trie import make_trie, make_tries

TOKENS = st.integers(0, 3)
TARGETS = st.lists(st.lists(TOKENS, min_size=1, max_size=5).map(tuple), min_size=1, max_size=12)


def texts(trie):
    """The tokens from the prompt's end to each node, that one included, by the rule that attention sees it by."""
    return [
        tuple(int(trie.tokens[k]) for k in range(node + 1) if node < trie.until[k]) for node in range(len(trie.tokens))
    ]


@given(targets=TARGETS, room=st.integers(0, 20), chains_only=st.booleans())
def test_every_edge_is_read_behind_the_text_that_it_follows(targets, room, chains_only):
    found = {}
    for numbers, trie in make_tries(targets, room, chains_only=chains_only):
        behind = [(), *texts(trie)]
        assert [len(text) - 1 for text in behind[1:]] == trie.depths.tolist()
        assert len(set(behind)) == len(behind), "no text is computed twice"
        assert trie.is_chain or not chains_only
        assert len(trie.tokens) <= room or len(numbers) == 1
        assert (np.diff(trie.edge_from) >= 0).all()
        edges = trie.by_target(np.arange(len(trie.edge_ids), dtype=np.float64))
        for number, path in zip(numbers, edges, strict=True):
            found[number] = [(behind[trie.edge_from[int(edge)]], int(trie.edge_ids[int(edge)])) for edge in path]
    wanted = {i: [(target[:k], token) for k, token in enumerate(target)] for i, target in enumerate(targets)}
    assert found == wanted


def test_what_targets_share_is_one_node():
    trie = make_trie(((1, 2, 3), (1, 2, 4), (5,), (6, 7)))
    assert texts(trie) == [(1,), (1, 2), (6,)]
    assert trie.until.tolist() == [2, 2, 3]
    assert trie.edge_ids.tolist() == [1, 5, 6, 2, 3, 4, 7]
    assert not trie.is_chain


@pytest.mark.parametrize("targets", [((4,), (5,)), ((1, 2, 3, 4),), ((1,), (1, 2), (1, 2, 3))])
def test_a_chain_is_known(targets):
    assert make_trie(targets).is_chain


def test_one_long_target_is_not_quadratic():
    trie = make_trie((tuple(range(50_000)),))
    assert trie.is_chain
    assert len(trie.tokens) == 49_999
