"""The rule by which types of carried columns are unified, and values made to fit."""

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from batchgen.data.schema import fit, normal_type, unify

STRUCT_A = pa.struct([("a", pa.int32())])


@pytest.mark.parametrize(
    ("types", "unified"),
    [
        ([pa.int8()], pa.int8()),
        ([pa.int32(), pa.int64()], pa.int64()),
        ([pa.uint32(), pa.int8()], pa.int64()),
        ([pa.uint64(), pa.int64()], pa.string()),
        ([pa.int64(), pa.float32()], pa.float64()),
        ([pa.decimal128(5, 2), pa.float64()], pa.float64()),
        ([pa.int64(), pa.string()], pa.string()),
        ([pa.bool_(), pa.int64()], pa.string()),
        ([pa.null()], pa.string()),
        ([pa.null(), pa.int8(), pa.null()], pa.int8()),
        ([pa.string(), pa.large_string(), pa.string_view()], pa.string()),
        ([pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.large_string())], pa.string()),
        ([pa.timestamp("s"), pa.timestamp("us")], pa.timestamp("us")),
        ([pa.date32(), pa.timestamp("us")], pa.string()),
        ([pa.list_(pa.null()), pa.large_list(pa.int64())], pa.list_(pa.int64())),
        ([STRUCT_A, pa.struct([("b", pa.string())])], pa.struct([("a", pa.int32()), ("b", pa.string())])),
        ([STRUCT_A, pa.struct([("a", pa.string())])], pa.string()),
    ],
    ids=str,
)
def test_A11_unified_types(types: list[pa.DataType], unified: pa.DataType) -> None:
    assert unify(types) == unified


def test_types_become_plain_at_any_depth() -> None:
    deep = pa.struct([("x", pa.large_list(pa.struct([("y", pa.string_view()), ("z", pa.null())])))])
    plain = pa.struct([("x", pa.list_(pa.struct([("y", pa.string()), ("z", pa.string())])))])
    assert normal_type(deep) == plain
    assert normal_type(pa.map_(pa.large_string(), pa.binary_view())) == pa.map_(pa.string(), pa.binary())


@pytest.mark.parametrize(
    ("value", "dtype", "fitted"),
    [
        (None, pa.string(), None),
        ("text", pa.string(), "text"),
        (1, pa.string(), "1"),
        (True, pa.string(), "true"),
        ({"a": ["ä", 1.5, None]}, pa.string(), '{"a": ["ä", 1.5, null]}'),
        (Decimal("1.50"), pa.string(), "1.50"),
        (datetime.date(2024, 1, 2), pa.string(), "2024-01-02"),
        (b"ab\xff", pa.string(), "ab\\xff"),
        (1, pa.float64(), 1.0),
        (Decimal("1.5"), pa.float64(), 1.5),
        ([1], pa.list_(pa.int64()), [1]),
    ],
    ids=str,
)
def test_values_fit_their_column(value: Any, dtype: pa.DataType, fitted: Any) -> None:
    result = fit(value, dtype)
    assert (result, type(result)) == (fitted, type(fitted))
    assert pa.array([result], dtype).to_pylist() == [fitted]
