"""Prompts in order from worker processes, read a little ahead, and a dead worker."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from batchgen.data.rows import Row
from batchgen.errors import EngineError, RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt
from batchgen.prompts import stream
from batchgen.prompts.builder import PromptBuilder, PromptRecipe
from batchgen.prompts.stream import prompt_stream


@pytest.fixture
def recipe(model_folder):
    return PromptRecipe(Prompt(text="Row {{ a }}"), Generate(), Limits(), str(model_folder()), 256)


def rows(count):
    for index in range(count):
        if index % 50 == 7:
            yield Row(index, {}, f"row {index}", RowError("bad_json", "no JSON"))
        else:
            yield Row(index, {"a": str(index) if index % 50 else None}, f"row {index}")


def test_workers_give_what_the_process_itself_gives(recipe):
    here = list(prompt_stream(recipe, rows(300), 0))
    there = list(prompt_stream(PromptBuilder(recipe), rows(300), 2))
    assert [result.row for result in there] == list(rows(300))
    for one, other in zip(here, there, strict=True):
        assert (one.row, one.text, one.error) == (other.row, other.text, other.error)
        assert (one.token_ids is None) == (other.token_ids is None)
        assert one.token_ids is None or one.token_ids.tolist() == other.token_ids.tolist()
    assert {result.error.kind for result in here if result.error} == {"bad_json", "template_undefined"}


def test_rows_are_read_a_little_ahead_only(recipe, monkeypatch):
    taken = []

    def endless():
        index = 0
        while True:
            taken.append(index)
            yield Row(index, {"a": "x" * 1000}, "row")
            index += 1

    monkeypatch.setattr(stream, "_ROWS_PER_TASK", 8)
    results = prompt_stream(recipe, endless(), 1)
    assert [next(results).row.index for _ in range(20)] == list(range(20))
    assert len(taken) <= 20 + 8 * (stream._TASKS_AHEAD + 1)
    results.close()


def test_large_rows_make_small_tasks():
    tasks = list(stream._tasks([Row(index, {"a": "x" * 300_000}, "row") for index in range(10)]))
    assert [len(task) for task in tasks] == [2] * 5


def test_a_dead_worker_is_an_error_and_no_hang(recipe, monkeypatch):
    pools = []

    class Watched(ProcessPoolExecutor):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            pools.append(self)

    monkeypatch.setattr(stream, "ProcessPoolExecutor", Watched)
    results = prompt_stream(recipe, rows(100_000), 1)
    next(results)
    for pid in list(pools[0]._processes):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"engine\.prompt_workers"):
        for _ in results:
            pass


_ORPHAN = """
import itertools, multiprocessing, sys, time
from batchgen.data.rows import Row
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt
from batchgen.prompts.builder import PromptRecipe
from batchgen.prompts.stream import prompt_stream

if __name__ == "__main__":
    recipe = PromptRecipe(Prompt(text="{{ a }}"), Generate(), Limits(), sys.argv[1], 256)
    results = prompt_stream(recipe, (Row(i, {"a": "x"}, "row") for i in itertools.count()), 1)
    next(results)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_D11_workers_end_with_their_parent(recipe, tmp_path):
    script = tmp_path / "orphan.py"
    script.write_text(_ORPHAN)
    parent = subprocess.Popen([sys.executable, script, recipe.model_path], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert pids
    parent.kill()
    parent.wait()
    parent.stdout.close()
    for _ in range(200):
        if not any(map(_is_running, pids)):
            return
        time.sleep(0.05)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    pytest.fail(f"still there: {pids}")


def _is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_B02_a_bos_in_the_text_is_warned_of_once(model_folder, byte_level, caplog):
    folder = model_folder(byte_level(bos=True))
    own_bos = [Row(index, {"a": "<s>x"}, f"row {index}") for index in range(3)]
    list(prompt_stream(PromptRecipe(Prompt(text="{{ a }}"), Generate(), Limits(), str(folder), 256), own_bos, 0))
    assert [record.getMessage() for record in caplog.records] == [
        "row 0: the text begins with a BOS token, so none is added (told once)"
    ]


def test_in_place_rows_are_read_one_by_one(recipe):
    source = iter(rows(10))
    results = prompt_stream(recipe, source, 0)
    next(results)
    assert next(source).index == 1
