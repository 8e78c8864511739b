"""Output rows as the lines of an OpenAI batch output, one for each input row with all its samples, and back.

What that form has no place for lies under `batchgen`: nothing of a row is lost.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from batchgen.data.manifest import Manifest
from batchgen.data.rows import FAILED

CUSTOM_ID = "custom_id"
REASONING = "reasoning_content"
_SERVER_FAULTS = ("non_finite", "out_of_memory")
_IN_CHAT = ("logprobs", "reasoning")  # what a choice of a chat has a place for
_REPLACEMENT = "\ufffd"


class OpenaiLines:
    """Makes the lines of one job, and reads them."""

    def __init__(self, manifest: Manifest) -> None:
        self._is_chat = manifest.part_format == "openai_chat"
        self._job = manifest.job_id[:12]
        self._model = manifest.model.name
        self._created = int(datetime.fromisoformat(manifest.created).timestamp())

    def line(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The line of an input row: `samples` are its output rows, in order."""
        first, carried = samples[0], _carried_names(samples[0])
        name = f"{self._job}-{first['row']}"
        error = next((row["error"] for row in samples if row["status"] in (*FAILED, "skipped")), None)
        error = error and {"code": error["kind"], "message": error["message"]}
        answered = [row for row in samples if row["output"] is not None]
        status = 200 if answered else 500 if error and error["code"] in _SERVER_FAULTS else 400
        return {
            "id": f"batch_req_{name}",
            CUSTOM_ID: _custom_id(first),
            "response": {
                "status_code": status,
                "request_id": f"req_{name}",
                "body": self._answer(name, answered) if answered else _refusal(error),
            },
            "error": error,
            "batchgen": {
                "row": first["row"],
                "columns": {column: first[column] for column in carried},
                "samples": [self._rest(row, carried) for row in samples],
            },
        }

    def rows(self, line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The output rows of a line."""
        choices = {choice["index"]: choice for choice in line["response"]["body"].get("choices", ())}
        ours = line["batchgen"]
        for sample in ours["samples"]:
            row = {"row": ours["row"], **ours["columns"], **sample}
            choice = choices.get(sample["sample"])
            if choice is None:
                yield row
            elif self._is_chat:
                message, tokens = choice["message"], (choice["logprobs"] or {}).get("content")
                row |= {"output": message["content"], "reasoning": message.get(REASONING)}
                yield row | {"logprobs": tokens if tokens is None else _ours(tokens)}
            else:
                yield row | {"output": choice["text"]}

    def _answer(self, name: str, answered: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        prompt_tokens, output_tokens = answered[0]["prompt_tokens"], sum(row["output_tokens"] for row in answered)
        return {
            "id": f"chatcmpl-{name}" if self._is_chat else f"cmpl-{name}",
            "object": "chat.completion" if self._is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(row) for row in answered],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": output_tokens,
                "total_tokens": prompt_tokens + output_tokens,
                "prompt_tokens_details": {"cached_tokens": answered[0]["cached_tokens"]},
                "completion_tokens_details": {"reasoning_tokens": sum(map(_reasoning_tokens, answered))},
            },
        }

    def _choice(self, row: Mapping[str, Any]) -> dict[str, Any]:
        tokens = row.get("logprobs")
        why = "length" if row["finish_reason"] == "length" else "stop"
        if self._is_chat:
            message = {"role": "assistant", "content": row["output"], "refusal": None}
            message |= {REASONING: row["reasoning"]} if "reasoning" in row else {}
            logprobs = None if tokens is None else {"content": [_theirs(token) for token in tokens], "refusal": None}
            return {"index": row["sample"], "message": message, "logprobs": logprobs, "finish_reason": why}
        logprobs = (
            None
            if tokens is None
            else {
                "tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens],
                "top_logprobs": [{top["token"]: top["logprob"] for top in token["top"]} for token in tokens],
            }
        )
        return {"index": row["sample"], "text": row["output"], "logprobs": logprobs, "finish_reason": why}

    def _rest(self, row: Mapping[str, Any], carried: Sequence[str]) -> dict[str, Any]:
        """The columns of a sample that a choice has no place for: the token ids of a text completion among them."""
        in_choice = _IN_CHAT if self._is_chat and row["output"] is not None else ()
        elsewhere = {"row", "output", *carried, *in_choice}
        return {column: value for column, value in row.items() if column not in elsewhere}


def _custom_id(row: Mapping[str, Any]) -> str | None:
    """The input's own, where it has such a column; it may be null where the row could not be read."""
    given = row.get(CUSTOM_ID, f"row-{row['row']}")
    return given if given is None else str(given)


def _carried_names(row: Mapping[str, Any]) -> list[str]:
    """The input's columns in an output row, which stand between `sample` and `output`."""
    names = list(row)
    return names[names.index("sample") + 1 : names.index("output")]


def _refusal(error: Mapping[str, str] | None) -> dict[str, Any]:
    error = error or {"code": "no_answer", "message": "the row has no answer"}
    return {"error": {"message": error["message"], "type": "invalid_request_error", "param": None, **error}}


def _reasoning_tokens(row: Mapping[str, Any]) -> int:
    return row.get("reasoning_tokens") or 0


def _theirs(token: Mapping[str, Any]) -> dict[str, Any]:
    """A token as OpenAI writes it, with its id. The bytes of a part of a character are not known."""
    text = token["token"]
    theirs = {"token": text, "logprob": token["logprob"], "token_id": token["token_id"]}
    theirs["bytes"] = None if _REPLACEMENT in text else list(text.encode())
    return theirs | ({"top_logprobs": [_theirs(top) for top in token["top"]]} if "top" in token else {})


def _ours(tokens: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**token, "top": token["top_logprobs"]} for token in tokens]
