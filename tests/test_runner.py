"""The life of a job: begun, stopped, gone on with, refused, finished; and what its job file may ask for."""

import itertools
import json
import logging
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest

from batchgen.engine.engine import Engine

NUM_ROWS, PART_ROWS = 30, 10


@pytest.fixture
def job(job_folder):
    """A job of three parts."""
    job_folder.write("rows.jsonl", [{"id": f"r{row}", "prompt": f"row {row:02}"} for row in range(NUM_ROWS)])
    job_folder.save(output={"columns": ["id"], "part_rows": PART_ROWS})
    return job_folder


@pytest.fixture
def asked(monkeypatch):
    """The rows that engines were asked for."""
    rows = []
    add = Engine.add

    def counted(self, request):
        rows.append(request.request_id)
        add(self, request)

    monkeypatch.setattr(Engine, "add", counted)
    return rows


@pytest.fixture
def no_model(monkeypatch):
    """A model that must not be loaded."""
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))


def test_a_job_runs_from_its_file_to_parts_and_manifest(job):
    done = job.run()
    assert done.exit_code == 0
    assert done.files == ["manifest.json", *(f"part-0000{number}-of-00003.parquet" for number in range(3))]
    assert done.column("row") == list(range(NUM_ROWS))
    assert done.column("id") == [f"r{row}" for row in range(NUM_ROWS)]
    manifest = json.loads((job.out / "manifest.json").read_text())
    assert manifest["state"] == "finished"
    assert sum(manifest["rows_by_status"].values()) == NUM_ROWS
    report = manifest["report"]
    assert (report["rows"], report["prompt_tokens"]) == (NUM_ROWS, sum(done.column("prompt_tokens")))
    assert report["output_tokens"] == sum(done.column("output_tokens"))
    assert done.log.splitlines()[0].startswith(f"rows    {NUM_ROWS}: ")
    assert done.log.splitlines()[-1] == f"output  {job.out}"


def test_a_finished_job_does_nothing(job, monkeypatch):
    assert job.run().exit_code == 0
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))
    times = {path: path.stat().st_mtime_ns for path in job.out.iterdir()}
    again = job.run()
    assert again.exit_code == 0
    assert again.log.startswith("This job was finished at ")
    assert {path: path.stat().st_mtime_ns for path in job.out.iterdir()} == times


def command(job, *options):
    return [sys.executable, "-P", "-m", "batchgen", "run", str(job.save()), *options]


def test_a_rerun_asks_for_what_no_part_holds(job, asked):
    whole = job.run().rows
    asked.clear()
    (job.out / "part-00001-of-00003.parquet").unlink()
    again = job.run()
    assert sorted(asked) == list(range(10, 20))
    # What the cache spared a row depends on the rows beside it.
    assert [row | {"cached_tokens": 0} for row in again.rows] == [row | {"cached_tokens": 0} for row in whole]
    assert again.log.count("are computed again") == 1


def test_a_damaged_part_is_computed_again(job, asked):
    whole = job.run().rows
    asked.clear()
    (job.out / "part-00000-of-00003.parquet").unlink()
    damaged = job.out / "part-00002-of-00003.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    (job.out / ".part-00001-of-00003.parquet.0123456789ab.tmp").write_bytes(content[:99])
    again = job.run()
    assert sorted(asked) == [*range(10), *range(20, 30)]
    assert "part-00002-of-00003.parquet is computed again: its end is missing" in again.log
    assert not [name for name in again.files if name.endswith(".tmp")]
    assert (again.exit_code, again.rows) == (0, whole)


def test_D03_a_changed_job_is_refused_with_its_fields(job, monkeypatch):
    job.run()
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))
    done = job.run(generate={"temperature": 0.5, "seed": 3}, prompt={"text": "{{ prompt }}!"})
    assert done.exit_code == 2
    assert "generate.temperature" in done.log
    assert "generate.seed" in done.log
    assert "prompt.text" in done.log
    assert "max_tokens" not in done.log


@pytest.mark.parametrize("trouble", [{"engine": {"kv_memory": "1KiB"}}, {"prompt": {"text": "{{ prompt.nope }}"}}])
def test_a_job_that_did_nothing_may_be_corrected(job, trouble):
    job.write("rows.jsonl", [{"id": str(row), "prompt": "a"} for row in range(100)])
    assert job.run(**trouble).exit_code in (2, 5)
    assert job.files() == ["manifest.json"]
    done = job.run(engine={"kv_memory": "1MiB"}, prompt={"text": "{{ prompt }}"}, generate={"max_tokens": 1})
    assert (done.exit_code, len(done.rows)) == (0, 100)


@pytest.mark.parametrize("change", ["edited", "swapped", "longer", "renamed"])
def test_D03_a_changed_input_is_refused_by_name(job, change):
    job.run()
    (job.out / "part-00000-of-00003.parquet").unlink()
    lines = (job.folder / "rows.jsonl").read_text().splitlines(keepends=True)
    changed = {
        "edited": [*lines[:-1], lines[-1].replace("row 29", "row 92")],
        "swapped": [lines[1], lines[0], *lines[2:]],
        "longer": [*lines, lines[0]],
        "renamed": lines,
    }
    name = "others.jsonl" if change == "renamed" else "rows.jsonl"
    job.write(name, "".join(changed[change]))
    done = job.run(input={"path": name})
    assert (done.exit_code, len(done.rows)) == (2, 20)
    assert name in done.log
    assert "differs" in done.log


def test_D03_the_engine_may_change(job, asked):
    job.run()
    (job.out / "part-00000-of-00003.parquet").unlink()
    asked.clear()
    assert job.run(engine={"max_batch_rows": 3, "page_size": 16}).exit_code == 0
    assert sorted(asked) == list(range(10))


def test_limits_runtime_stops_the_job_resumably(job, monkeypatch):
    ticks = itertools.count()
    with monkeypatch.context() as slow:
        slow.setattr("batchgen.interrupt.time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
        done = job.run(limits={"runtime": "20s"}, engine={"max_batch_rows": 4})
    assert done.exit_code == 75
    assert "stopped after limits.runtime (20s)" in done.log
    assert len(done.rows) < NUM_ROWS
    assert "manifest.json" in done.files
    assert done.files[-1].startswith("part-") or len(done.files) == 1  # no lock, nothing half written
    done = job.run(limits={"runtime": "1h"})
    assert (done.exit_code, done.column("row")) == (0, list(range(NUM_ROWS)))


@pytest.mark.parametrize(("allowed", "code"), [(0, 10), (2, 10), (3, 0), ("9%", 10), ("10%", 0)])
def test_limits_failed_rows(job, allowed, code):
    rows = [{"id": str(row), "prompt": None if row % 10 == 0 else "a"} for row in range(NUM_ROWS)]
    job.write("rows.jsonl", rows)
    done = job.run(limits={"failed_rows": allowed})
    assert done.exit_code == code
    assert len(done.rows) == NUM_ROWS
    assert ("3 of 30 rows failed (3 error)" in done.log) == (code == 10)
    again = job.run()
    assert again.exit_code == code  # a rerun says the same


@pytest.mark.parametrize("begun", [False, True])
def test_the_first_rows_end_a_job_only_when_it_begins(job, begun):
    job.write("rows.jsonl", [{"id": "x", "prompt": "a" if row < 10 else None} for row in range(120)])
    if begun:
        done = job.run(limits={"failed_rows": "100%"})
        assert done.exit_code == 0
        for part in sorted(job.out.glob("part-*"))[1:]:
            part.unlink()
        assert job.run().exit_code == 0
    else:
        job.write("rows.jsonl", [{"id": "x", "prompt": None}] * 100)
        done = job.run()
        assert done.exit_code == 2
        assert "each of the first 100 rows failed in the same way (null_prompt)" in done.log


def chat(text, **body):
    return {"custom_id": text, "method": "POST", "url": "/v1/chat/completions"} | {
        "body": {"model": "any", "messages": [{"role": "user", "content": text}], **body}
    }


@pytest.fixture
def openai(job_folder):
    """Runs a job over these lines of an OpenAI batch file."""
    job_folder.save(input={"format": "openai"}, prompt={}, output={"columns": ["custom_id"]})
    numbers = itertools.count()

    def go(*lines, **generate):
        job_folder.write("rows.jsonl", lines)
        job_folder.job["generate"] = {"max_tokens": 6, "ignore_eos": True} | generate
        return job_folder.run(output={"path": f"out-{next(numbers)}"})

    return go


def test_openai_rows_bring_their_parameters(openai):
    done = openai(
        chat("a"),
        chat("a", max_tokens=2),
        chat("a", max_completion_tokens=3),
        chat("a", temperature=1.5, seed=11),
        chat("a", temperature=1.5, seed=11),
        chat("a", temperature=1.5, seed=12),
        chat("a", logit_bias={"97": 100}),
        chat("a", response_format={"type": "text"}, n=1, stream=False, user="somebody"),
    )
    assert done.exit_code == 0
    assert done.column("output_tokens") == [6, 2, 3, 6, 6, 6, 6, 6]
    texts = done.column("output")
    assert texts[0] == texts[7]
    assert texts[3] == texts[4] != texts[5]
    assert len(set(texts[6])) == 1


def test_openai_seed_of_a_row_may_be_the_jobs(openai):
    """Two rows with one seed of their own draw alike, whatever the job's seed is."""
    rows = [chat("a", temperature=1.5, seed=seed) for seed in (7, 7)] + [chat("a", temperature=1.5)] * 2
    texts = openai(*rows, seed=7).column("output")
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_openai_stop_of_a_row(openai, job_folder):
    text = openai(chat("a"), skip_special_tokens=False).rows[0]["output"]
    stop = text[2]
    done = openai(
        chat("a", stop=stop), chat("a", stop=[stop], include_stop_str_in_output=True), skip_special_tokens=False
    )
    assert done.column("output") == [text[: text.index(stop)], text[: text.index(stop) + 1]]
    assert done.column("finish_reason") == ["stop", "stop"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"max_tokens": 0}, "body.max_tokens"),
        ({"max_tokens": "5"}, "body.max_tokens"),
        ({"temperature": -1}, "body.temperature"),
        ({"top_p": 0}, "body.top_p"),
        ({"stop": ""}, "body.stop"),
        ({"stop": 5}, "body.stop"),
        ({"seed": -1}, "body.seed"),
        ({"logit_bias": {"x": 1}}, "body.logit_bias"),
        ({"logit_bias": {"99999": 1}}, "99999"),
        ({"n": 2}, "body.n"),
        ({"logprobs": True}, "body.logprobs"),
        ({"response_format": {"type": "xml"}}, "body.response_format"),
        ({"echo": True}, "body.echo"),
    ],
)
def test_openai_a_bad_parameter_is_that_rows_error(openai, body, field):
    done = openai(chat("a"), chat("b", **body), chat("c"))
    assert done.exit_code == 10
    assert done.kinds() == [None, "bad_request", None]
    assert field in done.rows[1]["error"]["message"]


def test_choices_have_probabilities(job):
    done = job.run(generate={"choices": ["yes", "no", "don't know"]})
    for row in done.rows:
        assert row["output"] == row["label"] == max(row["label_probs"], key=row["label_probs"].get)
        assert math.fsum(row["label_probs"].values()) == pytest.approx(1, abs=1e-12)
        assert (row["status"], row["output_tokens"]) == ("ok", 0)


def test_logprobs_have_a_column(job):
    done = job.run(generate={"logprobs": 3, "ignore_eos": True, "skip_special_tokens": False})
    for row in done.rows:
        assert len(row["logprobs"]) <= row["output_tokens"]
        for entry in row["logprobs"]:
            assert len(entry["top"]) == 3
            assert entry["top"][0]["token_id"] == entry["token_id"]  # greedy
            assert entry["top"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-5)


def test_samples_are_rows_of_their_own(job):
    done = job.run(generate={"n": 3, "temperature": 1})
    assert [(row["row"], row["sample"]) for row in done.rows] == [(r, s) for r in range(NUM_ROWS) for s in range(3)]
    assert done.column("id") == [f"r{row}" for row in range(NUM_ROWS) for _ in range(3)]


@pytest.mark.parametrize(
    ("overlong", "status", "truncated"),
    [("error", "error", 0), ("skip", "skipped", 0), ({"truncate": {"field": "prompt"}}, "length", 44)],
)
def test_overlong_rows_by_policy(job, overlong, status, truncated):
    job.write("rows.jsonl", [{"id": "long", "prompt": "a" * 104}, {"id": "short", "prompt": "a"}])
    generate = {"ignore_eos": True, "max_tokens": 4}
    done = job.run(limits={"overlong": overlong}, engine={"max_length": 64}, generate=generate)
    long, short = done.rows
    assert (long["status"], long["truncated_tokens"]) == (status, truncated)
    assert (short["status"], short["truncated_tokens"]) == ("length", 0)
    assert done.exit_code == (10 if status == "error" else 0)
    assert long["prompt_tokens"] == (60 if truncated else 0)


def test_all_columns_are_carried(job):
    assert {"id", "prompt"} <= set(job.run(output={"columns": "all"}).rows[0])


def test_columns_that_are_nowhere_are_told(job, no_model):
    done = job.run(output={"columns": ["id", "idd"]})
    assert (done.exit_code, done.files) == (2, [])
    assert "output.columns.1" in done.log


def test_quiet_leaves_warnings_only(job):
    job.write("rows.jsonl", [{"id": 1, "prompt": "a"}, {"id": "x", "prompt": "b"}])
    done = job.run("--quiet")
    assert done.exit_code == 0
    assert done.log.splitlines() == [
        "warning: column 'id' holds values of several types (integer, text): carried as text"
    ]


def test_D12_a_closed_stderr_does_not_end_the_job(job):
    done = subprocess.run(["bash", "-c", 'exec "$@" 2>&-', "-", *command(job)], stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert len(job.rows()) == NUM_ROWS


def test_D12_a_warning_for_every_row_is_shown_once(job, monkeypatch):
    from batchgen.prompts.builder import PromptBuilder

    build = PromptBuilder.build

    def noisy(self, row):
        logging.getLogger("batchgen.prompts").warning("row %d is odd", row.index)
        return build(self, row)

    monkeypatch.setattr(PromptBuilder, "build", noisy)
    lines = job.run().log.splitlines()
    assert [line for line in lines if "is odd" in line] == [
        "warning: row 0 is odd",
        f"warning: row {NUM_ROWS - 1} is odd (and {NUM_ROWS - 1} like it before)",
    ]
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_preview_shows_prompts_answers_and_errors(job):
    job.write("rows.jsonl", [{"prompt": "first"}, {"prompt": None}, {"prompt": "last"}])
    job.job["output"]["columns"] = []
    shown = job.preview("--rows", "2").stdout
    assert shown.startswith("row 0 (rows.jsonl line 1), 5 tokens\nprompt:\nfirst\nanswer:\n")
    assert "row 1 (rows.jsonl line 2), 0 tokens\nnull_prompt: " in shown
    last = job.preview("--row", "2", "--no-generate")
    assert last.stdout == "row 2 (rows.jsonl line 3), 4 tokens\nprompt:\nlast\n\n"
    absent = job.preview("--row", "3", "--no-generate")
    assert (absent.exit_code, absent.stdout) == (3, "")
    assert "there is no row 3: the input has 3 rows, counted from 0" in absent.log
    assert absent.files == []


def test_preview_of_the_first_rows_reads_no_more(job, monkeypatch):
    from batchgen.data.text import TextReader

    monkeypatch.setattr(TextReader, "scan", lambda *_: pytest.fail("the whole input was read"))
    assert job.preview("--no-generate", "--rows", "2").stdout.count("prompt:") == 2


def test_preview_shows_probabilities_of_choices(job):
    shown = job.preview("--row", "0", generate={"choices": ["yes", "no"]}).stdout.splitlines()
    values = [float(line.partition(": ")[2]) for line in shown if line.startswith(("yes: ", "no: "))]
    assert math.fsum(values) == pytest.approx(1, abs=1e-3)


def test_a_finished_job_loads_no_torch(job):
    assert job.run().exit_code == 0
    code = f"""
import sys
from batchgen.cli import main
sys.argv = ["batchgen", "run", {str(job.folder / "job.yaml")!r}]
try:
    main()
except SystemExit as end:
    print(end.code, sorted({{"torch", "transformers", "triton", "datasets"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout == "0 []\n", done.stderr


@pytest.mark.parametrize(
    ("sections", "code", "words"),
    [
        ({"generate": {"max_tokns": 1}}, 2, "did you mean max_tokens?"),
        ({"model": "gone"}, 2, "model 'gone'"),
        ({"input": {"path": "gone.jsonl"}}, 3, "gone.jsonl: no such file"),
        ({"output": {"path": "rows.jsonl"}}, 4, "a part of this path is a file"),
        ({"output": {"path": "."}}, 4, "is no output of batchgen, and not empty"),
        ({"engine": {"kv_memory": "1KiB"}}, 5, "holds no page"),
        ({"model": "damaged"}, 5, "model.safetensors can't be read"),
    ],
)
def test_D11_exit_codes_tell_whose_fault_it_is(job, tiny_llama, sections, code, words):
    for file in tiny_llama.iterdir():
        job.write(f"damaged/{file.name}", file.read_bytes()[: 5000 if file.suffix == ".safetensors" else None])
    done = job.run(**sections)
    assert done.exit_code == code
    assert words in done.log
    assert len(done.log.splitlines()) <= 2
    assert "Traceback" not in done.log
    assert not [name for name in done.files if name.startswith(("part-", "."))]
