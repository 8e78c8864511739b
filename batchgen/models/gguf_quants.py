"""The number formats of GGUF: blocks of small integers with scales, turned into float32 as ggml does, bit by bit."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_PIECE = 1 << 19  # values at a time: small enough to stay in the processor's cache
_SHIFTS_2 = np.array([0, 4], np.uint8)[:, None]
_SHIFTS_4 = np.array([0, 2, 4, 6], np.uint8)[:, None]


class Format(NamedTuple):
    """A number format: values per block, bytes per block, name."""

    block: int
    size: int
    name: str


FORMATS = {
    0: Format(1, 4, "F32"),
    1: Format(1, 2, "F16"),
    2: Format(32, 18, "Q4_0"),
    3: Format(32, 20, "Q4_1"),
    6: Format(32, 22, "Q5_0"),
    7: Format(32, 24, "Q5_1"),
    8: Format(32, 34, "Q8_0"),
    12: Format(256, 144, "Q4_K"),
    13: Format(256, 176, "Q5_K"),
    14: Format(256, 210, "Q6_K"),
    30: Format(1, 2, "BF16"),
}


def dequantize(raw: Array, kind: int) -> Array:
    """Turn the bytes of a tensor (uint8 `[n]`) of format number `kind` into float32 `[values]`."""
    format_ = FORMATS[kind]
    unpack = _UNPACK[kind]
    if (layout := _LAYOUTS.get(kind)) is None:
        plain: Array = unpack(raw)
        return plain
    blocks = raw.view(layout)
    result = np.empty((len(blocks), format_.block), np.float32)
    step = _PIECE // format_.block
    for start in range(0, len(blocks), step):
        unpack(blocks[start : start + step], result[start : start + step])
    return result.reshape(-1)


def _layout(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()))


_LAYOUTS = {
    2: _layout(d="<f2", q="16u1"),
    3: _layout(d="<f2", m="<f2", q="16u1"),
    6: _layout(d="<f2", high="<u4", q="16u1"),
    7: _layout(d="<f2", m="<f2", high="<u4", q="16u1"),
    8: _layout(d="<f2", q="32i1"),
    12: _layout(d="<f2", m="<f2", scales="12u1", q="128u1"),
    13: _layout(d="<f2", m="<f2", scales="12u1", high="32u1", q="128u1"),
    14: _layout(q="128u1", high="64u1", scales="16i1", d="<f2"),
}


def _f32(raw: Array) -> Array:
    return raw.view("<f4").astype(np.float32)


def _f16(raw: Array) -> Array:
    return raw.view("<f2").astype(np.float32)


def _bf16(raw: Array) -> Array:
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _scale(blocks: Array, field: str = "d") -> Array:
    return blocks[field].astype(np.float32)[:, None]


def _nibbles(blocks: Array) -> Array:
    """Low halves of 16 bytes, then their high halves: uint8 `[n, 32]`."""
    return ((blocks["q"][:, None] >> _SHIFTS_2) & 15).reshape(len(blocks), 32)


def _fifth_bits(blocks: Array) -> Array:
    bits = np.unpackbits(blocks["high"].reshape(-1, 1).view(np.uint8), axis=-1, bitorder="little")
    return bits << np.uint8(4)


def _q4_0(blocks: Array, out: Array) -> None:
    np.multiply(_nibbles(blocks).view(np.int8) - np.int8(8), _scale(blocks), out=out)


def _q4_1(blocks: Array, out: Array) -> None:
    np.multiply(_nibbles(blocks), _scale(blocks), out=out)
    out += _scale(blocks, "m")


def _q5_0(blocks: Array, out: Array) -> None:
    values = (_nibbles(blocks) | _fifth_bits(blocks)).view(np.int8) - np.int8(16)
    np.multiply(values, _scale(blocks), out=out)


def _q5_1(blocks: Array, out: Array) -> None:
    np.multiply(_nibbles(blocks) | _fifth_bits(blocks), _scale(blocks), out=out)
    out += _scale(blocks, "m")


def _q8_0(blocks: Array, out: Array) -> None:
    np.multiply(blocks["q"], _scale(blocks), out=out)


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and offsets of 8 sub-blocks, six bits each in 12 bytes: float32 `[n, 8, 1]` twice."""
    low, offset, high = blocks["scales"].reshape(-1, 3, 4).transpose(1, 0, 2)
    scales = np.concatenate((low & 63, (high & 15) | ((low >> 2) & 48)), axis=1)
    offsets = np.concatenate((offset & 63, (high >> 4) | ((offset >> 2) & 48)), axis=1)
    return (_scale(blocks) * scales.astype(np.float32))[..., None], (_scale(blocks, "m") * offsets)[..., None]


def _k_nibbles(blocks: Array) -> Array:
    """Four runs of 32 bytes, each low halves first: uint8 `[n, 8, 32]`."""
    return ((blocks["q"].reshape(-1, 4, 1, 32) >> _SHIFTS_2) & 15).reshape(-1, 8, 32)


def _k_finish(blocks: Array, values: Array, out: Array) -> None:
    scales, offsets = _k_scales(blocks)
    result = out.reshape(-1, 8, 32)
    np.multiply(values, scales, out=result)
    result -= offsets


def _q4_k(blocks: Array, out: Array) -> None:
    _k_finish(blocks, _k_nibbles(blocks), out)


def _q5_k(blocks: Array, out: Array) -> None:
    high = (blocks["high"][:, None] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    _k_finish(blocks, _k_nibbles(blocks) | (high << np.uint8(4)), out)


def _q6_k(blocks: Array, out: Array) -> None:
    low = ((blocks["q"].reshape(-1, 2, 1, 64) >> _SHIFTS_2) & 15).reshape(-1, 8, 32)
    high = ((blocks["high"].reshape(-1, 2, 1, 32) >> _SHIFTS_4) & 3).reshape(-1, 8, 32)
    values = (low | (high << np.uint8(4))).view(np.int8) - np.int8(32)
    scales = _scale(blocks) * blocks["scales"].astype(np.float32)
    np.multiply(values.reshape(-1, 16, 16), scales[..., None], out=out.reshape(-1, 16, 16))


_UNPACK: dict[int, Callable[..., Any]] = {
    0: _f32,
    1: _f16,
    2: _q4_0,
    3: _q4_1,
    6: _q5_0,
    7: _q5_1,
    8: _q8_0,
    12: _q4_k,
    13: _q5_k,
    14: _q6_k,
    30: _bf16,
}
