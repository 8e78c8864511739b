"""The page pool: reference counts, prefix reuse, eviction."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batchgen.engine.kv_cache import PADDING_PAGE, PagePool, common_pages, page_hashes
from batchgen.errors import InternalError


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_hashes_chain_over_full_pages_only() -> None:
    whole = page_hashes(tokens(1, 2, 3, 4, 5, 6, 7), 2)
    assert len(whole) == 3
    assert page_hashes(tokens(1, 2, 3, 4), 2) == whole[:2]
    other = page_hashes(tokens(9, 2, 3, 4), 2)
    assert other[1] != whole[1], "the same page after another prefix is another page"


@pytest.mark.parametrize("known", [0, 1, 2, 3])
def test_hashes_go_on_from_known_ones(known: int) -> None:
    prompt = tokens(1, 2, 3, 4, 5, 6, 7)
    whole = page_hashes(prompt, 2)
    assert page_hashes(prompt, 2, whole[:known]) == whole


@pytest.mark.parametrize(
    ("other", "pages"),
    [((1, 2, 3, 4, 5, 6, 7), 3), ((1, 2, 3, 4, 5), 2), ((1, 2, 9, 4, 5, 6), 1), ((9, 2, 3, 4), 0), ((1,), 0), ((), 0)],
)
def test_common_pages_are_whole_and_from_the_front(other: tuple[int, ...], pages: int) -> None:
    assert common_pages(tokens(1, 2, 3, 4, 5, 6, 7), tokens(*other), 2) == pages
    assert common_pages(tokens(*other), tokens(1, 2, 3, 4, 5, 6, 7), 2) == pages


def test_allocation_hands_out_every_page_but_the_padding_one() -> None:
    pool = PagePool(5)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    assert PADDING_PAGE not in pages
    with pytest.raises(InternalError, match="1 KV pages asked for with 0 free"):
        pool.allocate(1)


def test_a_known_prefix_is_found_while_used_and_after() -> None:
    pool, hashes = PagePool(6), page_hashes(tokens(1, 2, 3, 4), 2)
    first = pool.allocate(2)
    for page, page_hash in zip(first, hashes, strict=True):
        pool.register(page, page_hash)
    assert pool.match(hashes) == first
    pool.release(first)
    pool.release(first)
    assert pool.num_free == 5
    assert pool.match(hashes) == first
    assert pool.num_free == 3


def test_the_least_recently_used_prefix_is_evicted_first_and_from_its_end() -> None:
    dropped: list[int] = []
    pool = PagePool(5, dropped.extend)
    old, new = page_hashes(tokens(1, 2), 1), page_hashes(tokens(3, 4), 1)
    held = {}
    for name, hashes in (("old", old), ("new", new)):
        held[name] = pool.allocate(2)
        for page, page_hash in zip(held[name], hashes, strict=True):
            pool.register(page, page_hash)
    pool.release(held["old"])
    pool.release(held["new"])
    assert dropped == []
    assert pool.allocate(1) == [held["old"][1]]
    assert dropped == [held["old"][1]]
    assert pool.match(old) == [held["old"][0]]
    assert pool.match(new) == held["new"]


def test_a_page_without_known_content_is_dropped_when_its_last_user_leaves() -> None:
    dropped: list[int] = []
    pool = PagePool(4, dropped.extend)
    pages = pool.allocate(2)
    pool.share(pages[:1])
    pool.release(pages)
    assert dropped == [pages[1]]
    pool.release(pages[:1])
    assert dropped == [pages[1], pages[0]]


def test_releasing_what_is_not_used_is_an_internal_error() -> None:
    pool = PagePool(4)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(InternalError, match="released by someone who does not use it"):
        pool.release(pages)


def test_check_finds_a_lost_page() -> None:
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.check([pages])
    with pytest.raises(InternalError, match="1 users on record, but 0 tables"):
        pool.check([pages[:1]])


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a small alphabet come, grow, fork and go; a model of the pool's content runs beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.content: dict[int, bytes] = {}
        self.pool = PagePool(12, self.drop)
        self.tables: list[list[int]] = []

    def drop(self, pages: list[int]) -> None:
        for page in pages:
            self.content.pop(page, None)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def admit(self, prompt: list[int]) -> None:
        hashes = page_hashes(tokens(*prompt), 1)
        cached = self.pool.match(hashes)
        assert [self.content[page] for page in cached] == hashes[: len(cached)]
        if len(hashes) - len(cached) > self.pool.num_free:
            self.pool.release(cached)
            return
        own = self.pool.allocate(len(hashes) - len(cached))
        for page, page_hash in zip(own, hashes[len(cached) :], strict=True):
            self.pool.register(page, page_hash)
            self.content[page] = page_hash
        self.tables.append(cached + own)

    @precondition(lambda self: self.tables and self.pool.num_free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.tables)).extend(self.pool.allocate(1))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table = list(data.draw(st.sampled_from(self.tables)))
        self.pool.share(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)

    @invariant()
    def adds_up(self) -> None:
        self.pool.check(self.tables)
        assert self.pool.num_used == len({page for table in self.tables for page in table})

    def teardown(self) -> None:
        for table in self.tables:
            self.pool.release(table)
        self.pool.check([])
        assert self.pool.num_free == 11


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
