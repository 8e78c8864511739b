"""Parquet files: every text type, drifting schemas, damaged files, row groups."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.source import Source, open_source
from batchgen.errors import InputError
from batchgen.job.spec import Input

PROMPTS = ["plain", "naïve \U0001f600", None, "", "plain"]


def source_of(path: Path, table: pa.Table, columns: set[str] | None = None, **options: Any) -> Source:
    pq.write_table(table, path)
    return open_source(Input(path=path.name, **options), base=path.parent, columns=columns)


def open_folder(folder: Path, **options: Any) -> Source:
    return open_source(Input(path=str(folder)), base=folder, columns=None, **options)


@pytest.mark.parametrize(
    "dtype", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())], ids=str
)
def test_A09_every_text_type_is_read_as_text(tmp_path: Path, dtype: pa.DataType) -> None:
    array = (
        pa.array(PROMPTS).dictionary_encode().cast(dtype) if pa.types.is_dictionary(dtype) else pa.array(PROMPTS, dtype)
    )
    source = source_of(tmp_path / "a.parquet", pa.table({"prompt": array}))
    source.require(["prompt"])
    assert [row.values["prompt"] for row in source.rows()] == PROMPTS
    assert source.schema == pa.schema([("prompt", pa.string())])


def test_A09_each_row_group_may_have_its_own_dictionary(tmp_path: Path) -> None:
    schema = pa.schema([("prompt", pa.dictionary(pa.int32(), pa.string()))])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for texts in (["a", "b"], ["c", "a"]):
            writer.write_table(pa.table({"prompt": pa.array(texts).dictionary_encode()}, schema=schema))
    assert [row.values["prompt"] for row in open_folder(tmp_path).rows()] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("dtype", [pa.binary(), pa.large_binary(), pa.binary(5)], ids=str)
def test_A09_binary_is_decoded_on_request_and_refused_as_a_prompt_else(tmp_path: Path, dtype: pa.DataType) -> None:
    table = pa.table({"prompt": pa.array([b"plain", b"\xff\xfe\xfd\xfc\xfb", None], dtype)})
    source = source_of(tmp_path / "a.parquet", table)
    with pytest.raises(InputError, match=r"a\.parquet: column 'prompt' holds binary .*input\.decode_binary: true"):
        source.require(["prompt"])
    assert next(source.rows()).values["prompt"] == b"plain"
    decoded = source_of(tmp_path / "a.parquet", table, decode_binary=True)
    decoded.require(["prompt"])
    rows = list(decoded.rows())
    assert [row.values.get("prompt", "absent") for row in rows] == ["plain", "absent", None]
    assert rows[1].error is not None
    assert rows[1].error.kind == "bad_utf8"
    assert decoded.schema.field("prompt").type == pa.string()


def test_A09_nested_columns_are_objects_and_lists(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": "hi"}], None]
    table = pa.table({"input": [{"text": "deep one"}, {"text": "deep two"}], "messages": messages})
    source = source_of(tmp_path / "a.parquet", table)
    assert [row.values["input"]["text"] for row in source.rows()] == ["deep one", "deep two"]
    assert [row.values["messages"] for row in source.rows()] == messages
    assert source.schema.field("messages").type == pa.list_(
        pa.struct([("role", pa.string()), ("content", pa.string())])
    )


def test_A12_text_that_is_no_utf8_is_one_rows_error(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = [f"text {i}" for i in range(10)]
    pq.write_table(pa.table({"prompt": texts}), path, compression="none", use_dictionary=False, write_statistics=False)
    content = path.read_bytes()
    assert content.count(b"text 3") == 1
    path.write_bytes(content.replace(b"text 3", b"tex\xff 3"))
    rows = list(open_folder(tmp_path).rows())
    assert [row.index for row in rows if row.error is None] == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    error = rows[3].error
    assert error == ("bad_utf8", "a.parquet row 3: column 'prompt' holds bytes that are no UTF-8")


def test_A11_drifting_shards_agree_on_one_schema(tmp_path: Path) -> None:
    shards = [
        {"id": pa.array([0, 1], pa.int64()), "prompt": ["a0", "a1"], "n": pa.array([1, 2], pa.int32())},
        {"prompt": ["b0", "b1"], "id": pa.array([2, 3], pa.int32()), "n": pa.array([None, None], pa.null())},
        {"prompt": ["c0"], "id": ["four"], "n": pa.array([5], pa.int64()), "new": pa.array([1.5], pa.float32())},
        {"prompt": ["d0"], "n": pa.array([6], pa.int16())},
    ]
    for i, shard in enumerate(shards):
        pq.write_table(pa.table(shard), tmp_path / f"part-{i}.parquet")
    source = open_folder(tmp_path, carried=("id", "n", "new", "nowhere"))
    source.require(["prompt"])
    assert source.schema == pa.schema(
        [("id", pa.string()), ("n", pa.int64()), ("new", pa.float32()), ("nowhere", pa.string())]
    )
    carried = [source.carried(row.values) for row in source.rows()]
    assert [row["id"] for row in carried] == ["0", "1", "2", "3", "four", None]
    assert [row["n"] for row in carried] == [1, 2, None, None, 5, 6]
    assert [row.values["prompt"] for row in source.rows()] == ["a0", "a1", "b0", "b1", "c0", "d0"]
    assert pa.Table.from_pylist(carried, source.schema).num_rows == 6
    (warning,) = source.warnings
    assert "part-0.parquet" in warning
    assert "part-2.parquet: carried as text" in warning


def test_A11_a_missing_prompt_column_names_file_and_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["a"]}), tmp_path / "part-0.parquet")
    pq.write_table(pa.table({"id": [1], "text": ["a"]}), tmp_path / "part-1.parquet")
    source = open_folder(tmp_path)
    with pytest.raises(InputError, match=r"part-1\.parquet: no column 'prompt'; columns: id, text$"):
        source.require(["prompt"])


def test_A12_zero_rows_are_fine(tmp_path: Path) -> None:
    empty = pa.table({"prompt": pa.array([], pa.string())})
    pq.write_table(empty, tmp_path / "part-0.parquet")
    pq.write_table(pa.table({"prompt": ["one", "two"]}), tmp_path / "part-1.parquet")
    pq.ParquetWriter(tmp_path / "part-2.parquet", empty.schema).close()
    source = open_folder(tmp_path)
    assert [(row.index, row.values["prompt"]) for row in source.rows()] == [(0, "one"), (1, "two")]
    assert [file.num_rows for file in source.files] == [0, 2, 0]


def test_A12_all_damaged_files_are_named_at_once(tmp_path: Path) -> None:
    pq.write_table(pa.table({"prompt": ["one"]}), tmp_path / "good.parquet")
    whole = (tmp_path / "good.parquet").read_bytes()
    damaged = {
        "empty": b"",
        "cut": whole[:-20],
        "last-byte-gone": whole[:-1],
        "text": b"hello world, this is text",
        "tiny": b"PAR1",
        "bad-footer": whole[:-60] + b"\xff" * 52 + whole[-8:],
    }
    for name, content in damaged.items():
        (tmp_path / f"{name}.parquet").write_bytes(content)
    with pytest.raises(InputError) as caught:
        open_folder(tmp_path)
    for name in damaged:
        assert f"{tmp_path}/{name}.parquet: " in str(caught.value)
    assert "good.parquet" not in str(caught.value)


def test_A12_damage_in_the_data_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["some text " * 100]}), path)
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * 20 + content[24:])
    with pytest.raises(InputError, match=r"a\.parquet: damaged"):
        list(open_folder(tmp_path).rows())


def test_A12_a_value_out_of_range_is_one_rows_error(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "when": pa.array([0, 2**60], pa.timestamp("us"))})
    rows = list(source_of(tmp_path / "a.parquet", table).rows())
    assert [row.error.kind if row.error else None for row in rows] == [None, "bad_value"]


def test_only_wanted_columns_are_read(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "id": [7], "big": ["x"]})
    source = source_of(tmp_path / "a.parquet", table, columns={"prompt", "absent"})
    assert [dict(row.values) for row in source.rows()] == [{"prompt": "a"}]
    assert source.columns == ("prompt", "id", "big")
    nothing = source_of(tmp_path / "a.parquet", table, columns=set())
    assert [dict(row.values) for row in nothing.rows()] == [{}]


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(InputError, match="two columns have the name 'prompt'"):
        source_of(tmp_path / "a.parquet", table)


def test_reading_starts_at_the_row_group_of_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for shard in range(2):
        table = pa.table({"n": range(shard * 5000, shard * 5000 + 5000)})
        pq.write_table(table, tmp_path / f"{shard}.parquet", row_group_size=1500)
    source = open_folder(tmp_path)
    groups: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def noting(self: pq.ParquetFile, *args: Any, **kwargs: Any) -> Any:
        groups.extend(kwargs["row_groups"])
        return iter_batches(self, *args, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    for start, stop in ((0, 2), (1499, 1501), (4999, 5001), (9998, None), (10_000, None), (2000, 2000)):
        expected = range(start, 10_000 if stop is None else stop)
        assert [(row.index, row.values["n"]) for row in source.rows(start, stop)] == [(n, n) for n in expected]
    assert groups == [0, 0, 1, 3, 0, 3]


def test_large_rows_come_in_small_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def noting(self: pq.ParquetFile, batch_size: int, **kwargs: Any) -> Any:
        sizes.append(batch_size)
        return iter_batches(self, batch_size, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", noting)
    texts = [f"{i}" + "x" * 2**20 for i in range(20)]
    source = source_of(tmp_path / "a.parquet", pa.table({"prompt": texts, "id": range(20)}))
    assert [row.values["prompt"] for row in source.rows()] == texts
    assert sizes[0] <= 8


def test_fingerprints_follow_the_content(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    first = source_of(path, pa.table({"prompt": ["a", "b"]})).files[0].fingerprint
    assert source_of(path, pa.table({"prompt": ["a", "b"]})).files[0].fingerprint == first
    assert source_of(path, pa.table({"prompt": ["a", "c"]})).files[0].fingerprint != first
