"""`output.format`: jobs whose parts are lines of JSON, through the command line."""

import gzip
import json
import signal

import pytest
from click.testing import CliRunner

from batchgen.cli import commands

OK, JOB_FILE, STORAGE, BAD_ROWS, STOPPED = 0, 2, 4, 10, 75
NUM_ROWS = 12


@pytest.fixture
def job(job_folder):
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(NUM_ROWS)])
    job_folder.save(output={"part_rows": 5, "columns": ["id"], "format": "jsonl"}, engine={"max_batch_rows": 4})
    return job_folder


def lines(job, pattern="part-*.jsonl"):
    return [json.loads(line) for part in sorted(job.out.glob(pattern)) for line in part.read_bytes().splitlines()]


def batchgen(command, job, *options):
    return CliRunner().invoke(commands, [command, str(job.out), *options])


def test_jsonl_holds_what_parquet_holds(job):
    done = job.run()
    assert done.exit_code == OK, done.log
    assert done.files == ["manifest.json", *(f"part-0000{i}-of-00003.jsonl" for i in range(3))]
    found = lines(job)
    job.run(output={"path": "parquet", "format": "parquet"})
    assert [row | {"cached_tokens": 0} for row in found] == [row | {"cached_tokens": 0} for row in job.rows()]
    job.run(output={"path": "zipped", "format": "jsonl", "compression": "gzip"})
    texts = [gzip.decompress(part.read_bytes()) for part in sorted(job.out.glob("part-*.jsonl.gz"))]
    assert [json.loads(line) for text in texts for line in text.splitlines()] == found


def test_format_is_part_of_what_a_job_is_and_compression_stays_as_it_was(job):
    assert job.run().exit_code == OK
    done = job.run(output={"format": "openai"})
    assert done.exit_code == JOB_FILE
    assert 'output.format: was "jsonl", now "openai"' in done.log
    done = job.run(output={"format": "jsonl", "compression": "zstd"})
    assert (done.exit_code, "nothing to do" in done.log) == (OK, True)
    done = job.run(output={"compression": "snappy"})
    assert done.exit_code == JOB_FILE
    assert "output.compression: snappy is for Parquet; write zstd, gzip or none" in done.log


def test_verify_status_and_errors(job):
    rows = [{"id": row, "prompt": None if row in (3, 7) else "x"} for row in range(NUM_ROWS)]
    job.write("rows.jsonl", rows)
    assert job.run(limits={"failed_rows": 2}).exit_code == OK
    assert batchgen("verify", job).output == f"{job.out}: whole, 12 rows in 3 parts\n"
    assert "rows    12 of 12 done (100.0%), 2 failed" in batchgen("status", job).output
    assert "  rows 3, 7" in batchgen("errors", job).output
    part = job.out / "part-00001-of-00003.jsonl"
    part.write_bytes(part.read_bytes().replace(b'"id": 6', b'"id": 8'))
    done = batchgen("verify", job)
    assert done.exit_code == STORAGE
    assert "part-00001-of-00003.jsonl: its bytes are not those that were written" in done.output


@pytest.mark.parametrize("format_", ["jsonl", "openai"])
def test_retry_failed_and_extend(job, monkeypatch, format_):
    from batchgen.answers import Answers
    from batchgen.errors import RowError

    ask = Answers.ask

    def failing(self, planned):
        prompt = planned.prompt
        if prompt.row.index == 6:
            return self._without_answer(prompt, RowError("out_of_memory", "no room"), "error")
        return ask(self, planned)

    job.write("in/1.jsonl", (job.folder / "rows.jsonl").read_text())
    monkeypatch.setattr(Answers, "ask", failing)
    assert job.run(output={"format": format_}, input={"path": "in"}).exit_code == BAD_ROWS
    before = {part.name: part.read_bytes() for part in job.out.glob("part-*")}
    first = lines(job)
    monkeypatch.undo()
    done = job.run("--retry-failed")
    assert done.exit_code == OK, done.log
    assert "1 rows in" in done.log
    after = {part.name: part.read_bytes() for part in job.out.glob("part-*")}
    assert [name for name in after if after[name] != before[name]] == ["part-00001-of-00003.jsonl"]
    assert [row for row in first if row not in lines(job)] == [first[6]]
    job.write("in/2.jsonl", [{"id": 12, "prompt": "row 12"}])
    done = job.run("--extend")
    assert done.exit_code == OK, done.log
    assert len(lines(job)) == NUM_ROWS + 1
    assert after.items() <= {part.name: part.read_bytes() for part in job.out.glob("part-*")}.items()
    assert [name for name in done.files if "journal" in name] == []
    assert batchgen("verify", job).exit_code == OK


@pytest.mark.parametrize("format_", ["jsonl", "openai"])
@pytest.mark.parametrize(
    "generate",
    [
        {"choices": [" a", " b"], "choice_logprobs": True},
        {"n": 3, "temperature": 1.0, "vote": "majority", "logprobs": 2},
        {"score": " {{ prompt }}", "logprobs": 0},
    ],
    ids=["choices", "samples", "score"],
)
def test_everything_that_a_job_can_ask_for(job, format_, generate):
    done = job.run(output={"format": format_, "columns": "all"}, generate=generate)
    assert done.exit_code == OK, done.log
    found = lines(job)
    job.run(output={"format": "parquet", "path": "parquet"})
    rows = job.rows()
    if format_ == "jsonl":
        assert [row["output"] for row in found] == [row["output"] for row in rows]
    else:
        choices = [choice for line in found for choice in line["response"]["body"]["choices"]]
        assert [choice["text"] for choice in choices] == [row["output"] for row in rows]
    job.save(output={"format": format_, "path": "out"})
    assert batchgen("verify", job).exit_code == OK


def test_a_batch_file_in_and_a_batch_file_out(job):
    def request(row):
        body = {"messages": [{"role": "user", "content": f"row {row}"}], "max_tokens": 1 + row % 3}
        url = "/v1/chat/completions"
        return {"custom_id": f"question-{row}", "method": "POST", "url": url, "body": body}

    requests = [request(row) for row in range(NUM_ROWS)]
    requests[4]["body"]["functions"] = [{"name": "f"}]
    text = "".join(json.dumps(one) + "\n" for one in requests) + "{broken\n"
    job.write("batch.jsonl", text)
    job.job["prompt"] = {}
    done = job.run(
        input={"path": "batch.jsonl", "format": "openai"}, output={"format": "openai", "columns": []}, prompt={}
    )
    assert done.exit_code == BAD_ROWS
    found = lines(job)
    assert [line["custom_id"] for line in found] == [*(f"question-{row}" for row in range(NUM_ROWS)), None]
    assert [line["batchgen"]["row"] for line in found] == list(range(NUM_ROWS + 1))
    codes = [line["response"]["status_code"] for line in found]
    assert codes == [400 if row in (4, NUM_ROWS) else 200 for row in range(NUM_ROWS + 1)]
    assert found[4]["error"]["code"] == "bad_request"
    body = found[5]["response"]["body"]
    assert body["object"] == "chat.completion"
    assert body["usage"]["completion_tokens"] <= 3
    assert len(body["choices"][0]["message"]["content"]) > 0


def test_D01_killed_at_every_step_of_a_part(job, forks, tmp_path):
    """Note, part, rename and manifest: whatever is there when the kill comes, the next runs end as one run does."""
    path = job.save()

    def go(name, **arrangement):
        return forks.run(
            "run", str(path), "--set", f"output.path={job.folder / name}", log=tmp_path / "log", **arrangement
        )

    def parts(name):
        return [part.read_bytes() for part in sorted((job.folder / name).glob("part-*"))]

    def without_cache(name):
        return [json.loads(line) | {"cached_tokens": 0} for part in parts(name) for line in part.splitlines()]

    assert go("whole")["ended"] == 0
    for count in range(1, 9):
        for event in ("replace", "fsync"):
            name = f"{event}-{count}"
            assert go(name, at=(event, count), signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL
            assert go(name)["ended"] == 0
            assert without_cache(name) == without_cache("whole")
            assert sorted(path.name for path in (job.folder / name).iterdir()) == sorted(
                path.name for path in (job.folder / "whole").iterdir()
            )
