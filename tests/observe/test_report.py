"""The figures at the end of a run, and when a job counts as failed."""

import json
from dataclasses import replace

import pytest

from batchgen.errors import TooManyBadRows
from batchgen.observe.report import PHASES, PhaseClock, Report, check_failed_rows

REPORT = Report(
    rows=1000,
    prompt_tokens=40_000,
    cached_tokens=30_000,
    output_tokens=16_000,
    seconds=80.0,
    phases={"open": 0.5, "load": 10.25, "prefill": 20.0, "decode": 40.0, "write": 0.01, "other": 9.24},
    startup={"weights": 8.0, "first steps": 2.125, "KV cache": 0.001, "graphs": 0.5},
)


def test_summary() -> None:
    assert REPORT.summary({"error": 10, "ok": 2990}, "s3://bucket/out").splitlines() == [
        "rows    3,000: 2,990 ok, 10 error",
        "tokens  40,000 prompt (75% cached), 16,000 output",
        "speed   1,000 rows in 80.0 s: 12.5 rows/s, 200 output tokens/s",
        "time    decode 40.0 s, prefill 20.0 s, load 10.2 s, other 9.2 s, open 0.5 s",
        "start   weights 8.0 s, first steps 2.1 s, graphs 0.5 s",
        "output  s3://bucket/out",
    ]


def test_summary_says_whether_the_plan_was_kept() -> None:
    kept = replace(REPORT, planned_tokens=10_000, merged_rows=12)
    assert "10,000 prompt tokens computed, as planned; 12 rows took the answer" in kept.summary({}, "out")
    missed = replace(REPORT, planned_tokens=9_000)
    assert "plan    10,000 prompt tokens computed, 9,000 planned\n" in missed.summary({}, "out")


def test_summary_of_nothing() -> None:
    empty = Report(rows=0, prompt_tokens=0, cached_tokens=0, output_tokens=0, seconds=0.0, phases={})
    assert empty.summary({}, "out").splitlines()[:3] == [
        "rows    0: none",
        "tokens  0 prompt, 0 output",
        "speed   0 rows in 0.0 s: 0.0 rows/s, 0 output tokens/s",
    ]


def test_json() -> None:
    assert json.loads(json.dumps(REPORT.to_json())) == {
        "rows": 1000,
        "prompt_tokens": 40_000,
        "cached_tokens": 30_000,
        "computed_tokens": 10_000,
        "planned_tokens": None,
        "forced_tokens": 0,
        "retried_rows": 0,
        "merged_rows": 0,
        "output_tokens": 16_000,
        "seconds": 80.0,
        "rows_per_second": 12.5,
        "output_tokens_per_second": 200.0,
        "seconds_by_phase": REPORT.phases,
        "startup_seconds": REPORT.startup,
    }


def test_phases_add_up_to_the_whole() -> None:
    times = iter([0.0, 1.0, 3.0, 3.0, 7.0, 10.0, 10.0])
    clock = PhaseClock(lambda: next(times))
    with clock.phase("load"):
        pass
    with clock.phase("write"):
        pass
    clock.add("decode", 1.5)
    seconds = clock.seconds()
    assert tuple(seconds) == PHASES
    assert {name: value for name, value in seconds.items() if value} == {
        "load": 2.0,
        "decode": 1.5,
        "write": 4.0,
        "other": 2.5,
    }
    with pytest.raises(ValueError, match="'lunch' is no phase"):
        clock.add("lunch", 1.0)


@pytest.mark.parametrize(
    ("counts", "limit"),
    [
        ({"ok": 100}, "0%"),
        ({"ok": 99, "error": 1}, "1%"),
        ({"ok": 99, "error": 1}, 1),
        ({"ok": 1, "length": 50, "skipped": 49}, "0%"),
        ({"ok": 93, "invalid": 3, "error": 4}, "7%"),
        ({"error": 5}, "100%"),
        ({}, 0),
    ],
)
def test_D11_so_few_failed_rows_are_allowed(counts: dict[str, int], limit: str | int) -> None:
    check_failed_rows(counts, limit, "out")


@pytest.mark.parametrize(
    ("counts", "limit"),
    [
        ({"ok": 99, "error": 1}, "0%"),
        ({"ok": 99, "invalid": 1}, 0),
        ({"ok": 98, "invalid": 1, "error": 1}, "1%"),
        ({"ok": 150, "error": 2}, "1%"),
    ],
)
def test_D11_more_are_too_many(counts: dict[str, int], limit: str | int) -> None:
    with pytest.raises(TooManyBadRows, match=r"limits\.failed_rows allows") as caught:
        check_failed_rows(counts, limit, "out")
    assert caught.value.exit_code == 10


def test_D11_the_message_says_how_many_and_where_to_look() -> None:
    with pytest.raises(TooManyBadRows) as caught:
        check_failed_rows({"ok": 880, "error": 100, "invalid": 20, "length": 1000}, "1%", "s3://out")
    assert str(caught.value) == (
        "120 of 2,000 rows failed (20 invalid, 100 error), and limits.failed_rows allows 20 (1%). "
        "All rows are written; the columns `status` and `error` in s3://out say which failed and why."
    )
