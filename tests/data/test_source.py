"""Which files an input names, and what a source tells about all of them."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data import storage
from batchgen.data.source import Source, open_source
from batchgen.errors import InputError
from batchgen.job.spec import Input


def write_jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def open_at(base: Path, path: str | list[str], *, columns: Any = None, carried: Any = None, **options: Any) -> Source:
    return open_source(Input(path=path, **options), base=base, columns=columns, carried=carried)


def values(source: Source) -> list[dict[str, Any]]:
    return [dict(row.values) for row in source.rows()]


@pytest.fixture
def hive(tmp_path: Path) -> Path:
    """A folder as Spark leaves it: partitions, markers, half-written files."""
    shards = {
        "lang=__HIVE_DEFAULT_PARTITION__/day=2024-01-03": ["no language"],
        "lang=de/day=2024-01-02": ["hallo"],
        "lang=en/day=2024-01-01": ["hello", "bye"],
    }
    for folder, prompts in shards.items():
        (tmp_path / "hive" / folder).mkdir(parents=True)
        pq.write_table(pa.table({"prompt": prompts}), tmp_path / "hive" / folder / "part-0.parquet")
    rubbish = ["_SUCCESS", "_metadata", "README.md", "_temporary/0/part-9.parquet", ".ipynb_checkpoints/part-0.parquet"]
    rubbish += ["lang=en/day=2024-01-01/.part-0.parquet.crc", "lang=en/day=2024-01-01/part-1.parquet.tmp"]
    for name in rubbish:
        (tmp_path / "hive" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "hive" / name).write_text("rubbish")
    return tmp_path / "hive"


HIVE_ROWS = [
    {"prompt": "no language", "lang": None, "day": "2024-01-03"},
    {"prompt": "hallo", "lang": "de", "day": "2024-01-02"},
    {"prompt": "hello", "lang": "en", "day": "2024-01-01"},
    {"prompt": "bye", "lang": "en", "day": "2024-01-01"},
]


@pytest.mark.parametrize(
    "path",
    [
        "hive",
        "hive/",
        "hive/lang=*",
        "hive/**/*.parquet",
        ["hive/lang=de/day=2024-01-02/part-0.parquet", "hive", "hive"],
    ],
    ids=str,
)
def test_A13_hive_folders_give_columns_and_each_file_once(hive: Path, path: Any) -> None:
    source = open_at(hive.parent, path)
    assert values(source) == HIVE_ROWS
    assert [row.index for row in source.rows()] == [0, 1, 2, 3]
    assert source.columns == ("prompt", "lang", "day")
    assert source.schema == pa.schema([(name, pa.string()) for name in source.columns])


def test_A13_partition_columns_are_pruned_like_others(hive: Path) -> None:
    assert values(open_at(hive, ".", columns={"lang"})) == [{"lang": row["lang"]} for row in HIVE_ROWS]


def test_A13_a_column_in_path_and_file_must_agree(tmp_path: Path) -> None:
    for folder, lang in (("good", "en"), ("bad", "fr")):
        (tmp_path / folder / "lang=en").mkdir(parents=True)
        pq.write_table(pa.table({"prompt": ["a"], "lang": [lang]}), tmp_path / folder / "lang=en/a.parquet")
        write_jsonl(tmp_path / f"{folder}-jsonl/lang=en/a.jsonl", {"prompt": "a", "lang": lang})
    for good in ("good", "good-jsonl"):
        assert values(open_at(tmp_path, good)) == [{"prompt": "a", "lang": "en"}]
        assert open_at(tmp_path, good).schema.names == ["prompt", "lang"]
    with pytest.raises(InputError, match=r"bad/lang=en/a\.parquet: column 'lang' is 'fr' in the file and 'en' in its"):
        open_at(tmp_path, "bad")
    with pytest.raises(InputError, match=r"a\.jsonl line 1: column 'lang' is 'fr' in the file and 'en' in its path"):
        _ = open_at(tmp_path, "bad-jsonl", columns={"prompt", "lang"}, carried=()).num_rows


def test_all_wrong_paths_come_in_one_message(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "zero.parquet").touch()
    with pytest.raises(InputError) as caught:
        open_at(tmp_path, ["missing.jsonl", "*.csv", "empty", "zero.parquet", "nope://x"])
    message = str(caught.value)
    assert message.startswith("5 problems with the input:\n")
    assert f"- {tmp_path}/missing.jsonl: no such file or folder" in message
    assert f"- {tmp_path}/*.csv: no file matches this pattern" in message
    assert f"- {tmp_path}/empty: no data file in this folder" in message
    assert f"- {tmp_path}/zero.parquet: empty (0 bytes)" in message
    assert "- nope://x: Protocol not known" in message


def test_formats_go_by_name_and_are_not_mixed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"prompt": "a"})
    (tmp_path / "b.csv").write_text("prompt\nb\n")
    (tmp_path / "c.data").write_text('{"prompt": "c"}\n')
    with pytest.raises(InputError, match=r"files of several formats: .*a\.jsonl \(jsonl\), .*b\.csv \(csv\)"):
        open_at(tmp_path, ".")
    with pytest.raises(InputError, match=r"c\.data: the name does not tell the format. Set input\.format"):
        open_at(tmp_path, "c.data")
    assert values(open_at(tmp_path, ".", format="csv")) == [{"prompt": "b"}]
    assert values(open_at(tmp_path, ["c.data", "a.jsonl"], format="jsonl")) == [{"prompt": "a"}, {"prompt": "c"}]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a[1].jsonl", {"prompt": "bracket"})
    write_jsonl(tmp_path / "a1.jsonl", {"prompt": "one"})
    assert values(open_at(tmp_path, "a[1].jsonl")) == [{"prompt": "bracket"}]


def test_files_are_sorted_and_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    for name in ("b/x", "a/y", "a/x"):
        write_jsonl(tmp_path / f"{name}.jsonl", {"name": name})
    source = open_at(tmp_path, ["b", "a"])
    assert [(row.values["name"], row.place) for row in source.rows()] == [
        ("a/x", "a/x.jsonl line 1"),
        ("a/y", "a/y.jsonl line 1"),
        ("b/x", "b/x.jsonl line 1"),
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_urls_work_like_paths(tmp_path: Path, name: str) -> None:
    local = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(pa.table({"prompt": ["a", "b"]}), local)
    else:
        local.write_text("prompt\na\nb\n" if name.endswith("csv") else '{"prompt": "a"}\n{"prompt": "b"}\n')
    fs, folder = storage.filesystem(f"memory://urls-{name}/lang=en")
    storage.write_bytes(fs, f"{folder}/{name}", local.read_bytes())
    url = f"memory://urls-{name}"
    for path in (url, f"{url}/*/*"):
        source = open_at(tmp_path, path, format="auto")
        assert values(source) == [{"prompt": "a", "lang": "en"}, {"prompt": "b", "lang": "en"}]
        (file,) = source.files
        assert (file.num_rows, file.path.endswith(f"urls-{name}/lang=en/{name}")) == (2, True)
        assert [row.values["prompt"] for row in source.rows(1)] == ["b"]
    with pytest.raises(InputError, match="memory://urls-missing: no such file or folder"):
        open_at(tmp_path, "memory://urls-missing")


def test_D06_listings_are_fresh_and_denied_reads_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs = fsspec.filesystem("memory")
    for name in ("a", "b"):
        fs.pipe_file(f"/denied/{name}.jsonl", b'{"prompt": "x"}\n')
    source = open_at(tmp_path, "memory://denied")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(fs, "open", refuse)
    with pytest.raises(InputError, match=r"(?s)2 problems.*denied/a\.jsonl: no permission.*denied/b\.jsonl: no perm"):
        _ = source.num_rows


def test_unreadable_files_are_named_with_the_other_wrong_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b", "c"):
        write_jsonl(tmp_path / f"{name}.jsonl", {"prompt": "x"})
    monkeypatch.setattr("os.access", lambda path, mode: "/b.jsonl" not in path)
    with pytest.raises(InputError, match=r"(?s)2 problems.*missing\.jsonl: no such.*/b\.jsonl: no permission to read"):
        open_at(tmp_path, [".", "missing.jsonl"])


def test_require_names_every_missing_column(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"prompt": "x"})
    with pytest.raises(InputError, match=r"(?s)2 problems.*no row has a column 'one'.*no row has a column 'two'"):
        open_at(tmp_path, "a.jsonl").require(["one", "prompt", "two"])


def test_the_schema_has_one_order_whatever_the_set(tmp_path: Path) -> None:
    names = [f"column{i}" for i in range(20)]
    write_jsonl(tmp_path / "a.jsonl", dict.fromkeys(names, 1))
    assert open_at(tmp_path, "a.jsonl", columns=set(names)).schema.names == sorted(names)
    assert open_at(tmp_path, "a.jsonl", columns=set(names), carried=names[::-1]).schema.names == names[::-1]


def test_limit_takes_the_first_rows_and_leaves_the_rest_alone(tmp_path: Path) -> None:
    for shard in range(3):
        write_jsonl(tmp_path / f"{shard}.jsonl", *({"n": shard * 10 + i} for i in range(10)))
    source = open_at(tmp_path, ".", limit=13)
    assert [row.values["n"] for row in source.rows()] == list(range(13))
    assert source.num_rows == 13
    assert [file.num_rows for file in source.files] == [10, 3]
    assert [row.values["n"] for row in source.rows(11, 99)] == [11, 12]
    before = source.files
    write_jsonl(tmp_path / "1.jsonl", *({"n": n} for n in [10, 11, 12, 99]))
    assert [f.fingerprint for f in open_at(tmp_path, ".", limit=13).files] == [f.fingerprint for f in before]
    write_jsonl(tmp_path / "1.jsonl", *({"n": n} for n in [10, 11, 77, 99]))
    assert open_at(tmp_path, ".", limit=13).files[1].fingerprint != before[1].fingerprint


def test_a_file_that_changes_is_found(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", *({"n": n} for n in range(10)))
    source = open_at(tmp_path, "a.jsonl")
    assert source.num_rows == 10
    first = source.files[0].fingerprint
    write_jsonl(tmp_path / "a.jsonl", *({"n": n} for n in range(9)))
    with pytest.raises(InputError, match=r"a\.jsonl: fewer rows than before"):
        list(source.rows())
    grown = open_at(tmp_path, "a.jsonl")
    write_jsonl(tmp_path / "a.jsonl", *({"n": n} for n in range(11)))
    with pytest.raises(InputError, match=r"bytes read where .* were listed: the file changed"):
        _ = grown.num_rows
    assert open_at(tmp_path, "a.jsonl").files[0].fingerprint != first


def test_a_column_of_late_rows_is_found_before_saying_no(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", *({"n": n} for n in range(500)), {"late": 1}, {"n": 1})
    source = open_at(tmp_path, "a.jsonl", columns={"n"})
    assert source.columns == ("n",)
    assert source.has_column("n")
    assert source.has_column("late")
    assert not source.has_column("nmae")
    with pytest.raises(InputError, match="no row has a column 'nmae'; columns: n"):
        source.require(["n", "nmae"])
    assert not open_at(tmp_path, "a.jsonl", limit=500).has_column("late")


def test_an_input_of_bad_rows_only_lacks_no_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("null\n{\n")
    assert open_at(tmp_path, "a.jsonl").has_column("prompt")


def test_types_of_carried_columns_in_text_formats(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"int": 1, "wide": 2**60, "number": 1, "mixed": "job-1", "flag": True, "null": None, "nested": [{"a": "ä"}]},
        {"int": -5, "wide": 1, "number": 2.5, "mixed": 1, "flag": None, "null": None, "nested": {}, "huge": 2**70},
        {"mixed": None, "exact": 2**60},
        {"mixed": "1", "exact": 0.5},
        {"flagged": True, "n": 1},
        {"flagged": 1, "n": True},
    ]
    write_jsonl(tmp_path / "a.jsonl", *rows)
    source = open_at(tmp_path, "a.jsonl")
    types = {field.name: str(field.type) for field in source.schema}
    texts = dict.fromkeys(("mixed", "null", "nested", "huge", "exact", "flagged"), "string")
    assert types == texts | {"int": "int64", "wide": "int64", "number": "double", "flag": "bool", "n": "string"}
    carried = [source.carried(row.values) for row in source.rows()]
    assert [row["mixed"] for row in carried] == ["job-1", "1", None, "1", None, None]
    assert [row["nested"] for row in carried[:2]] == ['[{"a": "ä"}]', "{}"]
    assert [row["huge"] for row in carried[:2]] == [None, str(2**70)]
    assert [row["exact"] for row in carried[2:4]] == [str(2**60), "0.5"]
    table = pa.Table.from_pylist(carried, source.schema)
    assert table.column("number").to_pylist()[:2] == [1.0, 2.5]
    assert not any(pa.types.is_null(field.type) for field in table.schema)
    assert [warning.split(":")[0] for warning in source.warnings] == [
        "column 'mixed' holds values of several types (integer, text)",
        "column 'nested' holds values of several types (list, object)",
        "column 'exact' holds values of several types (integer, number)",
        "column 'flagged' holds values of several types (integer, true/false)",
        "column 'n' holds values of several types (integer, true/false)",
    ]


def test_A16_ids_that_repeat_are_carried_and_never_keys(tmp_path: Path) -> None:
    ids = ["job-1", "job-2", "job-1", "job-3", 1, "1", None, "job-9"]
    write_jsonl(tmp_path / "a.jsonl", *({"id": value, "prompt": "x"} for value in ids))
    source = open_at(tmp_path, "a.jsonl", columns={"prompt"}, carried=["id"])
    rows = list(source.rows())
    assert [row.index for row in rows] == list(range(8))
    assert [row.values["id"] for row in rows] == ids
    assert [source.carried(row.values)["id"] for row in rows] == [
        "job-1",
        "job-2",
        "job-1",
        "job-3",
        "1",
        "1",
        None,
        "job-9",
    ]


def test_rows_are_only_parsed_for_types_when_something_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_jsonl(tmp_path / "a.jsonl", *({"prompt": "x"} for _ in range(50)))
    parsed = 0

    def counting(self: Any, row: Any) -> dict[str, Any]:
        nonlocal parsed
        parsed += 1
        return {"prompt": "x"}

    monkeypatch.setattr("batchgen.data.jsonl.JsonlReader._parse", counting)
    assert open_at(tmp_path, "a.jsonl", columns={"prompt"}, carried=()).num_rows == 50
    assert parsed == 0
    assert open_at(tmp_path, "a.jsonl", columns={"prompt"}, carried=("prompt",)).num_rows == 50
    assert parsed == 50


def test_data_sets_are_streamed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "reviews/train.jsonl", *({"text": f"review {i}", "stars": i} for i in range(7)))
    source = open_at(tmp_path, "reviews", format="datasets", columns={"text"}, carried=("stars",), limit=5)
    source.require(["text"])
    assert source.num_rows == 5
    assert [row.values["text"] for row in source.rows(3)] == ["review 3", "review 4"]
    assert [row.index for row in source.rows(3)] == [3, 4]
    assert source.schema == pa.schema([("stars", pa.int64())])
    assert not source.has_column("label")
    assert values(open_at(tmp_path, "reviews", format="datasets", columns=())) == [{}] * 7
    with pytest.raises(InputError, match=r"data set reviews\[test\] can't be loaded: .*input\.split"):
        open_at(tmp_path, "reviews", format="datasets", split="test")
    with pytest.raises(InputError, match=r"data set nobody/nothing\[train\] can't be loaded"):
        open_at(tmp_path, "nobody/nothing", format="datasets")
