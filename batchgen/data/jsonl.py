"""JSON lines: each line decoded and parsed alone, so that a broken one is only its own row's error."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from batchgen.data.lines import BLANKS, ByteStream, TextRow, read_lines
from batchgen.data.text import TextReader
from batchgen.errors import RowError

MAX_DEPTH = 200
_decode = json.JSONDecoder().decode
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_KINDS = {list: "a list", str: "a text", int: "a number", float: "a number", bool: "true or false", type(None): "null"}


class JsonlReader(TextReader):
    """Every line that is not blank is a row, and its keys are the columns. Of equal keys the last one wins."""

    def _rows(self, stream: ByteStream, number: int, offset: int) -> Iterator[TextRow]:
        for line in read_lines(stream, self._max_line_bytes, number=number, offset=offset):
            if line.content is None or line.content.strip(BLANKS):
                yield line

    def _parse(self, row: TextRow) -> Mapping[str, Any] | RowError:
        if row.content is None:
            return line_too_long(row, self._max_line_bytes)
        try:
            text = row.content.decode("utf-8")
        except UnicodeDecodeError as error:
            return RowError("bad_utf8", f"byte {error.start} of the line is no UTF-8 ({error.reason})")
        try:
            value = _decode(text)
        except RecursionError:
            return _too_deep()
        except ValueError as error:
            return RowError("bad_json", f"not JSON: {error}")
        if not isinstance(value, dict):
            return RowError("not_an_object", f"{_KINDS[type(value)]} where an object with the row's columns belongs")
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
            return _too_deep()
        if "\\u" in text and _SURROGATE.search(text) and not _is_unicode(value):
            return RowError("bad_utf8", "an escape stands for half a character (a lone surrogate), which is no text")
        return value


def line_too_long(row: TextRow, max_line_bytes: int) -> RowError:
    """The error of a line that was not held."""
    size = row.end - row.offset
    return RowError("line_too_long", f"{size:,} bytes in one line; the limit is input.max_line_bytes: {max_line_bytes}")


def _too_deep() -> RowError:
    return RowError("bad_json", f"lists and objects nested more than {MAX_DEPTH} deep")


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        nested = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in nested for item in items if isinstance(item, (dict, list))]
        if not level:
            return False
    return True


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
