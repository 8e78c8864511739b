"""Tasks run in their order in one thread, and what goes wrong is raised where somebody listens."""

import threading

import pytest

from batchgen.data.writer import MOST_WAITING, Writer
from batchgen.errors import StorageError


def fail() -> None:
    raise StorageError("full")


def test_tasks_run_in_order() -> None:
    writer, done = Writer(), []
    for number in range(20):
        writer.submit(lambda number=number: done.append(number))
    writer.drain()
    writer.stop()
    assert done == list(range(20))


def test_after_a_failure_nothing_runs_and_each_call_raises_it() -> None:
    writer, done = Writer(), []
    writer.offer(fail)
    writer.offer(lambda: done.append(1))
    for call in (writer.drain, writer.drain, writer.check, lambda: writer.submit(lambda: None)):
        with pytest.raises(StorageError, match="full"):
            call()
    assert writer.told
    writer.stop()
    assert done == []


def test_stopping_drops_what_waits() -> None:
    writer, begun, go, done = Writer(), threading.Event(), threading.Event(), []
    writer.offer(lambda: (begun.set(), go.wait(20), done.append(1)))
    for _ in range(MOST_WAITING):
        writer.offer(lambda: done.append(2))
    assert begun.wait(20)
    assert not writer.has_room
    threading.Timer(0.05, go.set).start()
    writer.stop()
    writer.drain()
    assert done == [1]
