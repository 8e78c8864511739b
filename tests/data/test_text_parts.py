"""Parts as lines of JSON, plain and as an OpenAI batch output: the same promises as for Parquet."""

import datetime
import gzip
import json
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from batchgen.data.columns import Asked, output_columns, to_table
from batchgen.data.files import OutputFiles
from batchgen.data.manifest import Manifest, SourceRecord
from batchgen.data.output import OutputFolder
from batchgen.data.rows import OutputRow
from batchgen.data.status import job_status
from batchgen.data.text_parts import decode_lines, encode_lines
from batchgen.data.verify import failed_rows
from batchgen.errors import JobFileError, RowError

FORMATS = ["jsonl", "openai_chat", "openai_text"]
COMPRESSIONS = {"none": (".jsonl", bytes), "gzip": (".jsonl.gz", gzip.decompress)}
COMPRESSIONS["zstd"] = (".jsonl.zst", lambda data: zstandard.ZstdDecompressor().decompress(data))
TOKEN = {"token_id": 5, "token": " yes\n", "logprob": -0.5}
HALF = {"token_id": 6, "token": "\ufffd", "logprob": -1.5}
ALL = Asked(
    logprobs=True,
    attempts=True,
    reasoning=True,
    parsed=pa.struct([("a", pa.int64())]),
    labels=("no", "yes"),
    label_logprobs=True,
    score=True,
    vote=True,
    as_json=True,
)
CARRIED = pa.schema(
    [
        ("custom_id", pa.string()),
        ("tags", pa.list_(pa.struct([("a", pa.int64())]))),
        ("day", pa.date32()),
        ("price", pa.decimal128(9, 2)),
        ("share", pa.float32()),
    ]
)


def make_manifest(format_: str = "jsonl", compression: str = "none", num_rows: int = 10, n: int = 1) -> Manifest:
    model = SourceRecord(name="model", fingerprint="f0")
    return Manifest(
        batchgen_version="0.1.0",
        spec={},
        fingerprint={},
        inputs=(),
        model=model,
        tokenizer=model,
        num_rows=num_rows,
        n=n,
        part_rows=4,
        part_format=format_,
        part_compression=compression,
    )


def make_row(row: int, sample: int = 0) -> OutputRow:
    if row % 5 == 3:
        return OutputRow(row, sample, "error", error=RowError("bad_json", 'line 3: "no"'))
    return OutputRow(
        row, sample, "ok", output=f"{row}.{sample} é\r\n\u2028\u0085x", finish_reason="eos", output_tokens=3
    )


def open_folder(path: Path, manifest: Manifest, **options: Any) -> OutputFolder:
    asked = Asked(as_json=True)
    return OutputFolder.open(str(path), manifest=manifest, carried=pa.schema([]), asked=asked, **options)


def add(folder: OutputFolder, most: int | None = None) -> None:
    pending = [row for rows in folder.pending() for row in rows][:most]
    for row in pending:
        for sample in range(folder.manifest.n):
            folder.add(make_row(row, sample))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def parts(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("part-*"))}


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_column_comes_back(format_: str, compression: str) -> None:
    columns = output_columns(CARRIED, ALL)
    probs = {"no": 0.25, "yes": 0.75}
    tokens = [{**TOKEN, "top": [TOKEN, HALF]}, {**HALF, "top": []}]
    carried = {"custom_id": "é", "tags": [{"a": 2**60}], "day": datetime.date(2026, 1, 2), "price": Decimal("1.50")}
    carried["share"] = 0.1
    given = [
        OutputRow(0, 0, "ok", output="", finish_reason="eos", logprobs=tokens, carried=carried),
        OutputRow(0, 1, "length", "b", finish_reason="length", output_tokens=2, vote="b", carried=carried),
        OutputRow(
            1, 0, "ok", output="yes", label="yes", label_probs=probs, label_logprobs=probs, margin=0.5, score=-1.0
        ),
        OutputRow(1, 1, "error", output="kept", error=RowError("bad_value", "no int"), truncated_tokens=3),
        OutputRow(2, 0, "skipped", error=RowError("prompt_too_long", "long"), prompt_tokens=7, cached_tokens=2),
        OutputRow(2, 1, "length", reasoning="cut here", reasoning_tokens=9, logprobs=tokens, attempts=2),
        OutputRow(3, 0, "ok", "c", reasoning="so", reasoning_tokens=4, parsed={"a": 1}, logprobs=[]),
        OutputRow(3, 1, "error", error=RowError("non_finite", "NaN")),
    ]
    table = to_table(columns, given)
    manifest = make_manifest(format_, compression, num_rows=4, n=2)
    data = encode_lines(table, manifest)
    assert decode_lines(data, manifest, columns.schema).equals(table)
    assert encode_lines(table, manifest) == data
    found_by = decode_lines(data, manifest, None)
    assert found_by.equals(table.select(["row", "sample", "status", "error"]))
    assert table["day"].to_pylist()[0] == "2026-01-02"
    assert table["price"].to_pylist()[0] == "1.50"


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_and_samples_keep_together_in_a_large_part(format_: str) -> None:
    columns = output_columns(pa.schema([]), Asked(as_json=True))
    table = to_table(columns, [make_row(row, sample) for row in range(300) for sample in range(3)])
    manifest = make_manifest(format_, num_rows=300, n=3)
    data = encode_lines(table, manifest)
    assert len(data.splitlines()) == (900 if format_ == "jsonl" else 300)
    assert decode_lines(data, manifest, columns.schema).equals(table)


def test_json_lacks_some_numbers_and_all_bytes() -> None:
    columns = output_columns(pa.schema([("x", pa.float64())]), Asked(as_json=True))
    rows = [OutputRow(row, 0, "ok", carried={"x": x}) for row, x in enumerate([float("nan"), float("inf"), 1.5])]
    data = encode_lines(to_table(columns, rows), make_manifest())
    assert [json.loads(line)["x"] for line in data.splitlines()] == [None, None, 1.5]
    assert b"NaN" not in data
    for kind in (pa.binary(), pa.list_(pa.struct([("a", pa.large_binary())])), pa.map_(pa.string(), pa.binary())):
        with pytest.raises(JobFileError, match=r"JSON can't hold the bytes in x\. Leave these columns out"):
            output_columns(pa.schema([("x", kind)]), Asked(as_json=True))
        output_columns(pa.schema([("x", kind)]))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_job_in_pieces_ends_as_one_run_does(tmp_path: Path, format_: str, compression: str) -> None:
    manifest = make_manifest(format_, compression)
    with open_folder(tmp_path / "whole", manifest) as folder:
        add(folder)
        finished = folder.finish()
    for most in (6, 3, None):
        with open_folder(tmp_path / "out", manifest) as folder:
            add(folder, most)
            if most is None:
                folder.finish()
    suffix, decompress = COMPRESSIONS[compression]
    assert parts(tmp_path / "out") == parts(tmp_path / "whole")
    assert list(parts(tmp_path / "out")) == [f"part-0000{i}-of-00003{suffix}" for i in range(3)]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", *parts(tmp_path / "out")]
    text = b"".join(map(decompress, parts(tmp_path / "out").values()))
    assert len(text.split(b"\n")) == 10 + 1
    assert [info.data_bytes for info in finished.parts] == [len(data) for data in parts(tmp_path / "whole").values()]
    with open_folder(tmp_path / "out", manifest) as folder:
        assert folder.finished


@pytest.mark.parametrize("format_", FORMATS)
def test_status_and_errors_read_them_while_the_job_runs(tmp_path: Path, format_: str) -> None:
    with open_folder(tmp_path, make_manifest(format_)) as folder:
        add(folder, 9)
        folder._open.checkpoints.flush()
        status = job_status(str(tmp_path))
        assert (status.state, status.done, status.failed) == ("running", 9, 2)
    assert [(row.row, row.kind) for row in failed_rows(str(tmp_path))] == [(3, "bad_json")]  # in whole parts only


@pytest.mark.parametrize("cut", [0, 1, -1])
@pytest.mark.parametrize("finished", [False, True])
def test_D01_a_cut_part_is_made_again(
    tmp_path: Path, cut: int, finished: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        add(folder, None if finished else 9)
        folder._open.checkpoints.flush()
        if finished:
            folder.finish()
    whole = parts(tmp_path)
    name = "part-00001-of-00003.jsonl"
    (tmp_path / name).write_bytes(whole[name][:cut])
    with open_folder(tmp_path, make_manifest()) as folder:
        assert folder.pending()[0] == range(4, 8)
        add(folder)
        folder.finish()
    assert whole.items() <= parts(tmp_path).items()
    assert f"{name} is computed again: its size is" in caplog.text


def test_D01_a_part_whose_note_is_lost_or_torn_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_folder(tmp_path, make_manifest()) as folder:
        add(folder, 9)
    (tmp_path / "journal/part-00000-of-00003.jsonl.json").unlink()
    (tmp_path / "journal/part-00001-of-00003.jsonl.json").write_text('{"name": "par')
    (tmp_path / "journal/.part-00001-of-00003.jsonl.json.0123456789ab.tmp").write_text("{")
    with open_folder(tmp_path, make_manifest()) as folder:
        assert folder.pending() == [range(8), range(9, 10)]
        add(folder)
        folder.finish()
    assert "batchgen did not write it, or its note is lost" in caplog.text
    assert "part-00001-of-00003.jsonl.json, which says what it has to be, can't be read" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *parts(tmp_path)]


@pytest.mark.parametrize("last", ["manifest.json", "note"])
def test_D01_a_kill_around_the_last_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """The notes go only when the manifest has what they say."""
    write, remove = OutputFiles.write, OutputFiles.remove

    class Killed(BaseException):
        pass

    def write_or_die(self: OutputFiles, name: str, content: bytes, lock: Any) -> None:
        if name == last and b"finished" in content[-3000:] and b'"state": "finished"' in content:
            raise Killed
        write(self, name, content, lock)

    def remove_or_die(self: OutputFiles, name: str) -> None:
        if last == "note" and name.endswith(".jsonl.json"):
            raise Killed
        remove(self, name)

    monkeypatch.setattr(OutputFiles, "write", write_or_die)
    monkeypatch.setattr(OutputFiles, "remove", remove_or_die)
    with suppress(Killed), open_folder(tmp_path, make_manifest()) as folder:
        add(folder)
        folder.finish()
        pytest.fail("nothing was killed")
    monkeypatch.undo()
    before = parts(tmp_path)
    with open_folder(tmp_path, make_manifest()) as folder:
        assert folder.pending() == []
        assert folder.finished == (last == "note")
        folder.finish()
    assert parts(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", *before]


@pytest.mark.parametrize("key", ["output", "id"])
def test_an_openai_line_is_what_its_readers_take(key: str) -> None:
    format_ = "openai_chat" if key == "output" else "openai_text"
    manifest = make_manifest(format_, n=2)
    columns = output_columns(pa.schema([]), Asked(logprobs=True, as_json=True))
    tokens = [{**TOKEN, "top": [HALF]}]
    rows = [
        OutputRow(0, 0, "ok", output="a", finish_reason="stop", prompt_tokens=7, cached_tokens=2, output_tokens=3),
        OutputRow(0, 1, "length", "b", finish_reason="length", prompt_tokens=7, output_tokens=4, logprobs=tokens),
        *(OutputRow(1, sample, "error", error=RowError("out_of_memory", "no room")) for sample in range(2)),
    ]
    good, bad = map(json.loads, encode_lines(to_table(columns, rows), manifest).splitlines())
    assert list(good) == ["id", "custom_id", "response", "error", "batchgen"]
    assert (good["custom_id"], good["error"], good["response"]["status_code"]) == ("row-0", None, 200)
    body = good["response"]["body"]
    details = {"cached_tokens": 2}
    usage = {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14, "prompt_tokens_details": details}
    assert body["usage"] == usage | {"completion_tokens_details": {"reasoning_tokens": 0}}
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "stop"), (1, "length")]
    if format_ == "openai_chat":
        assert body["object"] == "chat.completion"
        assert body["choices"][0]["message"] == {"role": "assistant", "content": "a", "refusal": None}
        [token] = body["choices"][1]["logprobs"]["content"]
        assert (token["token"], token["bytes"]) == (" yes\n", list(b" yes\n"))
        assert token["top_logprobs"][0]["bytes"] is None
    else:
        assert (body["object"], body["choices"][1]["text"]) == ("text_completion", "b")
        assert body["choices"][1]["logprobs"]["token_logprobs"] == [-0.5]
    assert bad["response"]["status_code"] == 500
    assert bad["response"]["body"]["error"]["message"] == bad["error"]["message"] == "no room"
    assert bad["error"]["code"] == "out_of_memory"
