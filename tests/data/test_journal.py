"""Finished rows of unfinished parts: in the journal within seconds, read back whatever a kill left of it."""

import logging
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data import checkpoint, journal
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow
from batchgen.errors import InternalError, Stopped, StorageError

MODEL = SourceRecord(name="model", fingerprint="f0")


def make_manifest(num_rows: int, *, part_rows: int = 10, n: int = 1) -> Manifest:
    return Manifest(
        batchgen_version="0.1.0",
        spec={},
        fingerprint={},
        inputs=(),
        model=MODEL,
        tokenizer=MODEL,
        num_rows=num_rows,
        n=n,
        part_rows=part_rows,
    )


def open_folder(path: Path | str, manifest: Manifest, seconds: float = 1000.0) -> OutputFolder:
    carried = pa.schema([("id", pa.string()), ("tags", pa.list_(pa.string()))])
    return OutputFolder.open(str(path), manifest=manifest, carried=carried, checkpoint_s=seconds)


def make_row(row: int, sample: int = 0) -> OutputRow:
    carried = {"id": f"r{row}", "tags": [str(row)] * (row % 3)}
    return OutputRow(row, sample, "ok", output=f"answer {row}.{sample}", output_tokens=3, carried=carried)


def add(folder: OutputFolder, rows: Iterator[int] | range | list[int]) -> None:
    for row in rows:
        folder.add(make_row(row))


def finish(folder: OutputFolder) -> None:
    add(folder, [row for rows in folder.pending() for row in rows])
    folder.finish()


def outputs(path: Path) -> list[str]:
    return [text for part in sorted(path.glob("*.parquet")) for text in pq.read_table(part)["output"].to_pylist()]


def segments(path: Path) -> list[Path]:
    return sorted((path / "journal").glob("*.rows"))


def right(num_rows: int) -> list[str]:
    return [f"answer {row}.0" for row in range(num_rows)]


def leave_behind(path: Path, num_rows: int, rows: list[int]) -> None:
    """A run that journals these rows and stops."""
    with open_folder(path, make_manifest(num_rows)) as folder:
        add(folder, rows)


def test_rows_of_unfinished_parts_are_not_computed_again(tmp_path: Path) -> None:
    leave_behind(tmp_path, 40, [3, 17, 4, 31, 32])
    with open_folder(tmp_path, make_manifest(40)) as folder:
        assert folder.num_finished_rows == 5
        assert folder.pending() == [range(3), range(5, 17), range(18, 31), range(33, 40)]
        finish(folder)
    assert outputs(tmp_path) == right(40)
    assert not (tmp_path / "journal").exists()


def test_rows_are_safe_when_their_time_has_come(tmp_path: Path) -> None:
    """Nobody calls anything meanwhile: the engine may be busy with a long step."""
    with open_folder(tmp_path, make_manifest(40), seconds=0.05) as folder:
        add(folder, [3, 17])
        deadline = time.monotonic() + 20
        while not segments(tmp_path):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        copy = tmp_path / "copy"
        copy.mkdir()
        folder._open.checkpoints.drain()
        for name in ("manifest.json", "journal"):
            fsspec.filesystem("file").copy(str(tmp_path / name), str(copy / name), recursive=True)
    with open_folder(copy, make_manifest(40)) as folder:  # as if it had been killed at that moment
        assert folder.num_finished_rows == 2


def test_rows_of_far_away_parts_leave_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_BYTES", 20_000)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 50_000)
    order = list(range(1000))
    random.Random(1).shuffle(order)
    with open_folder(tmp_path, make_manifest(1000)) as folder:
        most = 0
        for row in order:
            folder.add(make_row(row))
            most = max(most, sum(map(len, folder._open.checkpoints._waiting.values())))
        assert most < 50
        assert len(segments(tmp_path)) > 1
        folder.finish()
    assert outputs(tmp_path) == right(1000)
    assert not (tmp_path / "journal").exists()


def test_in_input_order_the_journal_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment goes once the parts of its rows are written."""
    monkeypatch.setattr(checkpoint, "MOST_BYTES", 2_000)
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 10_000)
    with open_folder(tmp_path, make_manifest(1000)) as folder:
        most = 0
        for row in range(1000):
            folder.add(make_row(row))
            most = max(most, len(segments(tmp_path)))
        folder.finish()
    assert most <= 3
    assert outputs(tmp_path) == right(1000)


@pytest.mark.parametrize("cut", [0, 1, 39, 40, 41, 63, 64, 500, -1])
def test_D01_a_torn_tail_is_cut_and_the_rows_before_it_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    with open_folder(tmp_path, make_manifest(40)) as folder:
        for row in (3, 17, 25):
            add(folder, [row])
            folder._open.checkpoints.checkpoint()
    [segment] = segments(tmp_path)
    content = segment.read_bytes()
    segment.write_bytes(content[:cut])
    with caplog.at_level(logging.WARNING), open_folder(tmp_path, make_manifest(40)) as folder:
        assert folder.num_finished_rows == (2 if cut == -1 else 0 if cut < 500 else folder.num_finished_rows)
        finish(folder)
    # cut at a border between frames nothing can be seen, and nothing is wrong
    assert ("journal/" in caplog.text) == (cut != 40)
    assert outputs(tmp_path) == right(40)


def test_D01_any_changed_byte_costs_rows_and_never_changes_one(tmp_path: Path) -> None:
    leave_behind(tmp_path / "whole", 20, [3, 12])
    [segment] = segments(tmp_path / "whole")
    content = segment.read_bytes()
    for place in range(0, len(content), 97):
        path = tmp_path / str(place)
        fsspec.filesystem("file").copy(str(tmp_path / "whole"), str(path), recursive=True)
        changed = bytearray(content)
        changed[place] ^= 0x55
        segments(path)[0].write_bytes(changed)
        with open_folder(path, make_manifest(20)) as folder:
            assert folder.num_finished_rows < 2
            finish(folder)
        assert outputs(path) == right(20)


def test_a_run_after_a_torn_one_writes_a_segment_of_its_own(tmp_path: Path) -> None:
    leave_behind(tmp_path, 40, [3])
    with segments(tmp_path)[0].open("ab") as file:
        file.write(b"torn")
    leave_behind(tmp_path, 40, [17])
    assert len(segments(tmp_path)) == 2
    with open_folder(tmp_path, make_manifest(40)) as folder:
        assert folder.num_finished_rows == 2
        finish(folder)
    assert outputs(tmp_path) == right(40)


def test_a_journal_of_another_job_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    leave_behind(tmp_path / "a", 20, [3])
    leave_behind(tmp_path / "b", 20, [4])
    foreign = segments(tmp_path / "a")[0]
    foreign.rename(tmp_path / "b" / "journal" / foreign.name)
    with caplog.at_level(logging.WARNING), open_folder(tmp_path / "b", make_manifest(20)) as folder:
        assert folder.pending() == [range(4), range(5, 20)]
        finish(folder)
    assert "is no journal of this job" in caplog.text
    assert not (tmp_path / "b" / "journal").exists()


def test_a_row_comes_again_with_all_its_samples_or_not_at_all(tmp_path: Path) -> None:
    manifest = make_manifest(4, part_rows=4, n=3)
    with open_folder(tmp_path, manifest) as folder:
        for row, sample in [(1, 0), (1, 1), (1, 2), (2, 1)]:
            folder.add(make_row(row, sample))
    with open_folder(tmp_path, manifest) as folder:
        assert folder.pending() == [range(1), range(2, 4)]
        for row in (0, 2, 3):
            for sample in range(3):
                folder.add(make_row(row, sample))
        with pytest.raises(InternalError, match="row 1 sample 0 came back"):
            folder.add(make_row(1, 0))
        folder.finish()
    assert outputs(tmp_path) == [f"answer {row}.{sample}" for row in range(4) for sample in range(3)]


def test_D01_a_kill_between_a_whole_part_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows lie in the journal and no part was written: the next run has nothing to compute."""
    with open_folder(tmp_path, make_manifest(20)) as folder:
        add(folder, range(9))
    with open_folder(tmp_path, make_manifest(20)) as folder:
        add(folder, range(10, 19))
        folder._open.checkpoints.flush()
        folder._open.checkpoints.complete = lambda part: None
        add(folder, [9, 19])
    assert not list(tmp_path.glob("*.parquet"))
    with open_folder(tmp_path, make_manifest(20)) as folder:
        assert folder.pending() == []
        folder.finish()
    assert outputs(tmp_path) == right(20)


def test_what_a_kill_left_after_the_last_part_is_removed(tmp_path: Path) -> None:
    leave_behind(tmp_path, 10, [3])
    kept = segments(tmp_path)[0].read_bytes()
    name = segments(tmp_path)[0].name
    with open_folder(tmp_path, make_manifest(10)) as folder:
        add(folder, [row for rows in folder.pending() for row in rows])
        folder._open.checkpoints.drain()
        (tmp_path / "journal").mkdir(exist_ok=True)
        (tmp_path / "journal" / name).write_bytes(kept)
    with open_folder(tmp_path, make_manifest(10)) as folder:
        assert folder.pending() == []
        folder.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "part-00000-of-00001.parquet"]


def test_D05_a_failed_checkpoint_is_raised_once_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    folder = open_folder(tmp_path, make_manifest(40))
    add(folder, [3])
    folder._open.checkpoints.flush()
    monkeypatch.setattr("os.fsync", full)
    add(folder, [4])
    with pytest.raises(StorageError, match=r"journal: the disk is full"):
        folder.close()
    monkeypatch.undo()
    with open_folder(tmp_path, make_manifest(40)) as folder:
        assert folder.num_finished_rows in (1, 2)  # row 4 was written, but nobody could promise it
        finish(folder)
    assert outputs(tmp_path) == right(40)


def test_a_checkpoint_may_come_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the folder is open and while it closes: here every millisecond."""
    crashes: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashes.append)
    for row in range(10):
        with open_folder(tmp_path, make_manifest(40), seconds=0.001) as folder:
            add(folder, [row])
    with open_folder(tmp_path, make_manifest(40), seconds=0.001) as folder:
        assert folder.num_finished_rows == 10
        finish(folder)
    assert outputs(tmp_path) == right(40)
    assert not crashes


def add_until_told(folder: OutputFolder) -> None:
    for row in range(10, 40, 2):  # no part becomes whole
        time.sleep(0.05)
        add(folder, [row])


def test_what_goes_wrong_by_itself_is_raised_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's own thread has nobody to tell."""
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise ValueError("not what anybody expects")

    folder = open_folder(tmp_path, make_manifest(40), seconds=0.02)
    monkeypatch.setattr(checkpoint, "to_table", fail)
    add(folder, [3])
    assert failed.wait(20)
    with pytest.raises(ValueError, match="not what anybody expects"):
        add_until_told(folder)
    folder.close()
    monkeypatch.undo()
    with open_folder(tmp_path, make_manifest(40)) as folder:
        finish(folder)


@pytest.mark.parametrize(("error", "kept"), [(Stopped("x"), 1), (InternalError("x"), 1), (KeyboardInterrupt(), 0)])
def test_D11_a_stop_keeps_what_is_finished_and_a_second_signal_ends_at_once(
    tmp_path: Path, error: BaseException, kept: int
) -> None:
    def run() -> None:
        with open_folder(tmp_path, make_manifest(40)) as folder:
            add(folder, [3])
            raise error

    with pytest.raises(type(error)):
        run()
    with open_folder(tmp_path, make_manifest(40)) as folder:
        assert folder.num_finished_rows == kept


def test_other_file_systems_get_one_object_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batchgen.data.remote_claim._SETTLE_S", 0.0)
    url, fs = f"memory://{tmp_path.name}/out", fsspec.filesystem("memory")
    with open_folder(url, make_manifest(20)) as folder:
        for row in (3, 12, 4):
            add(folder, [row])
            folder._open.checkpoints.checkpoint()
    assert len(fs.find(f"/{tmp_path.name}/out/journal")) == 3
    with open_folder(url, make_manifest(20)) as folder:
        assert folder.num_finished_rows == 3
        finish(folder)
    assert not fs.find(f"/{tmp_path.name}/out/journal")
    parts = [fs.open(name) for name in fs.find(f"/{tmp_path.name}/out") if name.endswith(".parquet")]
    assert [text for part in parts for text in pq.read_table(part)["output"].to_pylist()] == right(20)
