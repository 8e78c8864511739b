"""The workload `schema`: answers that follow a JSON schema, over a tokenizer made for the model's vocabulary.

Weights are random, and so are the texts in the answers. What the schema leaves no choice for is as in a real job: the
tokenizer has learned to write JSON from examples.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from batchgen.bench.workloads import Workload
from batchgen.errors import JobFileError

if TYPE_CHECKING:
    from batchgen.engine import Engine, Request

NAME = "schema"
MAX_TOKENS = 256
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "category": {"enum": ["question", "complaint", "praise", "order", "other"]},
        "language": {"enum": ["english", "german", "french", "spanish"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "needs_reply": {"type": "boolean"},
        "scores": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 6},
        "customer": {
            "type": "object",
            "properties": {
                "account_number": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"},
                "is_new": {"type": ["boolean", "null"]},
            },
            "required": ["account_number", "is_new"],
            "additionalProperties": False,
        },
        "summary": {"type": "string", "minLength": 160, "maxLength": 200},
    },
    "required": ["category", "language", "urgency", "needs_reply", "scores", "customer", "summary"],
    "additionalProperties": False,
}
"""One free text, which a random model writes to its full length, and fields with few values."""
_LEARNED = 8000  # tokens that the tokenizer learns; the others are random words


class Run(NamedTuple):
    """One pass over the prompts: what it is called, its rows with the tokens that were drawn, and seconds."""

    name: str
    work: Workload
    seconds: float


def schema_prompts(scale: float = 1) -> Workload:
    """1,024 rows, nothing shared: 384 to 640 in, and up to MAX_TOKENS out."""
    rng = np.random.default_rng(7)
    rows = max(1, round(1024 * scale))
    lengths = rng.integers(384, 641, rows)
    return [(rng.integers(300, _LEARNED, int(length), dtype=np.int32), MAX_TOKENS) for length in lengths]


def schema_runs(engine: "Engine", config: dict[str, Any], scale: float) -> Iterator[Run]:
    """The prompts answered under the schema, and again without it, with as many tokens for each row."""
    from batchgen.constrain.grammar import Grammar
    from batchgen.constrain.guidance import GuidanceCompiler
    from batchgen.engine import Request, SamplingParams

    compiler = GuidanceCompiler(tokenizer_json(config), config["vocab_size"], [_eos_id(config)])
    constraint = compiler.compile(Grammar("json_schema", json.dumps(SCHEMA)))
    prompts = schema_prompts(scale)

    def constrained(row: int) -> Request:
        tokens, most = prompts[row]
        return Request(row, tokens.tolist(), SamplingParams(max_tokens=most), constraint=constraint)

    run = _timed(engine, NAME, prompts, constrained)
    yield run

    def free(row: int) -> Request:
        tokens, drawn = run.work[row]
        backwards = tokens[::-1].tolist()  # as long, and in nobody's cache
        return Request(row, backwards, SamplingParams(max_tokens=drawn, ignore_eos=True))

    yield _timed(engine, f"{NAME}, free", run.work, free)


def _timed(engine: "Engine", name: str, work: Workload, request: "Callable[[int], Request]") -> Run:
    began = time.perf_counter()
    answers = {done.request_id: len(done.token_ids) for done in engine.generate(map(request, range(len(work))))}
    seconds = time.perf_counter() - began
    return Run(name, [(tokens, answers[row]) for row, (tokens, _) in enumerate(work)], seconds)


def tokenizer_json(config: dict[str, Any]) -> str:
    """A byte-level BPE tokenizer with the model's vocabulary size, as tokenizer.json holds one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(8)
    words = list(dict.fromkeys(_words(rng, 2 * config["vocab_size"])))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_LEARNED, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_examples(rng, words), trainer)
    spec = json.loads(tokenizer.to_str())
    learned = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].get)
    known, special = set(learned), {_eos_id(config): "<|eos|>"}
    tokens = [*learned, *(word for word in words if word not in known)]
    ids = [i for i in range(config["vocab_size"]) if i not in special]
    spec["model"]["vocab"] = dict(zip(tokens, ids, strict=False)) | {text: i for i, text in special.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] = [{"id": i, "content": text, **flags} for i, text in sorted(special.items())]
    return json.dumps(spec)


def write_json_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """The tokenizer as files of a model folder."""
    (folder / "tokenizer.json").write_text(tokenizer_json(config), encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


def _eos_id(config: dict[str, Any]) -> int:
    found = config.get("eos_token_id")
    if found is None:
        raise JobFileError("the model's config has no eos_token_id: an answer under a schema could never end")
    return int(found[0] if isinstance(found, list) else found)


def _words(rng: np.random.Generator, count: int) -> Iterator[str]:
    letters = rng.integers(ord("a"), ord("z") + 1, 9 * count, dtype=np.uint8).tobytes().decode()
    for number, length in enumerate(rng.integers(3, 10, count).tolist()):
        yield letters[9 * number : 9 * number + length]


def _examples(rng: np.random.Generator, words: list[str]) -> Iterator[str]:
    """Texts to learn from: the schema's JSON with words in it."""
    names = [*SCHEMA["properties"], *SCHEMA["properties"]["customer"]["properties"]]
    for first in rng.integers(0, 3000, 2000).tolist():
        some = words[first : first + 12]
        yield json.dumps(dict(zip(names, some, strict=False))) + " " + " ".join(some)
