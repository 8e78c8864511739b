"""D03: going on with a job. What decides the output is compared by content; what can't change it may differ."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

OK, JOB_FILE, STORAGE, BAD_ROWS, STOPPED = 0, 2, 4, 10, 75


@pytest.fixture
def begun(job_folder, tiny_llama, tmp_path):
    """A job with a model of its own that stopped after a few rows."""
    model = tmp_path / "model"
    shutil.copytree(tiny_llama, model)
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(12)])
    job_folder.write("chat.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}")
    job_folder.save(
        model=str(model),
        generate={"max_tokens": 2, "temperature": 1.0, "seed": 5},
        output={"columns": ["id"], "part_rows": 4},
        engine={"max_batch_rows": 2},
    )
    return job_folder


@pytest.fixture
def stop_after(monkeypatch):
    """Ends the next run on purpose after so many rows."""
    from batchgen.data.output import OutputFolder
    from batchgen.errors import Stopped

    def arrange(rows):
        add, left = OutputFolder.add, [rows]

        def counted(self, row):
            add(self, row)
            left[0] -= 1
            if left[0] == 0:
                raise Stopped("enough")

        monkeypatch.setattr(OutputFolder, "add", counted)

    return arrange


def stop_early(job, stop_after, monkeypatch, rows=6, options=(), **sections):
    stop_after(rows)
    assert job.run(*options, **sections).exit_code == STOPPED
    monkeypatch.undo()


DECIDES = [
    ({"generate": {"temperature": 0.5}}, "generate.temperature: was 1.0, now 0.5"),
    ({"generate": {"max_tokens": 3}}, "generate.max_tokens: was 2, now 3"),
    ({"generate": {"stop": ["x"]}}, 'generate.stop: was [], now ["x"]'),
    ({"generate": {"seed": 6}}, "generate.seed: was 5, now 6"),
    ({"generate": {"n": 2}}, "generate.n: was 1, now 2"),
    ({"prompt": {"text": "{{ prompt }}!"}}, 'prompt.text: was "{{ prompt }}", now "{{ prompt }}!"'),
    ({"output": {"columns": []}}, 'output.columns: was ["id"], now []'),
    ({"engine": {"dtype": "bfloat16"}}, 'engine.dtype: was "float32", now "bfloat16"'),
    ({"limits": {"overlong": "skip"}}, 'limits.overlong: was "error", now "skip"'),
    ({"input": {"limit": 8}}, "input.limit: was null, now 8"),
]
HARMLESS = {
    "name": "another name",
    "limits": {"runtime": "1h", "failed_rows": "5%"},
    "output": {"part_rows": 3, "compression": "snappy"},
    "checkpoint": {"every": "1s"},
    "engine": {"max_batch_rows": 4, "kv_memory": "8MiB", "prefix_caching": False, "threads": 2},
}


def test_D03_fields_that_decide_the_output_are_refused_before_the_model_loads(begun, stop_after, monkeypatch):
    stop_early(begun, stop_after, monkeypatch)
    before, first = begun.files(), json.loads(json.dumps(begun.job))
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))
    for sections, message in DECIDES:
        done = begun.run(**sections)
        assert done.exit_code == JOB_FILE, sections
        assert message in done.log
        assert "Set these back to go on with that job" in done.log
        begun.job = json.loads(json.dumps(first))
    assert begun.files() == before
    monkeypatch.undo()
    done = begun.run(**HARMLESS)
    assert done.exit_code == OK, done.log
    assert done.column("id") == list(range(12))


def test_D03_the_resumed_output_is_that_of_one_run(begun, stop_after, monkeypatch):
    whole = begun.run(output={"path": "whole"})
    stop_early(begun, stop_after, monkeypatch, output={"path": "out"})
    done = begun.run()
    assert [row | {"cached_tokens": 0} for row in done.rows] == [row | {"cached_tokens": 0} for row in whole.rows]
    assert [name for name in done.files if "journal" in name] == []


def edit_weights(begun):
    path = begun.folder.parent / "model" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] = weights["model.norm.weight"] * 2
    save_file(weights, path, {"format": "pt"})
    return "model (content): was"


def edit_tokenizer(begun):
    path = begun.folder.parent / "model" / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["added_tokens"].pop()
    path.write_text(json.dumps(fields))
    return "tokenizer (content): was"


def edit_row(begun):
    path = begun.folder / "rows.jsonl"
    path.write_text(path.read_text().replace("row 7", "row 8"))
    return "input file 1: was rows.jsonl, 12 rows"


def swap_rows(begun):
    path = begun.folder / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    return "input file 1: was rows.jsonl, 12 rows"


def lose_row(begun):
    path = begun.folder / "rows.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    return "input rows: was 12, now 11"


@pytest.mark.parametrize("edit", [edit_weights, edit_tokenizer, edit_row, swap_rows, lose_row])
def test_D03_content_under_the_same_path_is_compared(begun, stop_after, monkeypatch, edit):
    stop_early(begun, stop_after, monkeypatch)
    before = begun.files()
    message = edit(begun)
    done = begun.run()
    assert done.exit_code == JOB_FILE
    assert message in done.log
    assert begun.files() == before


def test_D03_a_chat_template_under_the_same_path(begun, stop_after, monkeypatch):
    chat = {"prompt": {"user": "{{ prompt }}", "chat_template": "chat.jinja"}}
    stop_early(begun, stop_after, monkeypatch, **chat)
    begun.write("chat.jinja", "{% for m in messages %}> {{ m.content }}{% endfor %}")
    done = begun.run()
    assert done.exit_code == JOB_FILE
    assert "chat template (content): was" in done.log


def test_D03_fresh_starts_in_an_empty_folder_only_and_removes_nothing(begun, stop_after, monkeypatch):
    stop_early(begun, stop_after, monkeypatch)
    before = begun.files()
    done = begun.run("--fresh", generate={"seed": 6})
    assert done.exit_code == STORAGE
    assert "--fresh starts in an empty folder only. Nothing was removed" in done.log
    assert begun.files() == before
    done = begun.run("--fresh", output={"path": "another"})
    assert done.exit_code == OK
    assert done.column("id") == list(range(12))


@pytest.fixture
def months(begun):
    """A folder of input files to which another one comes every month."""
    begun.write("in/2026-01.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(6)])
    begun.save(input={"path": "in"})
    return begun


def add_month(job, name, first, last):
    job.write(f"in/{name}.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(first, last)])


@pytest.mark.parametrize("stopped", [False, True])
def test_extend_runs_the_rows_of_new_files_only(months, stop_after, monkeypatch, stopped):
    if stopped:
        stop_early(months, stop_after, monkeypatch, rows=3)
    else:
        assert months.run().exit_code == OK
    add_month(months, "2026-02", 6, 11)
    done = months.run()
    assert done.exit_code == JOB_FILE
    assert "input file 2: was (none), now 2026-02.jsonl, 5 rows" in done.log
    assert "To run the rows of new input files only, add --extend" in done.log

    kept = {part.name: part.read_bytes() for part in months.out.glob("part-*")}
    done = months.run("--extend")
    assert done.exit_code == OK, done.log
    assert done.column("row") == done.column("id") == list(range(11))
    assert "8 rows in" in done.log if stopped else "5 rows in" in done.log
    assert kept.items() <= {part.name: part.read_bytes() for part in months.out.glob("part-*")}.items()
    names = ["part-00000-of-00002", "part-00001-of-00002", "part-00002-of-00004", "part-00003-of-00004"]
    assert [name for name in done.files if name.startswith("part")] == [f"{name}.parquet" for name in names]

    done = months.run()
    assert (done.exit_code, "nothing to do" in done.log) == (OK, True)
    add_month(months, "2026-03", 11, 12)
    assert months.run("--extend").column("id") == list(range(12))
    alone = months.run("--fresh", output={"path": "alone"})
    assert [row["output"] for row in alone.rows] == [row["output"] for row in months_rows(months, "out")]


def months_rows(job, name):
    return [row for part in sorted((job.folder / name).glob("part-*")) for row in pq.read_table(part).to_pylist()]


def test_extend_killed_in_the_middle_goes_on_with_or_without_the_option(months, stop_after, monkeypatch):
    assert months.run().exit_code == OK
    add_month(months, "2026-02", 6, 11)
    stop_after(2)
    assert months.run("--extend").exit_code == STOPPED
    monkeypatch.undo()
    done = months.run()
    assert done.exit_code == OK, done.log
    assert "3 rows in" in done.log
    assert done.column("id") == list(range(11))


def test_extend_refuses_files_that_would_shift_rows_and_changed_old_ones(months):
    assert months.run().exit_code == OK
    before = months.files()
    add_month(months, "2025-12", 6, 8)
    done = months.run("--extend")
    assert done.exit_code == JOB_FILE
    assert "2025-12.jsonl is new, and sorts before" in done.log
    (months.folder / "in/2025-12.jsonl").unlink()
    add_month(months, "2026-01", 1, 7)
    add_month(months, "2026-02", 7, 8)
    done = months.run("--extend")
    assert done.exit_code == JOB_FILE
    assert "input file 1: was 2026-01.jsonl" in done.log
    add_month(months, "2026-01", 0, 6)
    done = months.run("--extend", generate={"seed": 6})
    assert done.exit_code == JOB_FILE
    assert "generate.seed: was 5, now 6" in done.log
    assert months.files() == before


def test_retry_failed_runs_the_failed_rows_only(begun, monkeypatch):
    from batchgen.answers import Answers
    from batchgen.errors import RowError

    without_answer, ask = Answers._without_answer, Answers.ask
    asked = []

    def failing(self, planned):
        prompt = planned.prompt
        asked.append(prompt.row.index)
        if prompt.row.index in (1, 9):
            return without_answer(self, prompt, RowError("out_of_memory", "no room"), "error")
        return ask(self, planned)

    monkeypatch.setattr(Answers, "ask", failing)
    first = begun.run()
    assert first.exit_code == BAD_ROWS
    assert [row for row, kind in enumerate(first.kinds()) if kind] == [1, 9]
    untouched = (begun.out / "part-00001-of-00003.parquet").stat().st_mtime_ns
    monkeypatch.undo()

    assert begun.run().exit_code == BAD_ROWS  # they are not tried again by themselves
    monkeypatch.setattr(Answers, "ask", lambda self, it: asked.append(it.prompt.row.index) or ask(self, it))
    asked.clear()
    done = begun.run("--retry-failed")
    assert done.exit_code == OK, done.log
    assert asked == [1, 9]
    assert done.kinds() == [None] * 12
    assert [row for row in done.rows if row["row"] not in (1, 9)] == [
        row for row in first.rows if row["row"] not in (1, 9)
    ]
    assert (begun.out / "part-00001-of-00003.parquet").stat().st_mtime_ns == untouched
    asked.clear()
    assert "nothing to do" in begun.run("--retry-failed").log
    assert asked == []


def test_retry_failed_runs_those_that_wait_in_the_journal_too(begun, stop_after, monkeypatch):
    """Stopped before their part was whole; and killed once more after their second attempt."""
    from batchgen.answers import Answers
    from batchgen.errors import RowError

    ask = Answers.ask

    def failing(self, planned):
        if planned.prompt.row.index == 1:
            return self._without_answer(planned.prompt, RowError("out_of_memory", "no room"), "error")
        return ask(self, planned)

    monkeypatch.setattr(Answers, "ask", failing)
    stop_early(begun, stop_after, monkeypatch, rows=3, plan={"order": "input"})
    stop_early(begun, stop_after, monkeypatch, rows=1, options=["--retry-failed"])
    done = begun.run()
    assert done.exit_code == OK, done.log
    assert done.kinds() == [None] * 12
    assert done.column("id") == list(range(12))
