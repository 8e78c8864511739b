"""Whatever the schema or expression: a whole answer of a random model follows it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from batchgen.constrain.grammar import Grammar
from batchgen.constrain.guidance import GuidanceCompiler
from batchgen.constrain.parsed import parsed_column
from batchgen.engine import Engine, EngineConfig, Request, SamplingParams
from batchgen.prompts.tokenizer import Tokenizer

NAMES = st.sampled_from(["a", "b_c", "é", "x y", '"'])
TEXTS = st.sampled_from(["", "a", "no", "ü", 'say "hi"', "a\\b", "1"])


def scalars() -> st.SearchStrategy[Any]:
    bounds = st.tuples(st.integers(-20, 20), st.integers(0, 30))
    return st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]}),
        bounds.map(lambda b: {"type": "number", "minimum": b[0], "exclusiveMaximum": b[0] + b[1] + 0.5}),
        st.integers(2, 9).map(lambda n: {"type": "integer", "multipleOf": n, "minimum": 0, "maximum": 99}),
        st.tuples(st.integers(0, 2), st.integers(2, 4)).map(
            lambda b: {"type": "string", "minLength": b[0], "maxLength": b[1]}
        ),
        st.sampled_from(["^[a-c]{1,3}$", "^(ja|nein)$", r"^\d{2}:\d{2}$"]).map(
            lambda pattern: {"type": "string", "pattern": pattern}
        ),
        st.sampled_from(["date", "uuid", "ipv4"]).map(lambda form: {"type": "string", "format": form}),
        st.lists(st.one_of(TEXTS, st.integers(-5, 5), st.none()), min_size=1, max_size=3).map(lambda v: {"enum": v}),
        TEXTS.map(lambda text: {"const": text}),
        st.just({"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
    )


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def objects(draw: st.DrawFn) -> Any:
        properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    arrays = st.tuples(inner, st.integers(0, 1), st.integers(1, 3)).map(
        lambda a: {"type": "array", "items": a[0], "minItems": a[1], "maxItems": a[2]}
    )
    return st.one_of(objects(), arrays, st.lists(inner, min_size=1, max_size=2).map(lambda parts: {"anyOf": parts}))


SCHEMAS = st.recursive(scalars(), compound, max_leaves=5)
PIECES = st.sampled_from(
    ["a", "é", r"\.", "[a-c]", r"\d", r"[^x\n]", "ab?", "(no|yes)", "x{1,3}", "(a|ab)(c|bcd)?", '"']
)
EXPRESSIONS = st.recursive(
    PIECES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{2}", "{0,2}"])).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


class Writer:
    """A random model that answers under a grammar."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine.load(folder, EngineConfig(device="cpu", dtype="float32", threads=1), num_tokens=259)
        self._tokenizer = Tokenizer.load(folder)
        self._compiler = GuidanceCompiler(self._tokenizer.plain_spec, 259, [258])

    def answers(self, grammar: Grammar) -> Iterator[tuple[str, bool]]:
        """Some answers, greedy and drawn, and whether each is whole."""
        constraint = self._compiler.compile(grammar)
        requests = [
            Request(
                seed,
                [seed + 65, 10],
                SamplingParams(max_tokens=90, temperature=seed % 3, seed=seed),
                constraint=constraint,
            )
            for seed in range(4)
        ]
        for completion in self.engine.generate(requests):
            assert completion.error is None
            yield self._tokenizer.decode(completion.token_ids), completion.finish_reason != "length"


@pytest.fixture(scope="module")
def writer(tiny_llama: Path) -> Writer:
    """See Writer."""
    return Writer(tiny_llama)


@settings(max_examples=40)
@given(schema=SCHEMAS)
def test_a_whole_answer_is_valid_by_its_schema(writer: Writer, schema: Any) -> None:
    grammar = Grammar("json_schema", json.dumps(schema))
    assert list(grammar.problems()) == []
    column = parsed_column(schema)
    for text, is_whole in writer.answers(grammar):
        event(f"whole: {is_whole}")
        if is_whole:
            value = json.loads(text)
            jsonschema.validate(value, schema)
            column.value_of(value) if value is not None else None


@settings(max_examples=40)
@given(expression=EXPRESSIONS)
def test_a_whole_answer_matches_its_expression(writer: Writer, expression: str) -> None:
    for text, is_whole in writer.answers(Grammar("regex", expression)):
        event(f"whole: {is_whole}")
        assert not is_whole or re.fullmatch(expression, text)


def test_most_answers_are_whole(writer: Writer) -> None:
    """So the properties above say something."""
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "maxItems": 3}
    whole = [is_whole for _, is_whole in writer.answers(Grammar("json_schema", json.dumps(schema)))]
    assert whole == [True] * 4
