"""OpenAI batch request files: JSON lines whose `body` holds the messages and the parameters of one request."""

from collections.abc import Mapping
from typing import Any

from batchgen.data.jsonl import JsonlReader
from batchgen.data.lines import TextRow
from batchgen.errors import RowError

_URLS = ("/v1/chat/completions", "/v1/completions")


class OpenaiReader(JsonlReader):
    """Columns are `custom_id` and the fields of `body`: `messages` (or `prompt`), `tools`, `max_tokens` and so on."""

    def _parse(self, row: TextRow) -> Mapping[str, Any] | RowError:
        line = super()._parse(row)
        if isinstance(line, RowError):
            return line
        body = line.get("body")
        if not isinstance(body, dict):
            return RowError("bad_request", "no `body` object: a batch request has custom_id, method, url and body")
        if line.get("url", _URLS[0]) not in _URLS:
            return RowError("bad_request", f"url {line['url']!r}: only {' and '.join(_URLS)} can be answered")
        return {**body, "custom_id": line.get("custom_id")}
