"""Rows in any order become whole parts, and a folder knows what it still lacks."""

import json
import logging
import random
import re
import resource
import time
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.manifest import InputRecord, Manifest, SourceRecord, TemplateRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow
from batchgen.errors import InternalError, JobFileError, LockedError, RowError, StorageError

CARRIED = pa.schema([("review_id", pa.string())])


def make_manifest(num_rows: int = 10, *, n: int = 1, part_rows: int = 4, **fingerprint: str) -> Manifest:
    model = SourceRecord(name="model", fingerprint="f0")
    return Manifest(
        batchgen_version="0.1.0",
        spec={"version": 1},
        fingerprint={"generate.temperature": "0.0", **fingerprint},
        inputs=(),
        model=model,
        tokenizer=model,
        num_rows=num_rows,
        n=n,
        part_rows=part_rows,
    )


def make_row(row: int, sample: int = 0) -> OutputRow:
    if row % 5 == 3:
        return OutputRow(row, sample, "error", error=RowError("bad_json", "line 3: no JSON"))
    return OutputRow(
        row,
        sample,
        "ok",
        output=f"answer {row}.{sample} é",
        finish_reason="eos",
        prompt_tokens=7,
        cached_tokens=2,
        output_tokens=3,
        carried={"review_id": f"r{row}"},
    )


def open_folder(path: Path | str, manifest: Manifest, **options: object) -> OutputFolder:
    return OutputFolder.open(str(path), manifest=manifest, carried=CARRIED, **options)


def fill(folder: OutputFolder, seed: int = 0) -> Manifest:
    """Add every pending row in random order and finish."""
    manifest = folder.manifest
    todo = [(row, sample) for rows in folder.pending() for row in rows for sample in range(manifest.n)]
    random.Random(seed).shuffle(todo)
    for row, sample in todo:
        folder.add(make_row(row, sample))
    return folder.finish({"rows_per_second": 1.5})


def read_rows(path: Path) -> list[dict[str, object]]:
    return [row for part in sorted(path.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]


def wait_for(path: Path) -> None:
    """Parts are written in a thread."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def names(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_rows_in_any_order_make_parts_in_input_order(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(10)) as folder:
        assert folder.pending() == [range(10)]
        assert not folder.finished
        manifest = fill(folder)
    assert names(tmp_path) == [
        "manifest.json",
        *(f"part-0000{i}-of-00003.parquet" for i in range(3)),
    ]
    rows = read_rows(tmp_path)
    assert [row["row"] for row in rows] == list(range(10))
    assert rows[4]["output"] == "answer 4.0 é"
    assert rows[4]["review_id"] == "r4"
    assert rows[3]["error"] == {"kind": "bad_json", "message": "line 3: no JSON"}
    assert manifest.rows_by_status == {"ok": 8, "error": 2}
    assert (manifest.prompt_tokens, manifest.cached_tokens, manifest.output_tokens) == (56, 16, 24)
    stored = json.loads((tmp_path / "manifest.json").read_text())
    assert stored["state"] == "finished"
    assert stored["report"] == {"rows_per_second": 1.5}
    assert [part["name"] for part in stored["parts"]] == names(tmp_path)[1:]


def test_samples_of_a_row_lie_together_and_its_prompt_counts_once(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(3, n=2, part_rows=2)) as folder:
        manifest = fill(folder)
    rows = read_rows(tmp_path)
    assert [(row["row"], row["sample"]) for row in rows] == [(row, sample) for row in range(3) for sample in range(2)]
    assert (manifest.prompt_tokens, manifest.output_tokens) == (21, 18)


def test_a_rerun_does_only_what_is_missing(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(10)) as folder:
        for row in [5, 4, 7, 6, 0, 9]:
            folder.add(make_row(row))
    before = (tmp_path / "part-00001-of-00003.parquet").stat().st_mtime_ns
    with open_folder(tmp_path, make_manifest(10, part_rows=3)) as folder:  # the first run's part size stays
        assert folder.pending() == [range(1, 4), range(8, 9)]  # rows 0 and 9 lie in the journal
        assert folder.num_finished_rows == 6
        manifest = fill(folder)
    assert (tmp_path / "part-00001-of-00003.parquet").stat().st_mtime_ns == before
    assert [row["row"] for row in read_rows(tmp_path)] == list(range(10))
    assert sum(manifest.rows_by_status.values()) == 10


def test_a_finished_job_is_known_at_once_and_takes_no_lock(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        first = fill(folder)
    with open_folder(tmp_path, make_manifest()) as folder, open_folder(tmp_path, make_manifest()) as again:
        assert folder.finished
        assert folder.pending() == []
        assert again.finish() == first


def test_a_part_lost_after_the_end_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        first = fill(folder)
    (tmp_path / "part-00001-of-00003.parquet").unlink()
    with open_folder(tmp_path, make_manifest()) as folder:
        assert "was finished, but parts are missing" in caplog.text
        assert folder.pending() == [range(4, 8)]
        assert not folder.finished
        assert fill(folder).rows_by_status == first.rows_by_status


@pytest.mark.parametrize("num_rows", [0, 1, 4])
def test_row_counts_at_the_edges(tmp_path: Path, num_rows: int) -> None:
    with open_folder(tmp_path, make_manifest(num_rows)) as folder:
        fill(folder)
    assert len(read_rows(tmp_path)) == num_rows
    [part] = tmp_path.glob("*.parquet")
    assert pq.read_schema(part).names[:3] == ["row", "sample", "review_id"]
    with open_folder(tmp_path, make_manifest(num_rows)) as folder:
        assert folder.finished


def damage_cut_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def damage_cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_last_byte_gone(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def damage_middle_gone(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + content[150:])


def damage_other_file(path: Path) -> None:
    pq.write_table(pa.table({"row": [1]}), path)


def damage_other_part(path: Path) -> None:
    path.write_bytes(path.with_name("part-00000-of-00003.parquet").read_bytes())


def damage_footer(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-40:-20] = b"\xff" * 20
    path.write_bytes(content)


DAMAGES = [
    damage_cut_to_nothing,
    damage_cut_in_half,
    damage_last_byte_gone,
    damage_middle_gone,
    damage_other_file,
    damage_other_part,
    damage_footer,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_D01_a_damaged_part_is_made_again_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage
) -> None:
    with open_folder(tmp_path, make_manifest(10)) as folder:
        for row in range(8):
            folder.add(make_row(row))
    damage(tmp_path / "part-00001-of-00003.parquet")
    with caplog.at_level(logging.WARNING), open_folder(tmp_path, make_manifest(10)) as folder:
        assert folder.pending() == [range(4, 10)]
        fill(folder)
    [record] = caplog.records
    assert "part-00001-of-00003.parquet is computed again" in record.getMessage()
    assert [row["row"] for row in read_rows(tmp_path)] == list(range(10))


@pytest.mark.parametrize("damage", DAMAGES)
def test_D01_a_damaged_part_of_a_finished_job_is_found_by_the_same_command(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage
) -> None:
    with open_folder(tmp_path, make_manifest(10)) as folder:
        fill(folder)
    before = read_rows(tmp_path)
    damage(tmp_path / "part-00001-of-00003.parquet")
    with caplog.at_level(logging.WARNING), open_folder(tmp_path, make_manifest(10)) as folder:
        assert folder.pending() == [range(4, 8)]
        fill(folder)
    assert "part-00001-of-00003.parquet is computed again" in caplog.text
    assert read_rows(tmp_path) == before


def test_D01_temporary_files_of_a_killed_run_are_removed_and_others_stay(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.0123456789ab.tmp").write_bytes(b"{")  # killed before the first manifest was there
    with open_folder(tmp_path, make_manifest()) as folder:
        folder.add(make_row(0))
    (tmp_path / ".part-00000-of-00003.parquet.0123456789ab.tmp").write_bytes(b"PAR1")
    (tmp_path / "notes.txt").write_text("mine")
    with open_folder(tmp_path, make_manifest()) as folder:
        fill(folder)
    assert names(tmp_path) == ["manifest.json", "notes.txt", *(f"part-0000{i}-of-00003.parquet" for i in range(3))]


def test_D07_a_folder_with_foreign_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    for name in ("a.csv", "sub/b.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    with pytest.raises(StorageError, match=r"not empty: it has a\.csv, sub/b\.csv\. Give the job an output\.path"):
        open_folder(tmp_path, make_manifest())
    assert names(tmp_path) == ["a.csv", "sub"]


def test_D07_a_run_that_lost_the_folder_writes_nothing_more(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(8)) as folder:
        for row in range(4):
            folder.add(make_row(row))
        wait_for(tmp_path / "part-00000-of-00002.parquet")
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        lock = tmp_path / ".batchgen.lock"
        other = json.dumps({**json.loads(lock.read_text()), "token": "other", "pid": 1, "host": "elsewhere"})
        lock.write_text(other)  # as a run does that takes over from one that was paused
        with pytest.raises(LockedError, match="was taken over by process 1 on elsewhere"):
            fill(folder)
    assert lock.read_text() == other
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == {**before, lock: other.encode()}


def test_D01_the_lock_of_a_run_killed_after_its_end_is_removed(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        lock = json.loads((tmp_path / ".batchgen.lock").read_text())
        fill(folder)
    (tmp_path / ".batchgen.lock").write_text(json.dumps(lock))
    open_folder(tmp_path, make_manifest()).close()
    assert ".batchgen.lock" in names(tmp_path)  # this process is alive, and could be at it
    (tmp_path / ".batchgen.lock").write_text(json.dumps({**lock, "process_start": 1}))
    open_folder(tmp_path, make_manifest()).close()
    assert ".batchgen.lock" not in names(tmp_path)


def test_D07_a_second_run_waits_for_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(8)) as folder:
        with pytest.raises(LockedError, match="is in use: process"):
            open_folder(tmp_path, make_manifest(8))
        fill(folder)
    assert len(read_rows(tmp_path)) == 8


@settings(max_examples=25, deadline=None)
@given(
    num_rows=st.integers(0, 30),
    n=st.integers(1, 3),
    part_rows=st.integers(1, 12),
    stops=st.lists(st.integers(0, 90), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_D08_whatever_the_order_and_wherever_it_stops_each_row_has_its_answer(
    tmp_path_factory: pytest.TempPathFactory, num_rows: int, n: int, part_rows: int, stops: list[int], seed: int
) -> None:
    path = tmp_path_factory.mktemp("out")
    rng = random.Random(seed)
    for stop in [*stops, None]:
        with open_folder(path, make_manifest(num_rows, n=n, part_rows=part_rows)) as folder:
            todo = [(row, sample) for rows in folder.pending() for row in rows for sample in range(n)]
            rng.shuffle(todo)
            for row, sample in todo[:stop]:
                folder.add(make_row(row, sample))
            if stop is None:
                manifest = folder.finish()
    rows = read_rows(path)
    assert [(row["row"], row["sample"]) for row in rows] == [(row, s) for row in range(num_rows) for s in range(n)]
    assert [row["output"] for row in rows] == [make_row(row["row"], row["sample"]).output for row in rows]
    assert sum(manifest.rows_by_status.values()) == len(rows) == num_rows * n


def test_urls_are_shown_without_secrets(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file(f"/user:secret@{tmp_path.name}/other.txt", b"x")
    with pytest.raises(StorageError) as caught:
        open_folder(f"memory://user:secret@{tmp_path.name}", make_manifest())
    assert "secret" not in str(caught.value)


def test_D03_a_changed_job_is_refused_with_every_field_old_and_new(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(10, **{"generate.seed": "1", "prompt.user": '"old"'})) as folder:
        folder.add(make_row(0))
    changed = make_manifest(11, **{"generate.temperature": "0.5", "prompt.user": "x" * 1000, "generate.seed": "1"})
    with pytest.raises(JobFileError) as caught:
        open_folder(tmp_path, changed)
    message = str(caught.value)
    assert "generate.temperature: was 0.0, now 0.5" in message
    assert "input rows: was 10, now 11" in message
    assert 'prompt.user: was "old", now xxx' in message
    assert "generate.seed" not in message
    assert len(message) < 1000


MODEL = SourceRecord(name="other path, same content", fingerprint="f0")
OTHER = SourceRecord(name="model", fingerprint="f1")
FILE = InputRecord(path="data/a.jsonl", num_rows=10, bytes=100, fingerprint="a0")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": OTHER}, "model (content): was f0, now f1"),
        ({"tokenizer": OTHER}, "tokenizer (content): was f0, now f1"),
        (
            {"chat_template": TemplateRecord(text="{{ x }}", fingerprint="t")},
            "chat template (content): was (none), now t",
        ),
        ({"n": 3}, "output rows per input row: was 1, now 3"),
        (
            {"inputs": (FILE.model_copy(update={"fingerprint": "a1"}),)},
            "input file 1: was a.jsonl, 10 rows, a0, now a.jsonl, 10 rows, a1",
        ),
        ({"inputs": (FILE, FILE)}, "input file 2: was (none), now a.jsonl, 10 rows, a0"),
        ({"inputs": (FILE,) * 100}, "and 79 more"),
    ],
)
def test_D03_content_is_compared_too(tmp_path: Path, change: dict[str, object], message: str) -> None:
    first = make_manifest(10).model_copy(update={"inputs": (FILE,)})
    with open_folder(tmp_path, first) as folder:
        folder.add(make_row(0))
    with pytest.raises(JobFileError, match=re.escape(message)):
        open_folder(tmp_path, first.model_copy(update=change))


def test_D03_what_cannot_change_the_output_may_differ(tmp_path: Path) -> None:
    first = make_manifest(10).model_copy(update={"inputs": (FILE,)})
    with open_folder(tmp_path, first) as folder:
        fill(folder)
    moved = FILE.model_copy(update={"path": "elsewhere/a.jsonl"})
    harmless = {"model": MODEL, "inputs": (moved,), "spec": {}, "batchgen_version": "0.2.0", "part_rows": 9}
    with open_folder(tmp_path, first.model_copy(update=harmless), compression="snappy") as folder:
        assert folder.finished
        assert folder.manifest.part_rows == 4


def test_D03_each_part_names_the_version_that_wrote_it(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(8)) as folder:
        for row in range(4, 8):
            folder.add(make_row(row))
    with open_folder(tmp_path, make_manifest(8).model_copy(update={"batchgen_version": "0.2.0"})) as folder:
        manifest = fill(folder)
    assert manifest.batchgen_version == "0.1.0"
    assert [part.batchgen_version for part in manifest.parts] == ["0.2.0", "0.1.0"]


def test_D03_other_carried_columns_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(10)) as folder:
        folder.add(make_row(0))
    with pytest.raises(JobFileError, match=r"output column review_id: was string, now \(none\)"):
        OutputFolder.open(str(tmp_path), manifest=make_manifest(10), carried=pa.schema([]))


def test_a_newer_format_and_a_broken_manifest_are_refused(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        fill(folder)
    path = tmp_path / "manifest.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps({**fields, "format": 2, "new field": 1}))
    with pytest.raises(StorageError, match=r"format 2; this batchgen knows formats up to 1\. Upgrade batchgen"):
        open_folder(tmp_path, make_manifest())
    for content in ("", "{", "[]", "{}", '{"format": "1"}'):
        path.write_text(content)
        with pytest.raises(StorageError, match="no manifest of batchgen"):
            open_folder(tmp_path, make_manifest())


def test_D08_a_row_twice_unknown_or_missing_is_an_internal_error(tmp_path: Path) -> None:
    with open_folder(tmp_path, make_manifest(10, n=2)) as folder:
        folder.add(make_row(1, 1))
        with pytest.raises(InternalError, match="row 1 sample 1 came back twice"):
            folder.add(make_row(1, 1))
        for row, sample in [(10, 0), (-1, 0), (0, 2), (0, -1)]:
            with pytest.raises(
                InternalError, match=f"row {row} sample {sample} came back, but the job has no such row"
            ):
                folder.add(make_row(row, sample))
        for row in range(4, 10):
            folder.add(make_row(row, 0))
            folder.add(make_row(row, 1))
        with pytest.raises(InternalError, match="row 5 sample 1 came back, but its part is finished"):
            folder.add(make_row(5, 1))
        with pytest.raises(
            InternalError, match="never came back, the first of them row 0 sample 0, row 0 sample 1, row 1 s"
        ):
            folder.finish()
    assert json.loads((tmp_path / "manifest.json").read_text())["state"] == "running"


def test_D05_a_full_disk_leaves_no_partial_file_and_a_rerun_goes_on(tmp_path: Path) -> None:
    texts = {row: random.Random(row).randbytes(3000).hex() for row in range(8)}
    with open_folder(tmp_path, make_manifest(8)) as folder:
        for row in range(4):
            folder.add(OutputRow(row, 0, "ok", output="short"))
        wait_for(tmp_path / "part-00000-of-00002.parquet")
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ: writes fail with EFBIG
        try:
            for row in range(4, 8):
                folder.add(OutputRow(row, 0, "ok", output=texts[row]))
            with pytest.raises(StorageError, match=r"part-00001-of-00002\.parquet"):
                folder.finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["manifest.json", "part-00000-of-00002.parquet"]
    with open_folder(tmp_path, make_manifest(8)) as folder:
        assert folder.pending() == [range(4, 8)]
        for row in range(4, 8):
            folder.add(OutputRow(row, 0, "ok", output=texts[row]))
        folder.finish()
    assert [row["output"] for row in read_rows(tmp_path)] == ["short"] * 4 + list(texts.values())[4:]


def test_D05_no_space_says_how_much_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    with open_folder(tmp_path, make_manifest(4)) as folder:
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(StorageError, match=r"part-00000-of-00001\.parquet: the disk is full.*bytes free"):
            fill(folder)
        monkeypatch.undo()
    assert names(tmp_path) == ["manifest.json"]


def test_D05_a_folder_removed_during_the_run_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with open_folder(path, make_manifest(4)) as folder:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
        with pytest.raises(StorageError, match="the lock of this run is gone"):
            fill(folder)
    assert not path.exists()


def test_D05_a_place_that_can_not_be_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(StorageError, match=str(place)):
            open_folder(place, make_manifest())


def test_other_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.data.remote_claim._SETTLE_S", 0.0)
    url = f"memory://{tmp_path.name}/out"
    with open_folder(url, make_manifest(6)) as folder:
        for row in range(5):
            folder.add(make_row(row))
    with open_folder(url, make_manifest(6)) as folder:
        assert folder.pending() == [range(5, 6)]
        fill(folder)
    with open_folder(url, make_manifest(6)) as folder:
        assert folder.finished
    fs = fsspec.filesystem("memory")
    files = [name.rpartition("/")[2] for name in fs.find(f"/{tmp_path.name}/out")]
    assert files == ["manifest.json", "part-00000-of-00002.parquet", "part-00001-of-00002.parquet"]
