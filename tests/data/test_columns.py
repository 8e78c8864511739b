"""Every part has the same columns, and whatever a row carries, it fits or is that row's error."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from batchgen.data.columns import Asked, output_columns, to_table
from batchgen.data.layout import PartRange
from batchgen.data.parts import DamagedPart, check_part_bytes, encode_part, read_part
from batchgen.data.rows import OutputRow
from batchgen.errors import JobFileError, RowError

NOTHING = pa.schema([])


def table_of(rows: list[OutputRow], carried: pa.Schema = NOTHING, **options: Any) -> pa.Table:
    columns = output_columns(carried, Asked(**options))
    table = to_table(columns, rows)
    table.validate(full=True)
    assert table.schema.equals(columns.schema)
    return table


def test_the_columns_and_their_order() -> None:
    carried = pa.schema([("id", pa.int64()), ("label", pa.string())])  # `label` is free as long as there are no choices
    assert output_columns(carried).schema.names == [
        *("row", "sample", "id", "label", "output", "status", "error", "finish_reason"),
        *("prompt_tokens", "cached_tokens", "output_tokens", "truncated_tokens"),
    ]
    asked = output_columns(pa.schema([]), Asked(logprobs=True, labels=("no", "yes"))).schema
    assert asked.names[-3:] == ["label", "label_probs", "margin"]
    assert asked.field("label_probs").type == pa.struct([("no", pa.float64()), ("yes", pa.float64())])


def test_a_carried_column_with_a_name_of_ours_is_named() -> None:
    carried = pa.schema([("status", pa.string()), ("id", pa.int64()), ("label", pa.string())])
    with pytest.raises(JobFileError, match=r"^output\.columns: .* the output has too: status\. Rename them"):
        output_columns(carried)
    with pytest.raises(JobFileError, match="status, label"):
        output_columns(carried, Asked(labels=("a", "b")))


@pytest.mark.parametrize(
    ("given_type", "stored"),
    [
        (pa.null(), pa.string()),
        (pa.list_(pa.null()), pa.list_(pa.string())),
        (pa.struct([("a", pa.null()), ("b", pa.int8())]), pa.struct([("a", pa.string()), ("b", pa.int8())])),
        (pa.dictionary(pa.int8(), pa.large_string()), pa.large_string()),
        (pa.string_view(), pa.string()),
        (pa.struct([]), pa.string()),
        (pa.list_(pa.struct([("a", pa.struct([]))])), pa.string()),
        (pa.map_(pa.string(), pa.null()), pa.map_(pa.string(), pa.string())),
        (pa.uuid(), pa.binary(16)),
        (pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC")),
        (pa.decimal128(10, 2), pa.decimal128(10, 2)),
    ],
    ids=str,
)
def test_A09_carried_types_are_plain_and_never_null(given_type: pa.DataType, stored: pa.DataType) -> None:
    assert output_columns(pa.schema([("x", given_type)])).carried.field("x").type == stored


def test_a_carried_value_that_does_not_fit_is_its_rows_error_alone() -> None:
    carried = pa.schema([("id", pa.int32()), ("meta", pa.struct([])), ("text", pa.string())])
    rows = [
        OutputRow(0, 0, "ok", output="a", carried={"id": 1, "meta": {}, "text": "é"}),
        OutputRow(1, 0, "ok", output="b", carried={"id": "no number", "meta": None, "text": None}),
        OutputRow(2, 0, "ok", output="c", carried={"id": 2**40, "meta": {}, "text": "\ud800"}),
        OutputRow(3, 0, "error", error=RowError("bad_json", "line 4"), carried={"id": [1], "text": b"raw"}),
        OutputRow(4, 0, "length", output="e"),
    ]
    table = to_table(output_columns(carried), rows)
    assert table["id"].to_pylist() == [1, None, None, None, None]
    assert table["meta"].to_pylist() == ["{}", None, "{}", None, None]
    assert table["text"].to_pylist() == ["é", None, None, "raw", None]
    assert table["status"].to_pylist() == ["ok", "error", "error", "error", "length"]
    assert table["output"].to_pylist() == ["a", "b", "c", None, "e"]
    errors = table["error"].to_pylist()
    assert [error and error["kind"] for error in errors] == [None, "bad_value", "bad_value", "bad_json", None]
    assert errors[1]["message"] == "column 'id': 'no number' is no int32; it was left out of the output"
    assert "column 'id'" in errors[2]["message"]
    assert "column 'text'" in errors[2]["message"]
    assert errors[3]["message"].startswith("line 4; column 'id'")


def test_text_is_always_valid_utf8() -> None:
    rows = [OutputRow(0, 0, "ok", output="a\ud800b \ud83d\ude00"), OutputRow(1, 0, "ok", output="\ufeffé\x00\r\n")]
    rows.append(OutputRow(2, 0, "error", error=RowError("bad_utf8", "got \udcff")))
    table = table_of(rows)
    assert table["output"].to_pylist() == ["a\ufffdb \U0001f600", "\ufeffé\x00\r\n", None]
    assert table["error"].to_pylist()[2] == {"kind": "bad_utf8", "message": "got \ufffd"}


def test_logprobs_and_labels() -> None:
    token = {"token_id": 5, "token": " a", "logprob": -0.5}
    rows = [
        OutputRow(0, 0, "ok", logprobs=[{**token, "top": [token]}], label="yes", label_probs={"yes": 0.75, "no": 0.25}),
        OutputRow(1, 0, "error", error=RowError("bad_json", "")),
    ]
    table = table_of(rows, logprobs=True, labels=("no", "yes"))
    assert table["logprobs"].to_pylist() == [[{**token, "top": [token]}], None]
    assert table["label_probs"].to_pylist() == [{"no": 0.25, "yes": 0.75}, None]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters(exclude_categories=[])),
    st.binary(max_size=4),
    st.dates(),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from("ab"), st.integers(), max_size=2),
)
TYPES = [
    pa.int8(),
    pa.float32(),
    pa.string(),
    pa.bool_(),
    pa.date32(),
    pa.list_(pa.int64()),
    pa.struct([("a", pa.int8())]),
]


@given(st.lists(VALUES, min_size=1, max_size=5), st.sampled_from(TYPES))
@example(["", {}], pa.struct([("a", pa.int8())]))
def test_no_carried_value_ends_the_job(values: list[Any], type_: pa.DataType) -> None:
    rows = [OutputRow(index, 0, "ok", output="x", carried={"x": value}) for index, value in enumerate(values)]
    table = table_of(rows, pa.schema([("x", type_)]))
    lost = table["x"].is_null().to_pylist()  # not to_pylist: Arrow has dates that Python's datetime has not
    for value, is_lost, status in zip(values, lost, table["status"].to_pylist(), strict=True):
        assert status == ("error" if is_lost and value is not None else "ok")


def make_part() -> tuple[bytes, Any, Any, PartRange]:
    columns = output_columns(pa.schema([("day", pa.date32())]))
    part = PartRange(0, 1, 0, 3, 1)
    rows = [OutputRow(i, 0, "ok", output="text" * i, carried={"day": datetime.date(2026, 1, 1)}) for i in range(3)]
    data, info = encode_part(part, to_table(columns, rows), job_id="j", version="0.1.0", compression="zstd")
    return data, info, columns, part


def test_a_part_knows_itself_and_every_changed_byte() -> None:
    data, info, columns, part = make_part()

    def read(start: int, stop: int) -> bytes:
        return data[start:stop]

    assert read_part(read, len(data), columns.schema, part, job_id="j") == info
    check_part_bytes(data, info)
    for place in range(0, info.data_bytes, 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(DamagedPart, match="xxhash differs"):
            check_part_bytes(bytes(changed), info)
    with pytest.raises(DamagedPart, match="belongs to another job"):
        read_part(read, len(data), columns.schema, part, job_id="k")


def test_D01_no_cut_of_a_part_passes_for_whole(tmp_path: Path) -> None:
    data, _, columns, part = make_part()
    for size in range(len(data)):
        cut = data[:size]
        with pytest.raises(DamagedPart):
            read_part(lambda start, stop, cut=cut: cut[start:stop], size, columns.schema, part, job_id="j")
