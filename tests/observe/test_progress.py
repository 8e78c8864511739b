"""Progress is a bar or a few lines, and never the end of a job."""

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
import termios
import warnings
from collections.abc import Callable

import pytest

from batchgen.observe.notices import MOST_KINDS
from batchgen.observe.progress import FEWEST_ROWS, Progress


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run_for(progress: Progress, clock: Clock, seconds: int, rows: int = 10, tokens: int = 100) -> None:
    for _ in range(seconds):
        clock.now += 1
        progress.update(rows, tokens)


def test_D12_off_a_terminal_there_is_a_line_after_5_seconds_and_then_every_30() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(10_000, 1000, stream=stream, clock=clock) as progress:
        run_for(progress, clock, 4)
        assert stream.getvalue() == ""
        run_for(progress, clock, 1)
        assert stream.getvalue() == ("1,050 of 10,000 rows (10.5%), 10.0 rows/s, 100 output tokens/s, 0:14:55 left\n")
        run_for(progress, clock, 300)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert not re.search(r"[\r\x1b]", stream.getvalue())


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_lines_for_machines(make: Callable[[], io.StringIO]) -> None:
    stream, clock = make(), Clock()
    with Progress(10_000, 1000, as_json=True, stream=stream, clock=clock) as progress:
        run_for(progress, clock, 5)
        logging.getLogger("batchgen.test").warning("row %d is odd", 7)
        progress.write("done", report={"rows": 50})
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["progress", "message", "message"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", line["time"]) for line in lines)
    figures = {"done": 1050, "total": 10_000, "rows_per_second": 10.0, "output_tokens_per_second": 100.0}
    assert figures.items() <= lines[0].items()
    assert lines[0]["seconds_left"] == 895
    assert lines[1]["text"] == "warning: row 7 is odd"
    assert lines[2]["report"] == {"rows": 50}


@pytest.mark.parametrize("make", [io.StringIO, Terminal])
def test_rates_count_from_the_beginning_of_work(make: Callable[[], io.StringIO]) -> None:
    """Loading a model takes a while, and says nothing of the rows."""
    stream, clock = make(), Clock()
    with Progress(stream=stream, clock=clock) as progress:
        clock.now += 100
        progress.begin(1000, 400)
        run_for(progress, clock, 4)
        if make is io.StringIO:
            assert stream.getvalue() == ""
        run_for(progress, clock, 1)
        shown = stream.getvalue()
        assert ("450 of 1,000 rows (45.0%), 10.0 rows/s" if make is io.StringIO else "/1000 [") in shown


def test_rates_are_those_of_the_last_minute() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100_000, stream=stream, clock=clock) as progress:
        run_for(progress, clock, 120, rows=1)
        run_for(progress, clock, 120, rows=50)
    assert ", 50.0 rows/s, " in stream.getvalue().splitlines()[-1]


def test_time_left_is_not_guessed_from_a_row_or_two() -> None:
    """The first row may have waited for all that was set up before it."""
    stream, clock = io.StringIO(), Clock()
    with Progress(200_000, stream=stream, clock=clock) as progress:
        clock.now += 10
        progress.update(1)
        clock.now += 30
        progress.update(FEWEST_ROWS)
    first, second = stream.getvalue().splitlines()
    assert first == "1 of 200,000 rows (0.0%), 0.1 rows/s, 0 output tokens/s, unknown left"
    assert re.search(r", \d+:\d\d:\d\d left$", second)


def test_nothing_done_yet_and_nothing_to_do() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(100, stream=stream, clock=clock) as progress:
        clock.now += 10
        progress.update(0)
    assert stream.getvalue() == "0 of 100 rows (0.0%), 0.0 rows/s, 0 output tokens/s, unknown left\n"
    with Progress(0, stream=stream, clock=clock) as progress:
        clock.now += 10
        progress.update(0)
    assert "0 of 0 rows (100.0%)" in stream.getvalue()


def test_on_a_terminal_there_is_a_bar_and_lines_stand_above_it() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(100, 20, stream=stream, clock=clock) as progress:
        run_for(progress, clock, 3)
        progress.write("a line")
    text = stream.getvalue()
    assert "20/100" in text
    assert "\ra line\n" in re.sub(r"\r +\r", "\r", text)


def test_quiet_leaves_only_warnings() -> None:
    for stream in (Terminal(), io.StringIO()):
        clock = Clock()
        with Progress(100, quiet=True, stream=stream, clock=clock) as progress:
            run_for(progress, clock, 100)
            logging.getLogger("batchgen.data").warning("odd")
        assert stream.getvalue() == "warning: odd\n"


def test_D12_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream, clock = Terminal(), Clock()
    with Progress(100, stream=stream, clock=clock) as progress:
        run_for(progress, clock, 5)
    assert stream.getvalue().startswith("50 of 100 rows")
    assert "\r" not in stream.getvalue()


@pytest.mark.parametrize("columns", [20, 80])
def test_D12_a_real_terminal_of_any_width_has_no_colours(columns: int) -> None:
    code = "from batchgen.observe.progress import Progress\nwith Progress(9) as p:\n  for _ in range(9): p.update()"
    main, other = pty.openpty()
    termios.tcsetwinsize(other, (24, columns))
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1"}
    assert subprocess.run([sys.executable, "-c", code], stderr=other, env=environment).returncode == 0
    text = os.read(main, 65536).decode()
    os.close(other)
    os.close(main)
    assert "\r" in text
    assert "\x1b" not in text
    assert max(map(len, re.split(r"[\r\n]+", text))) <= columns


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2> >(exec true)"])
def test_D12_a_closed_full_or_broken_stderr_ends_nothing(stderr: str) -> None:
    code = (
        "import sys, time; from batchgen.observe.progress import Progress\n"
        "with Progress(9) as p:\n"
        "  for _ in range(9): p.write('x' * 10000); time.sleep(0.02)\n"
        "sys.exit(3)"
    )
    done = subprocess.run(["bash", "-c", f'"$0" -c "$1" {stderr}', sys.executable, code])
    assert done.returncode == 3


def test_warnings_of_other_libraries_are_json_too() -> None:
    stream = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with Progress(as_json=True, stream=stream):
            warnings.warn("old\nand odd", DeprecationWarning, stacklevel=1)
    [line] = map(json.loads, stream.getvalue().splitlines())
    assert line["event"] == "message"
    assert "DeprecationWarning: old and odd" in line["text"]


def test_D12_warnings_of_a_kind_are_counted_not_repeated() -> None:
    stream = io.StringIO()
    log = logging.getLogger("batchgen.somewhere")
    with Progress(10, stream=stream):
        for row in range(1000):
            log.warning("row %d is odd", row)
        log.warning("once\nonly")
        log.info("not shown")
    assert stream.getvalue().splitlines() == [
        "warning: row 0 is odd",
        "warning: once only",
        "warning: row 999 is odd (and 999 like it before)",
    ]
    log.error("after the end")
    assert "after the end" not in stream.getvalue()


def test_D12_even_kinds_of_warnings_are_bounded() -> None:
    stream = io.StringIO()
    with Progress(10, stream=stream):
        for row in range(1000):
            logging.getLogger("batchgen").warning(f"text {row}")
    lines = stream.getvalue().splitlines()
    assert len(lines) == MOST_KINDS + 1
    assert lines[-1] == "warning: 950 more messages are not shown"
