"""Rows that begin with the same pages: the runs that attention reads together, and their work in a padded step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from batchgen.engine.shared_runs import ReadingCosts, shared_runs
from batchgen_kernels import SharedRuns, WorkRoom, decode_work

PAGE = 4


def make_batch(rng: np.random.Generator, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Block tables of random prefix trees: a page stands for all before it, too. Behind a row's pages is waste."""
    ids: dict[tuple[int, ...], int] = {}
    table = np.zeros((rows, columns), np.int32)
    for row in table:
        path: tuple[int, ...] = ()
        for column in range(columns):
            path += (int(rng.integers(0, rng.choice([1, 2, 9]))),)
            row[column] = ids.setdefault(path, len(ids) + 1)
    lens = rng.integers(1, columns * PAGE + 1, rows).astype(np.int32)
    for row, length in zip(table, lens, strict=True):
        row[-(-int(length) // PAGE) :] = rng.integers(0, 9)
    return table, lens


def most_saved(rows: list[int], table: np.ndarray, whole: np.ndarray) -> int:
    """What the best nodes of the tree below these rows save, in pages."""
    depth = 0
    while all(whole[row] > depth for row in rows) and len({table[row][depth] for row in rows}) == 1:
        depth += 1
    children: dict[int, list[int]] = {}
    for row in rows:
        if whole[row] > depth:
            children.setdefault(table[row][depth], []).append(row)
    return max(
        (len(rows) - 1) * depth, sum(most_saved(group, table, whole) for group in children.values() if len(group) > 1)
    )


@pytest.mark.parametrize("seed", range(60))
def test_runs_save_most(seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, lens = make_batch(rng, int(rng.integers(1, 40)), 6)
    runs = shared_runs(table, lens, PAGE, lambda rows, pages: (rows - 1) * pages, 0)
    saved = 0
    if runs is not None:
        assert len(set(runs.members.tolist())) == len(runs.members) == runs.sizes.sum()
        for rows, keys in zip(np.split(runs.members, np.cumsum(runs.sizes)[:-1]), runs.num_keys, strict=True):
            assert (table[rows][:, : keys // PAGE] == table[rows[0], : keys // PAGE]).all()
            assert (lens[rows] > keys).all()
            saved += (len(rows) - 1) * keys // PAGE
    assert saved == (most_saved(list(range(len(lens))), table, (lens - 1) // PAGE) if len(lens) > 1 else 0)


def test_runs_that_save_nothing_are_left_out() -> None:
    table = np.array([[1, 2, 3, 10], [1, 2, 3, 11], [4, 12, 0, 0], [4, 13, 0, 0], [4, 14, 0, 0]], np.int32)
    lens = np.array([13, 14, 5, 6, 7], np.int32)
    runs = shared_runs(table, lens, PAGE, lambda rows, pages: rows * pages, 9)
    assert runs is not None
    assert (runs.members.tolist(), runs.sizes.tolist(), runs.num_keys.tolist()) == ([0, 1, 2, 3, 4], [2, 3], [12, 4])
    assert shared_runs(table, lens, PAGE, lambda rows, pages: rows * pages, 9.1) is None
    runs = shared_runs(table, lens, PAGE, lambda rows, pages: rows * (pages - 1), 1)
    assert runs is not None
    assert runs.members.tolist() == [0, 1]
    assert shared_runs(table, lens, PAGE, lambda rows, pages: -1.0, 0) is None


CONFIGS = {
    name: SimpleNamespace(num_q_heads=q, num_kv_heads=kv, q_size=q * dim, kv_size=kv * dim)
    for name, (q, kv, dim) in {"8B": (32, 8, 128), "0.5B": (14, 2, 64)}.items()
}


@pytest.mark.parametrize(
    ("model", "rows", "least"),
    [("8B", 2, 1024), ("8B", 4, 256), ("8B", 16, 128), ("0.5B", 4, 512), ("0.5B", 16, 256)],
)
def test_costs_say_what_was_measured(model: str, rows: int, least: int) -> None:
    """`least` keys are the fewest of 128, 256, 512 and so on that were faster together."""
    config: Any = CONFIGS[model]
    costs = ReadingCosts.of(config, 64, 2)
    assert costs.saved(rows, least // 64) > 0
    assert costs.saved(rows, least // 128) < 0 or least == 128


@pytest.mark.parametrize("heads", [(32, 8), (14, 2), (16, 1), (71, 1)], ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_a_padded_step_has_room_and_covers_every_key_once(seed: int, heads: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, rng.choice([3, 60]), int(rng.integers(1, 30))).astype(np.int32)
    keys = (rng.integers(1, 300, len(sizes)) * 64).astype(np.int32)
    num_rows = int(sizes.sum()) + int(rng.integers(0, 50))
    members = rng.permutation(num_rows)[: sizes.sum()].astype(np.int32)
    lens = rng.integers(1, 40_000, num_rows).astype(np.int32)
    lens[members] += np.repeat(keys, sizes)
    work = decode_work(lens, SharedRuns(members, sizes, keys), *heads)
    room = WorkRoom.of(
        num_rows, -(-len(work.items) // num_rows), shared=True, num_q_heads=heads[0], num_kv_heads=heads[1]
    )
    padded = room.pad(work)
    assert padded.num_parts >= work.num_parts
    covered: list[list[tuple[int, int, int]]] = [[] for _ in lens]
    for row, begin, end, part in padded.items[padded.items[:, 2] > 0].tolist():
        covered[row].append((begin, end, part))
    for first, count, begin, end, part in padded.shared_items.tolist():
        for row in padded.members[first : first + count].tolist() if end else ():
            covered[row].append((begin, end, part))
    first_part = 0
    for row, (first, count, shared, _) in enumerate(padded.row_parts.tolist()):
        spans = sorted(covered[row])
        assert [part for _, _, part in spans] == list(range(count))
        assert [begin for begin, _, _ in spans] == [0, *(end for _, end, _ in spans[:-1])]
        assert spans[-1][1] == lens[row]
        assert shared < count
        if count > 1:
            assert first == first_part
            first_part += count
    assert first_part == work.num_parts
