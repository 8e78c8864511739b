"""Every number format against the package of the format's authors, bit by bit, on random packed data."""

import gguf
import numpy as np
import pytest

from batchgen.models.gguf_quants import FORMATS, dequantize


@pytest.mark.parametrize("kind", FORMATS)
def test_dequantized_values_equal_ggml(kind):
    block, size, name = FORMATS[kind]
    theirs = gguf.GGMLQuantizationType(kind)
    assert (theirs.name, *gguf.GGML_QUANT_SIZES[theirs]) == (name, block, size)
    raw = np.random.default_rng(kind).integers(0, 256, (8, 300 * size), dtype=np.uint8)
    with np.errstate(invalid="ignore"):  # some of the random scales are infinite or NaN, as those of a bad file may be
        expected = gguf.dequantize(raw, theirs)
        got = dequantize(raw.reshape(-1), kind).reshape(8, -1)
    assert got.dtype == np.float32
    number = ~np.isnan(expected)
    assert number.mean() > 0.5
    assert np.array_equal(np.isnan(got), ~number)
    assert np.array_equal(got[number].view(np.uint32), expected[number].view(np.uint32))


def test_more_than_one_piece():
    block, size, _ = FORMATS[3]
    raw = np.random.default_rng(0).integers(0, 100, (1, (1 << 19) // block * size + 5 * size), dtype=np.uint8)
    expected = gguf.dequantize(raw, gguf.GGMLQuantizationType.Q4_1)[0]
    assert np.array_equal(dequantize(raw[0], 3), expected)
