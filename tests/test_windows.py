"""Rows in planned order: every row once and at its place, the answers of the input's order, and counts that hold."""

import json
import random
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.data.rows import Row
from batchgen.errors import RowError, Stopped
from batchgen.job.spec import Job
from batchgen.prompts.builder import PromptResult
from batchgen.windows import PlannedPrompt, PlannedPrompts


def make_job(window: Any = "all", *, order: str = "auto", **generate: Any) -> Job:
    openai = generate.pop("openai", False)
    job = {
        "version": 1,
        "model": "m",
        "input": {"path": "rows.jsonl", "format": "openai" if openai else "jsonl"},
        "prompt": {} if openai else {"text": "x"},
        "output": {"path": "out"},
        "plan": {"window": window, "order": order},
        "generate": generate,
    }
    return Job.model_validate(job)


def prompts_of(texts: list[list[int] | None], **values: Any) -> Generator[PromptResult]:
    """Prompts of these tokens; None is a row that failed."""
    for index, text in enumerate(texts):
        row = Row(index, {"id": f"#{index}", "long": "text", **values}, f"row {index}")
        if text is None:
            yield PromptResult(row, error=RowError("empty_prompt", "nothing"))
        else:
            yield PromptResult(row, np.array(text, np.int32), "text", truncated_tokens=index)


def in_order(job: Job, texts: list[list[int] | None], **values: Any) -> list[PlannedPrompt]:
    with PlannedPrompts(job, prompts_of(texts, **values), ["id"]) as prompts:
        return list(prompts.in_order(1, lambda: None))


def indices(planned: list[PlannedPrompt]) -> list[int]:
    return [each.row.index for found in planned for each in (found.prompt, *found.merged)]


def test_rows_come_in_planned_order_with_what_the_output_needs() -> None:
    planned = in_order(make_job(), [[5, 5], [1, 2], None, [5, 6], [1, 3]])
    assert indices(planned) == [2, 1, 4, 0, 3]
    assert [found.shared_with_next for found in planned] == [0, 1, 0, 1, 2]
    last = planned[-1].prompt
    assert last.token_ids is not None
    assert last.token_ids.tolist() == [5, 6]
    assert (last.row.values, last.row.place, last.truncated_tokens, last.text) == ({"id": "#3"}, "row 3", 3, "")


@pytest.mark.parametrize(
    ("window", "expected"),
    [(2, [[0, 1], [2, 3], [4]]), ("4 tokens", [[0, 1], [2, 3], [4]]), ("all", [[0, 1, 2, 3, 4]])],
)
def test_a_window_is_rows_or_tokens(window: Any, expected: list[list[int]]) -> None:
    texts: list[list[int] | None] = [[9, 9], [8, 8], [7, 7], [6, 6], [5, 5]]
    found = indices(in_order(make_job(window), texts))
    assert [sorted(found[part[0] : part[-1] + 1]) for part in expected] == expected


def test_counts_of_windows_add_up() -> None:
    source = prompts_of([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 5]])
    with PlannedPrompts(make_job(2, temperature=0.0), source, []) as prompts:
        list(prompts.in_order(1, lambda: None))
    assert prompts.counts is not None
    assert prompts.counts._asdict() == {
        "prompts": 4,
        "prompt_tokens": 12,
        "merged_prompts": 1,
        "merged_tokens": 3,
        "distinct_tokens": 3 + 4,
        "computed_tokens": 3 + 4,
    }


def test_input_order_reads_nothing_ahead() -> None:
    source = prompts_of([[2], [1], [2]])
    with PlannedPrompts(make_job(order="input"), source, []) as prompts:
        assert indices([next(iter(prompts.in_order(1, lambda: None)))]) == [0]
        assert next(source).row.index == 1
        assert prompts.counts is None


def test_reading_begins_at_once_and_ends_with_the_context() -> None:
    """A model takes its time to load: the first window is read meanwhile. Nobody may want it then."""
    is_read = threading.Event()

    def watched() -> Generator[PromptResult]:
        yield from prompts_of([[1], [2]])
        is_read.set()

    source = watched()
    with PlannedPrompts(make_job(), source, []):
        assert is_read.wait(10)
    with pytest.raises(StopIteration):
        next(source)


@pytest.mark.parametrize(
    ("generate", "is_merged"),
    [
        ({"temperature": 0.0}, True),
        ({"choices": ["a", "b"], "temperature": 1.0}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "seed": 7}, False),
        ({"temperature": 1.0, "n": 2}, False),
    ],
)
def test_equal_prompts_are_merged_when_the_answer_is_the_same_by_definition(
    generate: dict[str, Any], is_merged: bool
) -> None:
    planned = in_order(make_job(**generate), [[1, 2], [3], [1, 2]])
    assert [[each.row.index for each in found.merged] for found in planned] == (
        [[2], []] if is_merged else [[], [], []]
    )


@pytest.mark.parametrize(
    ("values", "is_merged"),
    [({"temperature": 1.0, "seed": 3}, True), ({"temperature": 1.0}, False), ({"temperature": 0.0}, True), ({}, True)],
)
def test_requests_with_the_same_seed_of_their_own_are_merged(values: dict[str, Any], is_merged: bool) -> None:
    planned = in_order(make_job(openai=True), [[1, 2], [1, 2]], **values)
    assert len(planned) == (1 if is_merged else 2)


def test_a_fault_while_reading_ends_the_job() -> None:
    def failing() -> Generator[PromptResult]:
        yield from prompts_of([[1]])
        raise TimeoutError("too slow")

    with PlannedPrompts(make_job(), failing(), []) as prompts, pytest.raises(TimeoutError, match="too slow"):
        list(prompts.in_order(1, lambda: None))


def test_a_request_to_stop_is_heard_while_a_window_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.windows._LOOK_SECONDS", 0.001)
    num_read = 0

    def endless() -> Generator[PromptResult]:
        nonlocal num_read
        while True:
            num_read += 1
            yield from prompts_of([[1]])

    def stop() -> None:
        if num_read > 10:
            raise Stopped("enough")

    with PlannedPrompts(make_job(), endless(), []) as prompts, pytest.raises(Stopped):
        list(prompts.in_order(1, stop))


def many_rows() -> list[dict[str, Any]]:
    """Rows that share their beginnings in many ways, some of them equal, some of them bad; shuffled."""
    rng = random.Random(5)
    documents = ["".join(rng.choices("abcdefgh ", k=rng.randint(20, 60))) for _ in range(5)]
    prompts = [f"Read: {rng.choice(documents)}{rng.choice('?!.')}{rng.randint(0, 3)}" for _ in range(60)]
    rows = [{"id": index, "prompt": prompt} for index, prompt in enumerate(prompts)]
    rows[7]["prompt"] = rows[40]["prompt"] = None  # type: ignore[assignment]
    return rows


@pytest.mark.parametrize("window", ["all", 7, "900 tokens"])
def test_planned_answers_are_those_of_the_input_order(job_folder: Any, window: Any) -> None:
    rows = many_rows()
    job_folder.write("rows.jsonl", rows)
    job_folder.save(output={"columns": ["id"], "part_rows": 8}, limits={"failed_rows": 2}, generate={"max_tokens": 5})
    plain = job_folder.run(plan={"order": "input"}, output={"path": "plain"})
    planned = job_folder.run(
        plan={"order": "auto", "window": window}, output={"path": "planned"}, engine={"page_size": 8}
    )
    assert (plain.exit_code, planned.exit_code) == (0, 0), planned.log
    assert planned.column("id") == planned.column("row") == list(range(60))
    for name in ("output", "status", "finish_reason", "prompt_tokens", "output_tokens", "error"):
        assert planned.column(name) == plain.column(name), name
    report = json.loads(Path(job_folder.out, "manifest.json").read_text())["report"]
    assert report["merged_rows"] > 0
    # Between windows more can be shared than was planned, never less.
    assert report["computed_tokens"] <= report["planned_tokens"] < report["prompt_tokens"]
    if window == "all":
        assert report["computed_tokens"] == report["planned_tokens"]
        assert "prompt tokens computed, as planned" in planned.log
    merged = [row for row in planned.rows if row["cached_tokens"] == row["prompt_tokens"] > 0]
    assert len(merged) == report["merged_rows"]


def test_prompts_that_calibrate_are_not_counted(job_folder: Any) -> None:
    """They leave pages in the cache, which the plan does not know."""
    job_folder.write("rows.jsonl", [{"prompt": f"Read: {'lorem ipsum ' * 3}{row}?"} for row in range(6)])
    done = job_folder.run(generate={"choices": ["a", "bc"], "calibrate": "batch"}, engine={"page_size": 8})
    assert done.exit_code == 0, done.log
    report = json.loads(Path(job_folder.out, "manifest.json").read_text())["report"]
    assert report["prompt_tokens"] == sum(done.column("prompt_tokens"))
    assert 0 < report["computed_tokens"] <= report["planned_tokens"]


def test_rows_of_different_windows_share_what_the_cache_still_holds(job_folder: Any) -> None:
    """The second window is planned without the first. Its one new token and the last one of the prompt are computed."""
    document = "Read: " + "lorem ipsum " * 3 + "so"
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"{document}{row}?"} for row in range(4)])
    done = job_folder.run(
        generate={"max_tokens": 2}, plan={"window": 2}, output={"columns": ["id"]}, engine={"page_size": 8}
    )
    assert done.exit_code == 0, done.log
    assert done.column("id") == [0, 1, 2, 3]
    report = json.loads(Path(job_folder.out, "manifest.json").read_text())["report"]
    length = report["prompt_tokens"] // 4
    assert report["planned_tokens"] == 2 * (length + 2)
    assert report["computed_tokens"] == length + 3 * 2


def test_planned_tokens_hold_with_few_pages_and_samples(job_folder: Any) -> None:
    job_folder.write("rows.jsonl", [row for row in many_rows() if row["prompt"]])
    done = job_folder.run(
        generate={"max_tokens": 6, "temperature": 0.8, "n": 2},
        plan={"window": "all"},
        engine={"page_size": 8, "kv_memory": "64KiB", "max_batch_rows": 5},
    )
    assert done.exit_code == 0, done.log
    report = json.loads(Path(job_folder.out, "manifest.json").read_text())["report"]
    assert report["merged_rows"] == 0
    assert report["computed_tokens"] == report["planned_tokens"] < report["prompt_tokens"] // 2
