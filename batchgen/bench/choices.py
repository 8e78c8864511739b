"""The workload `choices`: one of eight labels for each prompt of `label`. We score them, a peer draws under a grammar.

A peer needs texts for that. So the tokenizer made here has one for every token id, all of the same length: then the
only tokens that a grammar lets through are those of a label, and everyone reads the same labels.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.bench.planned import PlannedRow
from batchgen.engine.request import Request
from batchgen.errors import EngineError

if TYPE_CHECKING:
    from batchgen.engine import Engine

NAME = "choices"
LABELS = (
    (5000,),
    (5001,),
    (5002, 6000),
    (5002, 6001),
    (5003, 6002),
    (5003, 6003, 7000),
    (5003, 6003, 7001),
    (5004, 6004, 7002),
)
"""Token ids: one to three of them, some begun alike."""
_LETTERS, _LENGTH = "abcdefghijklmnopqrstuvwxyz", 4


def score(engine: "Engine", rows: Sequence[PlannedRow]) -> None:
    """The probability of each label for every row. Raises EngineError when there is none."""
    requests = (
        Request(row.row, row.tokens.tolist(), targets=LABELS, shared_with_next=row.shared_with_next) for row in rows
    )
    scored = [sum(map(math.fsum, done.target_logprobs or ())) for done in engine.generate(requests)]
    if len(scored) != len(rows) or not all(value < 0 for value in scored):
        raise EngineError(f"{len(scored)} of {len(rows)} rows were scored: the figures would be wrong")


def text_of(token_id: int) -> str:
    """The text of a token of the made tokenizer: four letters, another four for each id."""
    letters = []
    for _ in range(_LENGTH):
        token_id, letter = divmod(token_id, len(_LETTERS))
        letters.append(_LETTERS[letter])
    return "".join(reversed(letters))


def label_texts() -> list[str]:
    """The labels as a peer is given them."""
    return ["".join(map(text_of, label)) for label in LABELS]


def label_of(token_ids: Sequence[int]) -> int | None:
    """Which label some tokens are, with anything behind it that ended the answer; None when none."""
    return next((number for number, ids in enumerate(LABELS) if tuple(token_ids[: len(ids)]) == ids), None)


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """A tokenizer of the model's size into its folder, the model's end of sequence among its tokens."""
    end, size = int(config["eos_token_id"]), int(config["vocab_size"])
    vocabulary = {"<eos>" if token == end else text_of(token): token for token in range(size)}
    special = {"id": end, "content": "<eos>", "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [special | {"normalized": False, "special": True}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 131072}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
