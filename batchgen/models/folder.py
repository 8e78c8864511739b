"""The small files of a model folder: config.json, and what the others say about ends of sequence."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.errors import JobFileError


def read_config_json(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json. Raises JobFileError."""
    config = _read_json(folder / "config.json")
    if config is None:
        raise JobFileError(f"{folder / 'config.json'} does not exist; a model folder needs it")
    return config


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the union of what config.json, generation_config.json and the tokenizer call the end, in this order."""
    generation = _read_json(folder / "generation_config.json") or {}
    declared = token_ids(config.get("eos_token_id")) + token_ids(generation.get("eos_token_id"))
    return tuple(dict.fromkeys(declared + _tokenizer_eos(folder)))


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the ids in a field that holds one, a list of them or null."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(item for item in values if isinstance(item, int) and not isinstance(item, bool) and item >= 0)


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """The id of the tokenizer's eos token, which chat models often name only there."""
    settings = _read_json(folder / "tokenizer_config.json") or {}
    token = settings.get("eos_token") or (_read_json(folder / "special_tokens_map.json") or {}).get("eos_token")
    text = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(text, str):
        return ()
    for token_id, added in (settings.get("added_tokens_decoder") or {}).items():
        if added.get("content") == text:
            return (int(token_id),)
    tokenizer = _read_json(folder / "tokenizer.json") or {}
    for added in tokenizer.get("added_tokens") or []:
        if added.get("content") == text:
            return (int(added["id"]),)
    vocabulary = (tokenizer.get("model") or {}).get("vocab")
    return (vocabulary[text],) if isinstance(vocabulary, Mapping) and text in vocabulary else ()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise JobFileError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise JobFileError(f"{path} holds no JSON object")
    return value
