"""Input trouble, end to end: whatever lies in the files, each row comes out once, at its place, and the rest runs."""

import gzip
import json
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

BOM = b"\xef\xbb\xbf"
LEFT_BEHIND = ["manifest.json", "part-00000-of-00001.parquet"]


@pytest.fixture
def run(job_folder):
    """Runs a job over one input; checks what every run must leave behind."""

    def go(path, columns=("prompt",), **sections):
        done = job_folder.run(input={"path": path}, output={"columns": columns}, **sections)
        if done.exit_code in (0, 10):
            assert done.files == LEFT_BEHIND
            assert done.column("row") == list(range(len(done.rows)))
            assert done.exit_code == (10 if any(done.kinds()) else 0)
            assert {row["status"] for row in done.rows} <= {"ok", "length", "error"}
            assert all((row["output"] is None) == (row["error"] is not None) for row in done.rows)
        else:
            assert done.files == []
        assert len(done.log.splitlines()) <= 10
        return done

    return go


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_A01_bom(job_folder, run, pack):
    lines = ["first", "mid\ufeffdle", "last"]
    content = BOM + "\n".join(json.dumps({"prompt": line}, ensure_ascii=False) for line in lines).encode()
    job_folder.write("rows.jsonl", pack(content))
    assert run("rows.jsonl").column("prompt") == lines


def test_A01_every_shard_has_a_bom(job_folder, run):
    for shard in range(2):
        job_folder.write(f"shards/{shard}.jsonl", BOM + b'{"prompt": "shard %d"}\n' % shard)
    assert run("shards").column("prompt") == ["shard 0", "shard 1"]


def test_A01_bom_only(job_folder, run):
    job_folder.write("rows.jsonl", BOM)
    assert run("rows.jsonl").rows == []


def test_A01_crlf_and_blank_lines(job_folder, run):
    content = (
        b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n  \t\n{"prompt": "c\\r\\nd"}\r\n\n\n{"prompt": 5}\n{"prompt": "e"}'
    )
    job_folder.write("rows.jsonl", content)
    done = run("rows.jsonl")
    assert done.kinds() == [None, None, None, "not_text", None]
    assert [done.column("prompt")[i] for i in (0, 1, 2, 4)] == ["a", "b", "c\r\nd", "e"]
    assert "row 3 (rows.jsonl line 8)" in job_folder.preview("--row", "3", "--no-generate").stdout


def test_A03_bad_json_in_the_middle(job_folder, run):
    bad = ['{"prompt": "cut', '{"prompt": "a"} {"prompt": "b"}', "{'prompt': 'python'}", "plain text"]
    lines = ['{"prompt": "good zero"}', bad[0], '{"prompt": "good two"}', *bad[1:], '{"prompt": "good seven"}']
    job_folder.write("rows.jsonl", "\n".join(lines))
    done = run("rows.jsonl")
    assert done.kinds() == [None, "bad_json", None, "bad_json", "bad_json", "bad_json", None]
    for row, line in ((1, 2), (3, 4), (4, 5), (5, 6)):
        assert f"rows.jsonl line {line} (byte " in done.rows[row]["error"]["message"]
    assert "4 of 7 rows failed" in done.log


def test_A03_not_objects(job_folder, run):
    job_folder.write("rows.jsonl", 'null\n[1, 2]\n"text"\n42\n{}\n{"prompt": "good"}\n')
    assert run("rows.jsonl").kinds() == [*["not_an_object"] * 4, "missing_prompt", None]


def test_A03_bad_utf8_in_the_middle(job_folder, run):
    bad = [b"\xff\xfe", b"caf\xe9", b"\xed\xa0\x80", b"\xf0\x9f\x98"]
    texts = [b"good zero", *bad, "good € five".encode()]
    job_folder.write("rows.jsonl", b"".join(b'{"prompt": "%s"}\n' % text for text in texts))
    done = run("rows.jsonl")
    assert done.kinds() == [None, *["bad_utf8"] * 4, None]
    assert done.column("prompt") == ["good zero", None, None, None, None, "good € five"]


def test_A05_huge_line(job_folder, run):
    rows = [{"prompt": "before"}, {"prompt": "also before"}, {"prompt": "short", "blob": "x" * 3 * 2**20}]
    rows += [{"prompt": "word " * 200_000}, {"prompt": "after"}]
    job_folder.write("rows.jsonl", rows)
    done = run("rows.jsonl", columns=[])
    assert done.kinds() == [None, None, None, "prompt_too_long", None]
    assert "at least" in done.rows[3]["error"]["message"]


def test_A05_a_line_over_the_limit_is_an_error_row(job_folder, run):
    job_folder.write("rows.jsonl", [{"prompt": "a"}, {"prompt": "b", "blob": "x" * 5000}, {"prompt": "c"}])
    job_folder.job["input"]["max_line_bytes"] = 2000
    done = run("rows.jsonl")
    assert done.kinds() == [None, "line_too_long", None]
    assert "rows.jsonl line 2" in done.rows[1]["error"]["message"]


TEXTS = ["plain", "naïve 😀", None, "", "plain"]


@pytest.mark.parametrize("dtype", ["string", "large_string", "string_view", "dictionary", "chunks"])
def test_A09_every_text_type(job_folder, run, dtype):
    types = {
        "string": pa.string(),
        "large_string": pa.large_string(),
        "string_view": pa.string_view(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "chunks": pa.string(),
    }
    table = pa.table({"prompt": pa.array(TEXTS, pa.string()).cast(types[dtype])})
    pq.write_table(table, job_folder.folder / "rows.parquet", row_group_size=2 if dtype == "chunks" else None)
    done = run("rows.parquet")
    assert done.kinds() == [None, None, "null_prompt", "empty_prompt", None]
    assert done.column("prompt") == TEXTS


def test_A09_binary_needs_a_word(job_folder, run):
    pq.write_table(pa.table({"prompt": [b"plain", b"na\xc3\xafve", b"\xff"]}), job_folder.folder / "rows.parquet")
    refused = run("rows.parquet")
    assert refused.exit_code == 3
    assert "'prompt' holds binary values" in refused.log
    job_folder.job["input"]["decode_binary"] = True
    done = run("rows.parquet")
    assert done.kinds() == [None, None, "bad_utf8"]
    assert done.column("prompt")[:2] == ["plain", "naïve"]


def test_A09_nested_column(job_folder, run):
    table = pa.table({"input": [{"text": "deep one"}, {"text": "deep two"}]})
    pq.write_table(table, job_folder.folder / "rows.parquet")
    done = run("rows.parquet", columns=["input"], prompt={"text": "{{ input.text }}"})
    assert done.column("input") == [{"text": "deep one"}, {"text": "deep two"}]
    assert done.column("prompt_tokens") == [8, 8]


def test_A11_drifting_shards_have_one_schema(job_folder, run):
    shards = [
        {"id": pa.array([0, 1]), "prompt": ["a0", "a1"], "tag": ["x", "y"]},
        {"tag": ["x", None], "prompt": ["b0", "b1"], "id": pa.array([2, 3])},
        {"id": pa.array([4, 5]), "prompt": ["c0", "c1"], "tag": pa.nulls(2)},
        {"id": ["6", "seven"], "prompt": ["d0", "d1"], "tag": ["x", "y"]},
        {"id": pa.array([8, 9], pa.int32()), "prompt": ["e0", "e1"], "extra": [1.5, None]},
    ]
    (job_folder.folder / "shards").mkdir()
    for number, shard in enumerate(shards):
        pq.write_table(pa.table(shard), job_folder.folder / f"shards/part-{number}.parquet")
    done = run("shards", columns="all")
    assert done.column("prompt") == [f"{letter}{i}" for letter in "abcde" for i in (0, 1)]
    assert done.column("id") == ["0", "1", "2", "3", "4", "5", "6", "seven", "8", "9"]
    assert done.column("tag") == ["x", "y", "x", None, None, None, "x", "y", None, None]
    assert done.column("extra") == [None] * 8 + [1.5, None]
    assert "column 'id' is int64 in" in done.log


def test_A11_missing_prompt_column_stops_the_job(job_folder, run, no_model):
    (job_folder.folder / "shards").mkdir()
    pq.write_table(pa.table({"id": [1], "prompt": ["a"]}), job_folder.folder / "shards/part-0.parquet")
    pq.write_table(pa.table({"id": [2], "text": ["b"]}), job_folder.folder / "shards/part-1.parquet")
    done = run("shards")
    assert done.exit_code == 3
    assert "part-1.parquet: no column 'prompt'; columns: id, text" in done.log


def test_A12_zero_rows_is_success_without_a_model(job_folder, run, no_model):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), job_folder.folder / "rows.parquet")
    done = run("rows.parquet")
    assert (done.exit_code, done.rows) == (0, [])
    schema = pq.read_schema(job_folder.out / LEFT_BEHIND[1])
    assert {"row", "sample", "prompt", "output", "status", "error"} <= set(schema.names)
    assert pa.null() not in schema.types


def test_A12_zero_bytes(job_folder, run, no_model):
    job_folder.write("rows.jsonl", b"")
    done = run("rows.jsonl", columns=[])
    assert (done.exit_code, done.rows) == (0, [])
    assert "rows.jsonl is empty (0 bytes): no rows" in done.log


def test_A12_broken_files_are_named_at_once(job_folder, run, no_model):
    table = pa.table({"prompt": ["one", "two"]})
    (job_folder.folder / "shards").mkdir()
    for number in range(4):
        pq.write_table(table, job_folder.folder / f"shards/part-{number}.parquet")
    whole = (job_folder.folder / "shards/part-0.parquet").read_bytes()
    job_folder.write("shards/part-1.parquet", b"")
    job_folder.write("shards/part-2.parquet", whole[: len(whole) // 2])
    job_folder.write("shards/part-3.parquet", whole[:-1])
    done = run("shards")
    assert done.exit_code == 3
    assert "3 problems with the input" in done.log
    assert all(f"part-{number}.parquet" in done.log for number in (1, 2, 3))
    assert "part-0.parquet" not in done.log


def test_A12_empty_shard_among_good_ones(job_folder, run):
    (job_folder.folder / "shards").mkdir()
    for number, texts in enumerate((["one"], [], ["two"])):
        table = pa.table({"prompt": pa.array(texts, pa.string())})
        pq.write_table(table, job_folder.folder / f"shards/part-{number}.parquet")
    assert run("shards").column("prompt") == ["one", "two"]


def test_A12_bad_text_in_a_good_file(job_folder, run):
    path = job_folder.folder / "rows.parquet"
    table = pa.table({"prompt": ["one", "MARK"]})
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    path.write_bytes(path.read_bytes().replace(b"MARK", b"\xff\xfe\xfd\xfc"))
    done = run("rows.parquet")
    assert done.kinds() == [None, "bad_utf8"]
    assert done.column("prompt")[0] == "one"


def hive_file(folder: Path, name: str, **columns: object) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), folder / name)


def test_A13_hive_folders(job_folder, run):
    root = job_folder.folder / "hive"
    hive_file(root, "lang=__HIVE_DEFAULT_PARTITION__/day=2024-01-03/a.parquet", prompt=["no language"])
    hive_file(root, "lang=de/day=2024-01-02/a.parquet", prompt=["hallo"], lang=["de"])
    hive_file(root, "lang=en/day=2024-01-01/a.parquet", prompt=["hello", "bye"])
    hive_file(root, "_temporary/0/a.parquet", prompt=["half written"])
    for marker in ("_SUCCESS", "lang=de/_metadata", "lang=de/day=2024-01-02/.a.parquet.crc", ".hidden"):
        (root / marker).write_bytes(b"no data")
    done = run(["hive", "hive/lang=en/**/*.parquet"], columns=["prompt", "lang", "day"])
    assert [(row["prompt"], row["lang"], row["day"]) for row in done.rows] == [
        ("no language", None, "2024-01-03"),
        ("hallo", "de", "2024-01-02"),
        ("hello", "en", "2024-01-01"),
        ("bye", "en", "2024-01-01"),
    ]


def test_A13_conflicting_partition_stops_the_job(job_folder, run, no_model):
    hive_file(job_folder.folder, "hive/lang=en/a.parquet", prompt=["salut"], lang=["fr"])
    done = run("hive", columns=["prompt", "lang"])
    assert done.exit_code == 3
    assert "column 'lang' is 'fr' in the file and 'en' in its path" in done.log


def test_A16_prompts_that_are_no_text(job_folder, run):
    values = ["fine", None, "", 3, 2.5, True, ["a"], {"a": 1}, "NaN", "fine too"]
    rows = [{"prompt": value} for value in values]
    lines = [json.dumps(row) for row in [*rows[:8], {"other": 1}]]
    job_folder.write("rows.jsonl", "\n".join([*lines, '{"prompt": NaN}', *map(json.dumps, rows[8:])]))
    done = run("rows.jsonl", columns=[])
    not_text = ["not_text"] * 5
    assert done.kinds() == [None, "null_prompt", "empty_prompt", *not_text, "missing_prompt", "not_text", None, None]


def test_A16_blank_text_is_text(job_folder, run):
    texts = ["fine", None, "", "   ", "\n", " keep my spaces ", "NaN", "null", "fine too"]
    pq.write_table(pa.table({"prompt": texts}), job_folder.folder / "rows.parquet")
    done = run("rows.parquet")
    assert done.kinds() == [None, "null_prompt", "empty_prompt", *[None] * 6]
    assert done.column("prompt") == texts
    assert done.column("prompt_tokens") == [4, 0, 0, 3, 1, 16, 3, 4, 8]


def test_A16_ids_that_repeat(job_folder, run):
    ids = ["job-1", "job-2", "job-1", "job-3", 1, "1", None, "job-9"]
    texts = ["first", "second", "same id, other text", "first", "int id", "text id", "no id", "first"]
    rows = [
        {"method": "POST", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": text}]}}
        | ({} if custom_id is None else {"custom_id": custom_id})
        for custom_id, text in zip(ids, texts, strict=True)
    ]
    job_folder.write("rows.jsonl", rows)
    job_folder.job["input"]["format"] = "openai"
    done = run("rows.jsonl", columns=["custom_id"], prompt={})
    assert done.column("custom_id") == ["job-1", "job-2", "job-1", "job-3", "1", "1", None, "job-9"]
    assert done.log.count("1 values of 'custom_id' repeat") == 1
    same = [done.rows[row]["output"] for row in (0, 3, 7)]
    assert same == [same[0]] * 3


def test_A16_repeats_are_counted_in_bounded_memory():
    from batchgen.data.repeats import RepeatedIds

    tracemalloc.start()
    repeats = RepeatedIds(most=1000)
    for row in range(5000):
        repeats.add(f"id {row % 900}")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert repeats.count() == 100
    assert "100 values of 'custom_id' among the first 1,000 repeat" in str(repeats.warning("custom_id"))
    assert peak < 100_000
