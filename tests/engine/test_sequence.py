"""The table of rows: who sits where, and which tokens are whose."""

import numpy as np

from batchgen.engine import Request, SamplingParams
from batchgen.engine.config import Limits
from batchgen.engine.sequence import RowTable, Sequence

LIMITS = Limits(max_length=32, page_size=4, num_pages=20, max_rows=2, max_tokens=64, lag=1, refill_share=0.125)


def sequence(*, outputs: list[int] | None = None, stop_ids: tuple[int, ...] = ()) -> Sequence:
    return Sequence(
        request=Request("a", [1, 2, 3], SamplingParams(max_tokens=6)),
        sample=0,
        prompt_length=3,
        fill=np.array([1, 2, 3], np.int32),
        max_outputs=6,
        eos_ids=frozenset(),
        stop_ids=frozenset(stop_ids),
        page_hashes=[],
        outputs=outputs or [],
    )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def test_a_late_token_of_a_row_s_last_sequence_does_not_reach_the_next_one() -> None:
    table = RowTable(LIMITS)
    first, resumed = sequence(), sequence(outputs=[7, 8, 9])
    table.place(first, [1], 3)
    row = first.row
    table.put_tokens(ints(row), ints(0), ints(5))
    assert table.remove(first) == [1]
    table.place(resumed, [2, 3], 6)
    assert resumed.row == row
    table.put_tokens(ints(row), ints(1), ints(55))
    table.put_tokens(ints(row), ints(3), ints(10))
    table.fetch_tokens(resumed, 4)
    assert resumed.outputs == [7, 8, 9, 10]


def test_only_rows_whose_answers_may_end_are_looked_at() -> None:
    table = RowTable(LIMITS)
    plain, stopping = sequence(stop_ids=(4,)), sequence(stop_ids=tuple(range(10, 20)))
    table.place(plain, [1], 3)
    table.place(stopping, [2], 3)
    rows = ints(plain.row, stopping.row)
    assert table.put_tokens(rows, ints(0, 0), ints(3, 3)).tolist() == [False, False]
    assert table.put_tokens(rows, ints(1, 1), ints(4, 4)).tolist() == [True, False]
    assert table.put_tokens(rows, ints(2, 2), ints(19, 19)).tolist() == [False, True]
    assert table.put_tokens(rows, ints(5, 4), ints(3, 3)).tolist() == [True, False], "the last output that fits"


def test_a_row_knows_its_pages_and_how_many_tokens_it_has_drawn() -> None:
    table = RowTable(LIMITS)
    seq = sequence()
    table.place(seq, [5, 6], 3)
    table.append_pages(seq.row, [9])
    assert table.pages(seq.row) == [5, 6, 9]
    assert table.num_drawn(seq.row) == 1
    table.computed[seq.row] += 2
    assert table.num_drawn(seq.row) == 3
    assert list(table.tables()) == [[5, 6, 9]]
    assert table.remove(seq) == [5, 6, 9]
    assert table.num_free == 2
