"""Text files line by line: JSONL in all its broken forms, and CSV."""

import csv
import gzip
import json
import random
import tracemalloc
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.lines import BOM, TextRow, read_lines
from batchgen.data.rows import Row
from batchgen.data.source import Source, open_source
from batchgen.errors import InputError
from batchgen.job.spec import Input


def source_of(path: Path, content: bytes, **options: Any) -> Source:
    path.write_bytes(content)
    return open_source(Input(path=path.name, **options), base=path.parent, columns=None)


def prompts(source: Source) -> list[Any]:
    """Each row's prompt, or the kind of its error."""
    return [row.error.kind if row.error else row.values.get("prompt") for row in source.rows()]


def outcome(row: Row) -> tuple[Any, ...]:
    return row.index, dict(row.values), row.place, row.error


def test_A01_bom_only_at_the_start_is_dropped(tmp_path: Path) -> None:
    content = BOM + b'{"prompt": "first"}\n' + '{"prompt": "mid\ufeffdle"}\n{"prompt": "last"}'.encode()
    expected = ["first", "mid\ufeffdle", "last"]
    assert prompts(source_of(tmp_path / "a.jsonl", content)) == expected
    assert prompts(source_of(tmp_path / "b.jsonl.gz", gzip.compress(content))) == expected
    assert prompts(source_of(tmp_path / "c.jsonl.zst", zstandard.compress(content))) == expected
    second_bom = source_of(tmp_path / "d.jsonl", b'{"prompt": "a"}\n' + BOM + b'{"prompt": "b"}\n')
    assert prompts(second_bom) == ["a", "bad_json"]


def test_A01_every_shard_has_its_own_bom(tmp_path: Path) -> None:
    for shard in range(2):
        (tmp_path / f"part-{shard}.jsonl").write_bytes(BOM + b'{"prompt": "shard %d"}\n' % shard)
    source = open_source(Input(path="."), base=tmp_path, columns=None)
    assert prompts(source) == ["shard 0", "shard 1"]
    assert [row.place for row in source.rows()] == ["part-0.jsonl line 1", "part-1.jsonl line 1"]


def test_A01_blank_lines_are_no_rows_and_lines_keep_their_numbers(tmp_path: Path) -> None:
    content = b'{"prompt":"a"}\r\n\r\n{"prompt":"b"}\r\n \t\r\n{"prompt":"c\\r\\nd"}\r\n\n\n{"prompt":"end"}'
    source = source_of(tmp_path / "a.jsonl", content)
    assert [(row.index, row.values["prompt"], row.place) for row in source.rows()] == [
        (0, "a", "a.jsonl line 1"),
        (1, "b", "a.jsonl line 3"),
        (2, "c\r\nd", "a.jsonl line 5"),
        (3, "end", "a.jsonl line 8"),
    ]
    assert source.num_rows == 4


def test_A01_lines_end_at_newlines_only(tmp_path: Path) -> None:
    text = "a\u2028b\u0085c"
    source = source_of(tmp_path / "b.jsonl", json.dumps({"prompt": text}, ensure_ascii=False).encode())
    assert prompts(source) == [text]


def test_A01_a_file_of_only_a_bom_has_no_rows(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", BOM)
    assert (prompts(source), source.num_rows, source.warnings) == ([], 0, ())


def test_A12_a_file_of_zero_bytes_has_no_rows_and_a_warning(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", b"")
    assert (prompts(source), source.num_rows) == ([], 0)
    assert source.warnings == (f"{tmp_path}/a.jsonl is empty (0 bytes): no rows",)
    assert source.has_column("prompt")
    source.require(["prompt"])


def test_A03_a_broken_line_is_its_own_rows_error(tmp_path: Path) -> None:
    lines = [
        b'{"prompt": "good"}',
        b'{"prompt": "cut',
        b"{'prompt': 'quotes'}",
        b'{"prompt": "two"} {"prompt": "objects"}',
        b"null",
        b"[1, 2]",
        b'"text"',
        b"3.5",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "\\ud83d\\ude00"}',
        '{"prompt": "good €"}'.encode(),
    ]
    source = source_of(tmp_path / "a.jsonl", b"\n".join(lines))
    assert prompts(source) == (
        ["good"] + ["bad_json"] * 3 + ["not_an_object"] * 4 + ["bad_utf8"] * 3 + ["\U0001f600", "good €"]
    )
    error = list(source.rows())[8].error
    assert error is not None
    assert error.message.startswith(f"a.jsonl line 9 (byte {sum(len(line) + 1 for line in lines[:8])}): byte 12 of")


@pytest.mark.parametrize("deep", [b"[" * 100_000, b'{"a":' * 100_000, b"[" * 201 + b"]" * 201])
def test_A03_deep_nesting_is_bad_json(tmp_path: Path, deep: bytes) -> None:
    lines = [b'{"prompt": "a"}', b'{"prompt": ' + deep + b"}", b'{"prompt": "b"}']
    assert prompts(source_of(tmp_path / "a.jsonl", b"\n".join(lines))) == ["a", "bad_json", "b"]


def test_A03_deep_enough_nesting_is_fine(tmp_path: Path) -> None:
    line = b'{"prompt": "a", "x": ' + b"[" * 199 + b"]" * 199 + b', "brackets": "' + b"[" * 500 + b'"}'
    assert prompts(source_of(tmp_path / "a.jsonl", line)) == ["a"]


def test_A03_a_job_may_stop_at_the_first_bad_row(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.jsonl", b'{"prompt": "a"}\nnull\n', on_bad_row="stop")
    with pytest.raises(InputError, match=r"a\.jsonl line 2 .*not_an_object; input\.on_bad_row is stop"):
        _ = source.num_rows
    assert len(list(source.rows(0, 1))) == 1


def test_A16_values_keep_their_types(tmp_path: Path) -> None:
    content = b'{"prompt": NaN, "n": 123456789012345678901234567890, "n2": 1, "n2": 2, "x": -Infinity, "none": null}'
    (row,) = source_of(tmp_path / "a.jsonl", content).rows()
    assert row.values["prompt"] != row.values["prompt"]
    assert dict(row.values) | {"prompt": 0} == {
        "prompt": 0,
        "n": 123456789012345678901234567890,
        "n2": 2,
        "x": float("-inf"),
        "none": None,
    }


def test_A16_an_absent_column_is_not_a_null_one(tmp_path: Path) -> None:
    first, second = source_of(tmp_path / "a.jsonl", b'{"prompt": null}\n{"other": 1}').rows()
    assert dict(first.values) == {"prompt": None}
    assert "prompt" not in second.values


def test_A05_a_line_over_the_limit_is_an_error_and_the_others_run(tmp_path: Path) -> None:
    huge = json.dumps({"prompt": "x" * 3 * 2**20}).encode()
    content = b'{"prompt": "a"}\n' + huge + b'\n{"prompt": "b"}\n' + b" " * 5000 + b'\n{"prompt": "c"}\n' + huge
    source = source_of(tmp_path / "a.jsonl", content, max_line_bytes=2**20)
    assert prompts(source) == ["a", "line_too_long", "b", "c", "line_too_long"]
    assert [row.place for row in source.rows()][-2:] == ["a.jsonl line 5", "a.jsonl line 6"]
    error = list(source.rows())[1].error
    assert error is not None
    assert "the limit is input.max_line_bytes: 1048576" in error.message
    assert prompts(source_of(tmp_path / "b.jsonl", content))[1] == "x" * 3 * 2**20


def test_A05_an_endless_line_is_not_held() -> None:
    class Endless:
        left = 300 << 16

        def read(self, size: int, /) -> bytes:
            size = min(size, self.left)
            self.left -= size
            return b"x" * size

    tracemalloc.start()
    try:
        (line,) = read_lines(Endless(), 4096, chunk_bytes=1 << 16)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (line.content, line.end) == (None, 300 << 16)
    assert peak < 16 << 16


def is_blank(line: TextRow) -> bool:
    return line.content is not None and not line.content.strip(b" \t\r\n")


def naive_lines(content: bytes, max_bytes: int) -> list[tuple[int, int, bytes | None]]:
    offset = len(BOM) if content.startswith(BOM) else 0
    pieces = content[offset:].split(b"\n")
    if not pieces[-1]:
        pieces.pop()
    lines: list[tuple[int, int, bytes | None]] = []
    for number, piece in enumerate(pieces, start=1):
        short: bytes | None = piece if len(piece) <= max_bytes else None
        lines.append((number, offset, b"" if not piece.strip(b" \t\r\n") else short))
        offset += len(piece) + 1
    return lines


@given(
    parts=st.lists(st.sampled_from([b"\n", b"\r\n", BOM, b" ", b"\t", b"a", b"\xff", b"{}", b"\x0b", b"abcdef" * 3])),
    chunk_bytes=st.integers(1, 9),
    max_bytes=st.integers(1, 12),
)
def test_lines_do_not_depend_on_chunks(parts: list[bytes], chunk_bytes: int, max_bytes: int) -> None:
    content = b"".join(parts)
    found = list(read_lines(BytesIO(content), max_bytes, chunk_bytes=chunk_bytes))
    lines = [(line.number, line.offset, b"" if is_blank(line) else line.content) for line in found]
    assert lines == naive_lines(content, max_bytes)
    for line, following in pairwise(found):
        assert line.end == following.offset


json_lines = st.one_of(
    st.dictionaries(st.text(max_size=3), st.one_of(st.text(max_size=5), st.integers(), st.none()), max_size=3).map(
        lambda value: json.dumps(value, ensure_ascii=False).encode()
    ),
    st.sampled_from([b"", b"  ", b"\r", b"null", b"{", b'{"a": "\xff"}', b"[]"]),
)


@settings(max_examples=40, deadline=None)
@given(lines=st.lists(json_lines, max_size=12), start=st.integers(0, 12), count=st.integers(0, 12))
def test_rows_equal_the_naive_reading(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], start: int, count: int
) -> None:
    content = b"\n".join(lines)
    wanted: list[Any] = []
    for line in lines:
        if line.strip():
            try:
                value = json.loads(line.decode())
                wanted.append(value if isinstance(value, dict) else "not_an_object")
            except UnicodeDecodeError:
                wanted.append("bad_utf8")
            except json.JSONDecodeError:
                wanted.append("bad_json")
    folder = tmp_path_factory.mktemp("naive")
    for name, stored in (("a.jsonl", content), ("a.jsonl.gz", gzip.compress(content))):
        source = source_of(folder / name, stored)
        assert [row.error.kind if row.error else row.values for row in source.rows()] == wanted
        assert source.num_rows == len(wanted)
        part = [outcome(row) for row in source.rows(start, start + count)]
        assert part == [outcome(row) for row in source.rows()][start : start + count]


def test_all_members_and_frames_are_read_and_known_by_their_first_bytes(tmp_path: Path) -> None:
    first, second = b'{"prompt": "a"}\n{"prompt"', b': "b"}\n'
    gz = gzip.compress(first) + gzip.compress(b"") + gzip.compress(second)
    skippable = bytes.fromhex("502a4d18") + (4).to_bytes(4, "little") + b"size"
    zst = skippable + zstandard.compress(first) + zstandard.compress(second)
    for name in ("a.jsonl.gz", "a.jsonl.zst", "a.jsonl"):
        assert prompts(source_of(tmp_path / name, gz)) == ["a", "b"]
        assert prompts(source_of(tmp_path / name, zst)) == ["a", "b"]
        assert prompts(source_of(tmp_path / name, first + second)) == ["a", "b"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_A12_cut_compressed_files_are_found_and_all_named(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    content = b"".join(b'{"prompt": "%d"}\n' % random.Random(i).getrandbits(64) for i in range(500))
    (tmp_path / "a.jsonl").write_bytes(compress(content)[:-3])
    (tmp_path / "b.jsonl").write_bytes(compress(content))
    (tmp_path / "c.jsonl").write_bytes(compress(content)[:700])
    source = open_source(Input(path="."), base=tmp_path, columns=None)
    with pytest.raises(InputError, match=r"(?s)2 problems.*/a\.jsonl: .*cut off or damaged.*/c\.jsonl: .*cut off"):
        _ = source.num_rows


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_reading_from_any_row_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    lines = [b'{"n": %d}' % i + b"\n" * (1 + i % 3) for i in range(9000)]
    content = BOM + b"".join(lines)
    path = tmp_path / f"a.jsonl{suffix}"
    source = source_of(path, gzip.compress(content) if suffix else content)
    everything = [outcome(row) for row in source.rows()]
    assert source.num_rows == 9000
    for start in (0, 1, 4095, 4096, 4097, 8999, 9000):
        assert [outcome(row) for row in source.rows(start)] == everything[start:]
        assert [outcome(row) for row in source.rows(start, start + 2)] == everything[start : start + 2]


def test_a_late_row_is_reached_without_reading_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "a.jsonl", b"".join(b'{"n": %d}\n' % i for i in range(50_000)))
    assert source.num_rows == 50_000
    lines_read = 0
    real = read_lines

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal lines_read
        for line in real(*args, **kwargs):
            lines_read += 1
            yield line

    monkeypatch.setattr("batchgen.data.jsonl.read_lines", counting)
    assert [row.values["n"] for row in source.rows(49_999)] == [49_999]
    assert lines_read <= 4097


def test_csv_fields_are_text(tmp_path: Path) -> None:
    content = BOM + b'id,text\r\n1,"he said ""x""\nand, y"\r\n\r\n007,\r\nNaN,null\n'
    source = source_of(tmp_path / "a.csv", content)
    assert [(dict(row.values), row.place) for row in source.rows()] == [
        ({"id": "1", "text": 'he said "x"\nand, y'}, "a.csv line 2"),
        ({"id": "007", "text": ""}, "a.csv line 5"),
        ({"id": "NaN", "text": "null"}, "a.csv line 6"),
    ]
    assert (source.num_rows, source.columns) == (3, ("id", "text"))
    assert [str(field.type) for field in source.schema] == ["string", "string"]
    assert not source.has_column("prompt")


def test_csv_bad_records_are_error_rows(tmp_path: Path) -> None:
    content = b'id,prompt\n1,a,b\n2\n3,\xff\n4,"ab"c\n5,' + b"x" * 3000 + b'\n6,fine\n7,"never closed\n8,x\n'
    source = source_of(tmp_path / "a.csv", content, max_line_bytes=1024)
    assert prompts(source) == ["bad_csv", "bad_csv", "bad_utf8", "bad_csv", "line_too_long", "fine", "bad_csv"]
    error = next(source.rows()).error
    assert error is not None
    assert error.message == "a.csv line 2 (byte 10): 3 fields where the header names 2"


def test_csv_long_fields_tabs_and_compression(tmp_path: Path) -> None:
    text = "word, " * 100_000
    source = source_of(tmp_path / "a.tsv.gz", gzip.compress(f"id\tprompt\n1\t{text}\n".encode()))
    assert prompts(source) == [text]


texts = st.text(st.one_of(st.sampled_from('",\r\n\t \ufeff'), st.characters(exclude_categories=["Cs"])), max_size=6)


@settings(max_examples=60, deadline=None)
@given(table=st.integers(1, 3).flatmap(lambda width: st.lists(st.lists(texts, min_size=width, max_size=width))))
def test_csv_equals_what_the_csv_module_wrote(tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]) -> None:
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    names = [f"column{i}" for i in range(len(table[0]) if table else 1)]
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *table])
    source = open_source(Input(path=str(path)), base=path.parent, columns=None)
    assert [row.error or list(row.values.values()) for row in source.rows()] == table
    assert source.num_rows == len(table)


@pytest.mark.parametrize("header", [b"a,b,a\n1,2,3\n", b"a,\xff\n1,2\n"])
def test_csv_headers_are_checked_at_the_start(tmp_path: Path, header: bytes) -> None:
    with pytest.raises(InputError, match=r"a\.csv: (the CSV header names 'a' twice|no CSV header)"):
        source_of(tmp_path / "a.csv", header)


def test_csv_from_any_row(tmp_path: Path) -> None:
    content = b"n,text\n" + b"".join(b'%d,"two\nlines"\n' % i for i in range(9000))
    source = source_of(tmp_path / "a.csv", content)
    everything = [outcome(row) for row in source.rows()]
    assert source.num_rows == len(everything) == 9000
    for start in (1, 4096, 4097, 8999):
        assert [outcome(row) for row in source.rows(start, start + 3)] == everything[start : start + 3]


def test_openai_batch_requests(tmp_path: Path) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "b", "body": "no object"},
        {"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "x"}},
        {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "hi"}},
    ]
    source = source_of(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode(), format="openai")
    rows = list(source.rows())
    assert dict(rows[0].values) == body | {"custom_id": "a"}
    assert [row.error.kind if row.error else None for row in rows] == [None, "bad_request", "bad_request", None]
    assert dict(rows[3].values) == {"prompt": "hi", "custom_id": "d"}
    assert source.has_column("messages")
