"""The command line: what each command calls and prints, and how each end of it becomes an exit code."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from batchgen.cli import commands
from batchgen.errors import (
    BatchgenError,
    EngineError,
    InputError,
    InternalError,
    JobFileError,
    LockedError,
    RowError,
    Stopped,
    StorageError,
    TooManyBadRows,
)

ROOT = Path(__file__).resolve().parent.parent
JOB = """\
version: 1
model: owner/model
input: {path: rows.jsonl}
prompt: {text: "{{ text }}"}
output: {path: out}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A right job file in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    return "job.yaml"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for batchgen.runner, which the commands import when they are called."""
    stand_in = SimpleNamespace(
        run_job=lambda job, quiet, log_json, resume, grace: None,
        preview_job=lambda job, rows, first, generate: iter(()),
    )
    monkeypatch.setitem(sys.modules, "batchgen.runner", stand_in)  # type: ignore[arg-type]
    return stand_in


def batchgen(*arguments: str) -> Result:
    return CliRunner().invoke(commands, arguments, prog_name="batchgen")


def raising(error: BaseException) -> Callable[..., None]:
    def run_job(job: Any, quiet: bool, log_json: bool, resume: Any, grace: float) -> None:
        raise error

    return run_job


def test_run_hands_the_job_with_its_overrides_to_the_runner(job: str, runner: SimpleNamespace) -> None:
    calls: list[tuple[Any, ...]] = []
    runner.run_job = lambda job, quiet, log_json, resume, grace: calls.append((job, quiet, resume, grace))
    done = batchgen(
        "run", job, "--set", "generate.top_k=2", "--set", "generate.seed=3", "--quiet", "--extend", "--grace", "9"
    )
    assert (done.exit_code, done.output) == (0, "")
    ((loaded, quiet, resume, grace),) = calls
    assert (loaded.generate.top_k, loaded.generate.seed, quiet) == (2, 3, True)
    assert (resume.fresh, resume.extend, resume.retry_failed) == (False, True, False)
    assert grace == 9.0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (JobFileError("job.yaml:1: wrong"), 2),
        (InputError("no such file"), 3),
        (StorageError("disk full"), 4),
        (LockedError("held by another"), 4),
        (EngineError("no model"), 5),
        (TooManyBadRows("7 of 10 rows"), 10),
    ],
)
def test_an_error_is_one_block_and_its_exit_code(
    job: str, runner: SimpleNamespace, error: BatchgenError, code: int
) -> None:
    runner.run_job = raising(error)
    done = batchgen("run", job)
    assert (done.exit_code, done.stdout, done.stderr) == (code, "", f"batchgen: error: {error}\n")


def test_an_error_is_a_json_object_when_asked_for(job: str, runner: SimpleNamespace) -> None:
    runner.run_job = raising(StorageError("out: the disk is full"))
    done = batchgen("run", job, "--log-json")
    assert done.exit_code == 4
    line = json.loads(done.stderr)
    assert (line["event"], line["exit_code"]) == ("error", 4)
    assert line["text"] == "batchgen: error: out: the disk is full"
    assert batchgen("run", job).stderr == "batchgen: error: out: the disk is full\n"


def test_a_broken_promise_asks_for_a_report(job: str, runner: SimpleNamespace) -> None:
    runner.run_job = raising(InternalError("row 3 twice"))
    done = batchgen("run", job)
    assert done.exit_code == 70
    assert done.stderr.startswith("batchgen: error: row 3 twice\n")
    assert "Please report it" in done.stderr


def test_an_unexpected_error_shows_its_traceback_and_asks_for_a_report(job: str, runner: SimpleNamespace) -> None:
    runner.run_job = raising(ZeroDivisionError("by nought"))
    done = batchgen("run", job)
    assert (done.exit_code, done.stdout) == (70, "")
    assert "Traceback (most recent call last)" in done.stderr
    assert "ZeroDivisionError: by nought" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("Please report it, with everything above and the job file.")


@pytest.mark.parametrize("error", [Stopped("stopped by SIGTERM; run it again"), KeyboardInterrupt()])
def test_stopping_on_purpose_is_no_error(job: str, runner: SimpleNamespace, error: BaseException) -> None:
    runner.run_job = raising(error)
    done = batchgen("run", job)
    assert done.exit_code == 75
    assert done.stderr.startswith("batchgen: stopped")
    assert "again" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["run"],
        ["run", "job.yaml", "--nope"],
        ["rum", "job.yaml"],
        ["validate"],
        ["preview", "job.yaml", "--row", "-1"],
        ["preview", "job.yaml", "--rows", "0"],
    ],
)
def test_wrong_usage_exits_with_2(job: str, runner: SimpleNamespace, arguments: list[str]) -> None:
    done = batchgen(*arguments)
    assert done.exit_code == 2
    assert "Usage: batchgen" in done.stderr


@pytest.mark.parametrize("command", ["run", "validate", "preview"])
def test_every_command_tells_the_mistakes_of_the_job_file(job: str, runner: SimpleNamespace, command: str) -> None:
    done = batchgen(command, job, "--set", "generate.n=0", "--set", "nmae=a")
    assert (done.exit_code, done.stdout) == (2, "")
    first, *rest = done.stderr.splitlines()
    assert first == "batchgen: error: 2 mistakes in job.yaml"
    assert rest[0] == "--set: generate.n: the number 0; write a whole number of 1 or more"
    assert rest[1].startswith("--set: nmae: unknown field; did you mean name? ")


def test_a_job_file_that_is_not_there(job: str, runner: SimpleNamespace) -> None:
    done = batchgen("run", "no.yaml")
    assert done.exit_code == 2
    assert done.stderr == "batchgen: error: no.yaml: there is no such file; check the path of the job file\n"


def test_preview_shows_prompt_answer_and_error(job: str, runner: SimpleNamespace) -> None:
    def preview_job(job: Any, rows: list[int] | None, first: int, generate: bool) -> Iterator[SimpleNamespace]:
        assert (rows, first, generate) == (None, 3, True)
        good = {
            "row": 0,
            "place": "rows.jsonl line 1",
            "text": "Say a",
            "token_ids": [1, 2],
            "error": None,
            "output": "a",
            "choices": (),
        }
        yield SimpleNamespace(**good)
        error = RowError("null_prompt", "'text' is null")
        yield SimpleNamespace(**good | {"row": 1, "text": "", "token_ids": None, "error": error, "output": None})

    runner.preview_job = preview_job
    done = batchgen("preview", job)
    assert done.exit_code == 0
    assert done.stdout == (
        "row 0 (rows.jsonl line 1), 2 tokens\nprompt:\nSay a\nanswer:\na\n\n"
        "row 1 (rows.jsonl line 1), 0 tokens\nnull_prompt: 'text' is null\n\n"
    )


def test_preview_of_chosen_rows_without_answers(job: str, runner: SimpleNamespace) -> None:
    calls: list[tuple[Any, ...]] = []
    runner.preview_job = lambda job, rows, first, generate: calls.append((rows, first, generate)) or ()
    assert batchgen("preview", job, "--row", "17", "--row", "4", "--no-generate").exit_code == 0
    assert batchgen("preview", job, "--rows", "5").exit_code == 0
    assert calls == [([17, 4], 3, False), (None, 5, True)]


def test_validate_names_each_file_and_what_is_not_there(job: str, tmp_path: Path) -> None:
    Path("other.yaml").write_text(JOB.replace("owner/model", "./model.gguf"))
    done = batchgen("validate", job, "other.yaml", "--input")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == f"job.yaml: ok\nother.yaml: ok\n  not on this machine: {tmp_path}/model.gguf\n"


def test_schema_prints_a_schema(job: str) -> None:
    assert batchgen("schema").stdout == (ROOT / "schemas" / "job.schema.json").read_text()
    assert batchgen("schema", "job").stdout == batchgen("schema").stdout
    wrong = batchgen("schema", "nope")
    assert (wrong.exit_code, wrong.stdout) == (2, "")


def test_version_and_help() -> None:
    from importlib.metadata import version

    assert batchgen("--version").stdout == f"batchgen {version('batchgen')}\n"
    assert batchgen("-h").stdout == batchgen("--help").stdout
    assert batchgen().exit_code == 2


@pytest.mark.parametrize("arguments", [["job.yaml", "--nope"], [], ["job.yaml", "--grace", "-1"], ["no.yaml"]])
def test_with_log_json_a_refused_command_is_told_in_json(arguments: list[str]) -> None:
    done = CliRunner().invoke(commands, ["run", "--log-json", *arguments])
    assert done.exit_code == 2
    [line] = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["exit_code"]) == ("error", 2)
    assert line["text"].startswith("batchgen: error: ")


def test_the_pages_made_from_the_code_are_up_to_date() -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "reference.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def program(job: str, body: str) -> list[str]:
    """A command that runs `batchgen run` with this as the body of run_job."""
    code = f"""
import sys, time, types
stand_in = types.ModuleType("batchgen.runner")
def run_job(job, quiet, log_json, resume, grace):
    {body}
stand_in.run_job = run_job
sys.modules["batchgen.runner"] = stand_in
sys.argv = ["batchgen", "run", {job!r}]
from batchgen.cli import main
main()
"""
    return [sys.executable, "-P", "-c", code]


@pytest.mark.parametrize(
    ("body", "code"),
    [("pass", 0), ("raise __import__('batchgen.errors').errors.EngineError('x')", 5), ("1 / 0", 70)],
)
def test_the_program_ends_with_the_exit_code(job: str, body: str, code: int) -> None:
    done = subprocess.run(program(job, body), capture_output=True, text=True)
    assert done.returncode == code
    assert ("Traceback" in done.stderr) == (code == 70)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_program_resumably(job: str, number: signal.Signals) -> None:
    command = program(job, "print('ready', flush=True); time.sleep(60)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert errors == "batchgen: stopped; run the same command again to go on\n"


def test_a_reader_that_goes_away_is_no_fault() -> None:
    command = f"{sys.executable} -P -m batchgen schema | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("{\n", "")
