"""What can be said about an output from outside: how far it is, whether it is whole, which rows failed."""

import json
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from batchgen.cli import commands
from batchgen.data.files import OutputFiles
from batchgen.data.output import OutputFolder
from batchgen.data.status import STATUS_NAME, Notes, job_status
from batchgen.errors import Stopped

NUM_ROWS = 12


@pytest.fixture
def done(job_folder):
    """A finished job of which two rows failed."""
    rows = [{"id": row, "prompt": f"row {row}"} for row in range(NUM_ROWS)]
    rows[3]["prompt"] = rows[9]["prompt"] = None
    job_folder.write("rows.jsonl", rows)
    job_folder.save(output={"part_rows": 5, "columns": ["id"]}, limits={"failed_rows": 2})
    assert job_folder.run().exit_code == 0
    return job_folder


def batchgen(command: str, folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(commands, [command, str(folder), *options])
    return result.exit_code, result.output


def test_status_of_a_finished_job(done) -> None:
    code, text = batchgen("status", done.out)
    assert code == 0
    assert text.splitlines()[:2] == ["state   finished", "rows    12 of 12 done (100.0%), 2 failed"]


def test_status_while_it_runs_and_after_it_stopped(job_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    job_folder.write("rows.jsonl", [{"prompt": f"row {row}" if row % 4 else None} for row in range(NUM_ROWS)])
    add, seen = OutputFolder.add, []

    def watched(self: OutputFolder, row) -> None:
        add(self, row)
        if self._num_added == 7:
            deadline = time.monotonic() + 20
            note = job_folder.out / STATUS_NAME  # the first one may be of a time before the first row
            while not (note.exists() and json.loads(note.read_text())["rows_per_second"]):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            self._open.checkpoints.flush()
            seen.append(job_status(str(job_folder.out)))
            raise Stopped("enough")

    monkeypatch.setattr(OutputFolder, "add", watched)
    assert job_folder.run(output={"part_rows": 5}, checkpoint={"every": "0.05s"}).exit_code == 75
    [running] = seen
    assert (running.state, running.total, running.done) == ("running", NUM_ROWS, 7)
    assert running.failed > 0
    assert running.holder.startswith("process ")
    assert running.rows_per_second > 0
    assert running.last_activity is not None
    code, text = batchgen("status", job_folder.out)
    assert code == 0
    assert text.splitlines()[0] == "state   stopped"
    assert "rows    7 of 12 done (58.3%)" in text
    assert "speed" not in text
    monkeypatch.undo()
    job_folder.run()
    assert not (job_folder.out / STATUS_NAME).exists()


def test_no_note_is_written_once_the_job_is_done(job_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the end takes: the note would stay for ever."""
    job_folder.write("rows.jsonl", [{"prompt": "x"}])
    remove = OutputFiles.remove
    monkeypatch.setattr(OutputFiles, "remove", lambda self, name: (remove(self, name), time.sleep(0.1)))
    done = job_folder.run(checkpoint={"every": "0.01s"})
    assert (done.exit_code, done.files) == (0, ["manifest.json", "part-00000-of-00001.parquet"])


def test_a_rate_is_that_of_the_last_minute() -> None:
    now = [0.0]
    notes = Notes(lambda: now[0])
    rates = []
    for seconds, rows in [(10, 1000), (70, 1600), (130, 1600)]:
        now[0] = seconds
        rates.append(json.loads(notes.note(rows))["rows_per_second"])
    assert rates == [100.0, 10.0, 0.0]


def test_verify_proves_a_whole_output(done) -> None:
    assert batchgen("verify", done.out) == (0, f"{done.out}: whole, 12 rows in 3 parts\n")


def lose_part(job) -> str:
    (job.out / "part-00001-of-00003.parquet").unlink()
    return "part-00001-of-00003.parquet is missing: input rows 5 to 9"


def change_byte(job) -> str:
    path = job.out / "part-00001-of-00003.parquet"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    return "part-00001-of-00003.parquet: its bytes are not those that were written"


def rewrite_part(job) -> str:
    path = job.out / "part-00001-of-00003.parquet"
    pq.write_table(pq.read_table(path), path)
    return "part-00001-of-00003.parquet: "


def add_part(job) -> str:
    (job.out / "part-00009-of-00010.parquet").write_bytes(b"x")
    return "part-00009-of-00010.parquet is no part of this job"


def change_manifest(job) -> str:
    path = job.out / "manifest.json"
    fields = json.loads(path.read_text())
    fields["parts"][1]["xxhash"] = "0" * 16
    path.write_text(json.dumps(fields))
    return "part-00001-of-00003.parquet is another one than the manifest names"


def unfinish(job) -> str:
    path = job.out / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"state": "running", "parts": []}))
    return "the job is not finished"


def edit_input(job) -> str:
    path = job.folder / "rows.jsonl"
    path.write_text(path.read_text().replace("row 7", "row 8"))
    return "rows.jsonl has changed since it was read"


def lose_input(job) -> str:
    (job.folder / "rows.jsonl").unlink()
    return "the input can't be read"


@pytest.mark.parametrize(
    "damage",
    [lose_part, change_byte, rewrite_part, add_part, change_manifest, unfinish, edit_input, lose_input],
)
def test_verify_finds_every_damage(done, damage) -> None:
    message = damage(done)
    code, text = batchgen("verify", done.out)
    assert code == 4
    assert message in text
    assert "is not whole" in text
    code, _ = batchgen("verify", done.out, "--no-input")
    assert code == (0 if damage in (edit_input, lose_input) else 4)


def test_what_verify_advises_mends_it(done) -> None:
    change_byte(done)
    assert "Remove the parts that are damaged, and run the job again" in batchgen("verify", done.out)[1]
    (done.out / "part-00001-of-00003.parquet").unlink()
    assert done.run().exit_code == 0
    assert batchgen("verify", done.out)[0] == 0


def test_errors_by_kind_with_row_numbers(done) -> None:
    code, text = batchgen("errors", done.out)
    assert code == 0
    first, _, numbers = text.splitlines()
    assert (first, numbers) == ("null_prompt: 2", "  rows 3, 9")
    assert batchgen("errors", done.out, "--rows", "1")[1].splitlines()[-1] == "  rows 3, ..."


def test_errors_of_an_output_without_any(job_folder) -> None:
    job_folder.write("rows.jsonl", [{"prompt": "x"}])
    assert job_folder.run().exit_code == 0
    assert batchgen("errors", job_folder.out) == (0, "no row failed\n")


@pytest.mark.parametrize("command", ["status", "verify", "errors"])
def test_a_folder_without_a_job_is_named(tmp_path: Path, command: str) -> None:
    code, text = batchgen(command, tmp_path / "nothing")
    assert code == 4
    assert "nothing has no output of batchgen" in text
