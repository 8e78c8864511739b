"""Whole jobs on S3, through the command line."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.data import storage
from batchgen.data.output import OutputFolder
from batchgen.errors import Stopped

OK, JOB_FILE, STOPPED = 0, 2, 75
NUM_ROWS = 12


def test_a_whole_job_on_s3_leaks_no_credentials(s3, job_folder) -> None:
    fs, base = storage.filesystem(s3("in").removesuffix("/in"))
    for place, name in enumerate(["a b.jsonl", "50%.jsonl", "[c]+é.jsonl"]):
        rows = [json.dumps({"id": row, "prompt": f"row {row}"}) for row in range(4 * place, 4 * place + 4)]
        storage.write_bytes(fs, f"{base}/in/{name}", "\n".join(rows).encode())
    model = Path(job_folder.job["model"])
    for file in model.iterdir():
        storage.write_bytes(fs, f"{base}/model/{file.name}", file.read_bytes())
    job_folder.save(
        model=s3("model"), input={"path": s3("in")}, output={"path": s3("out"), "columns": ["id"], "part_rows": 5}
    )
    done = job_folder.run()
    assert done.exit_code == 0, done.log
    with fs.open(f"{base}/out/manifest.json") as file:
        manifest = json.load(file)
    assert (manifest["state"], manifest["num_rows"]) == ("finished", 12)
    parts = sorted(name for name in fs.find(f"{base}/out") if name.endswith(".parquet"))
    assert sorted(pq.read_table(parts, filesystem=fs)["id"].to_pylist()) == list(range(12))
    assert "nothing to do" in job_folder.run().log
    for name in fs.find(f"{base}/out"):
        assert b"testsecret" not in fs.cat_file(name)
    assert "testsecret" not in done.log + done.stdout


@pytest.fixture
def job(s3, job_folder):
    """A job with two input files on S3 that stopped after some rows."""
    write(s3("in/a.jsonl"), range(6))
    write(s3("in/b.jsonl"), range(6, 12))
    job_folder.save(input={"path": s3("in")}, output={"path": s3("out"), "columns": ["id"], "part_rows": 4})
    return job_folder


def write(url, numbers) -> None:
    fs, path = storage.filesystem(url)
    storage.write_bytes(fs, path, "".join(json.dumps({"id": n, "prompt": f"row {n}"}) + "\n" for n in numbers).encode())


def stop_after(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    add, left = OutputFolder.add, [rows]

    def counted(self, row) -> None:
        add(self, row)
        left[0] -= 1
        if left[0] == 0:
            raise Stopped("enough")

    monkeypatch.setattr(OutputFolder, "add", counted)


def edit_a_row(s3) -> str:
    write(s3("in/a.jsonl"), [0, 1, 2, 33, 4, 5])
    return "input file 1: was a.jsonl, 6 rows"


def swap_rows(s3) -> str:
    write(s3("in/a.jsonl"), [1, 0, 2, 3, 4, 5])
    return "input file 1: was a.jsonl, 6 rows"


def add_a_file(s3) -> str:
    write(s3("in/c.jsonl"), [12])
    return "input file 3: was (none), now c.jsonl, 1 rows"


def remove_a_file(s3) -> str:
    fs, path = storage.filesystem(s3("in/b.jsonl"))
    storage.remove(fs, path)
    return "input file 2: was b.jsonl, 6 rows"


@pytest.mark.parametrize("change", [edit_a_row, swap_rows, add_a_file, remove_a_file])
def test_D03_an_input_that_changed_in_the_middle_is_found(s3, job, change, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        assert job.run().exit_code == STOPPED
    fs, path = storage.filesystem(s3("out"))
    before = {file.path: storage.read_bytes(fs, file.path) for file in storage.list_files(fs, path)}
    message = change(s3)
    done = job.run()
    assert done.exit_code == JOB_FILE
    assert message in done.log
    assert {file.path: storage.read_bytes(fs, file.path) for file in storage.list_files(fs, path)} == before


@pytest.mark.parametrize("path", ["part-00000", "/journal/"])
def test_D11_a_signal_during_an_upload(faulty_s3, job_folder, path) -> None:
    job_folder.write("rows.jsonl", [{"id": row, "prompt": f"row {row}"} for row in range(NUM_ROWS)])
    job_folder.save(
        output={"path": faulty_s3("out"), "columns": ["id"], "part_rows": 4},
        checkpoint={"every": "0.2s"},
        engine={"max_batch_rows": 2},
        generate={"max_tokens": 40},
    )
    fault = faulty_s3.proxy.add("SIGTERM", method="PUT", path=path)
    done = job_folder.run()
    assert fault.times == 0
    assert done.exit_code == STOPPED, done.log
    assert "Traceback" not in done.log
    done = job_folder.run()
    assert done.exit_code == OK, done.log
    fs, folder = storage.filesystem(faulty_s3("out"))
    parts = [file.path for file in storage.list_files(fs, folder) if file.path.endswith(".parquet")]
    assert sorted(row for part in parts for row in pq.read_table(part, filesystem=fs)["id"].to_pylist()) == list(
        range(NUM_ROWS)
    )
    assert len(storage.list_files(fs, folder)) == 4


@pytest.mark.parametrize("format_", ["jsonl", "openai"])
def test_lines_of_json_on_s3(s3, job, monkeypatch, format_) -> None:
    with monkeypatch.context() as patch:
        stop_after(7, patch)
        assert job.run(output={"format": format_, "compression": "gzip"}).exit_code == STOPPED
    done = job.run()
    assert done.exit_code == OK, done.log
    fs, path = storage.filesystem(s3("out"))
    names = [Path(file.path).name for file in storage.list_files(fs, path)]
    assert names == ["manifest.json", *(f"part-0000{i}-of-00003.jsonl.gz" for i in range(3))]
    assert "nothing to do" in job.run().log
