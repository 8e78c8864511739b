"""Reader of GGUF files: the header by struct, the tensors as views of the memory-mapped file. numpy only."""

import math
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from batchgen.errors import JobFileError
from batchgen.models.gguf_quants import FORMATS, Array, dequantize

_ALIGNMENT = 32
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")


class GGUFTensor(NamedTuple):
    """Where a tensor lies: `shape` in row-major order, `kind` the number of its format, `start` its first byte."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int

    @property
    def num_values(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        block, size, _ = FORMATS[self.kind]
        return self.num_values // block * size


class GGUFFile:
    """An open GGUF file: `metadata` by key, `tensors` by name. Raises JobFileError if damaged or unsupported."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise JobFileError(f"{self.path} can't be read: {error}") from error
        header = _Header(self._data)
        try:
            self.metadata, self.tensors = header.read()
        except _NotSupported as error:
            raise JobFileError(f"{self.path}: {error}") from error
        except (struct.error, ValueError, LookupError, ArithmeticError, MemoryError, RecursionError) as error:
            raise JobFileError(f"{self.path} is damaged: its header can't be read; download it again") from error
        self._check_tensors()

    def __enter__(self) -> "GGUFFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file. Arrays of `raw` must be gone by then."""
        self._data.close()

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor, as a uint8 view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.start)

    def read(self, name: str) -> Array:
        """Return a tensor as float32, in row-major shape `[outputs, inputs]`."""
        tensor = self.tensors[name]
        return dequantize(self.raw(name), tensor.kind).reshape(tensor.shape)

    @property
    def architecture(self) -> str:
        """The name before the first dot of the model's own keys."""
        return str(self.metadata.get("general.architecture"))

    def setting(self, key: str, default: Any = None) -> Any:
        """Return the value of `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def _check_tensors(self) -> None:
        for tensor in self.tensors.values():
            if tensor.kind not in FORMATS:
                supported = ", ".join(format_.name for format_ in FORMATS.values())
                raise JobFileError(
                    f"{self.path}: tensor {tensor.name} has format number {tensor.kind}, which is not supported; "
                    f"supported: {supported}"
                )
            block = FORMATS[tensor.kind].block
            if not tensor.shape or tensor.shape[-1] % block:
                raise JobFileError(
                    f"{self.path}: tensor {tensor.name} of shape {list(tensor.shape)} is no multiple of {block} wide"
                )
            if tensor.start + tensor.num_bytes > len(self._data):
                raise JobFileError(
                    f"{self.path} is cut off: tensor {tensor.name} ends at byte {tensor.start + tensor.num_bytes}, "
                    f"the file at {len(self._data)}; download it again"
                )


class _NotSupported(Exception):  # noqa: N818 - a sentence for the error above
    pass


class _Header:
    """A cursor over the bytes of a header."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        if self._data[:4] != b"GGUF":
            raise _NotSupported("this is no GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise _NotSupported(f"GGUF version {version} is not supported; supported: 2 and 3, little-endian")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        metadata = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        align = metadata.get("general.alignment", _ALIGNMENT)
        base = -(-self._at // align) * align
        return metadata, {tensor.name: tensor._replace(start=tensor.start + base) for tensor in found}

    def _tensor(self) -> GGUFTensor:
        name = self._string()
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        return GGUFTensor(name, shape, self._scalar("I"), self._scalar("Q"))

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, unpack = self._data, self._at, _LENGTH.unpack_from
        result = []
        for _ in range(count):
            (length,) = unpack(data, at)
            at += 8
            if at + length > len(data):
                raise IndexError
            result.append(data[at : at + length].decode())
            at += length
        self._at = at
        return result

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item, count = self._scalar("I"), self._scalar("Q")
        if item == _STRING:
            return self._strings(count)
        if item == _ARRAY:
            return [self._value(item) for _ in range(count)]
        values = struct.unpack_from(f"<{count}{_SCALARS[item]}", self._data, self._at)
        self._at += struct.calcsize(f"<{count}{_SCALARS[item]}")
        return list(values)


def content_fingerprint(path: Path) -> str:
    """Return a hash of a file's size and content; above 256 MiB, of its start and of 128 blocks of the rest."""
    import xxhash

    size, block = os.path.getsize(path), 1 << 20
    digest = xxhash.xxh3_128(str(size).encode())
    with open(path, "rb") as file:
        starts = range(0, size, block)
        if len(starts) > 256:
            starts = range(0, size, max(block, size // 128))
            digest.update(file.read(16 * block))
        for start in starts:
            file.seek(start)
            digest.update(file.read(block))
    return digest.hexdigest()
