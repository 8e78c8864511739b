"""Physical lines of a byte stream, split on byte 0x0A and nothing else, in constant memory."""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
CHUNK_BYTES = 1 << 20


class ByteStream(Protocol):
    """What lines are read from. `read` returns fewer bytes than asked only at the end."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, none at the end."""


class TextRow(NamedTuple):
    """A piece of a text file: a line, or the row made of one or several. The first line has number 1.

    `offset` and `end` are bytes of the (decompressed) file, `end` behind the newline. A line's `content` are its bytes
    without the newline, or None when it is too long to be held.
    """

    number: int
    offset: int
    end: int
    content: Any


class _Unfinished:
    """The start of a line whose newline is not read yet: held whole, or only measured once it is too long."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self._pieces: list[bytes] = []
        self._blank = True

    def add(self, piece: bytes) -> None:
        """Appends to the line."""
        self.size += len(piece)
        self._blank = self._blank and not piece.strip(BLANKS)
        if self.size <= self._max_bytes:
            self._pieces.append(piece)
        else:
            self._pieces.clear()

    def take(self) -> bytes | None:
        """The whole line (empty for blanks of any length, None when it is too long); the next one starts."""
        too_long = self.size > self._max_bytes
        content = None if too_long and not self._blank else b"".join(self._pieces)
        self._clear()
        return content


def read_lines(
    stream: ByteStream, max_bytes: int, *, number: int = 1, offset: int = 0, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[TextRow]:
    """All lines of a stream that stands at byte `offset`, the start of line `number`.

    A byte order mark is dropped at the start of the file and nowhere else. A line longer than `max_bytes` is never
    held whole.
    """
    head = b"" if offset else stream.read(len(BOM))
    if head == BOM:
        head, offset = b"", len(BOM)
    rest = _Unfinished(max_bytes)
    while chunk := head + stream.read(chunk_bytes):
        head = b""
        *lines, tail = chunk.split(b"\n")
        for piece in lines:
            size = len(piece)
            content: bytes | None = piece
            if rest.size or size > max_bytes:
                rest.add(piece)
                size, content = rest.size, rest.take()
            end = offset + size + 1
            yield TextRow(number, offset, end, content)
            number, offset = number + 1, end
        if tail:
            rest.add(tail)
    if rest.size:
        yield TextRow(number, offset, offset + rest.size, rest.take())
