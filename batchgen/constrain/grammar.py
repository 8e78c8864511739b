"""What a job or a row wants its answers to follow, and what is wrong with it as far as no tokenizer is needed."""

import json
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from batchgen.constrain.schema import Path, Problem, keyword_problems, locate
from batchgen.job.generate import Generate

Kind = Literal["json_schema", "regex", "grammar"]
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON is written as Python's json.dumps does: with one layout, names and brackets leave no choice."""


class Grammar(NamedTuple):
    """A field of `generate` that says what answers look like, and its text (of a schema, its JSON)."""

    kind: Kind
    text: str

    @classmethod
    def of(cls, generate: Generate) -> "Grammar | None":
        """The one that `generate` asks for."""
        if generate.json_schema is not None:
            return cls("json_schema", json.dumps(generate.json_schema))
        if generate.regex is not None:
            return cls("regex", generate.regex)
        return None if generate.grammar is None else cls("grammar", generate.grammar)

    def lowered(self) -> str:
        """The grammar in the form that llguidance compiles."""
        from llguidance import LLMatcher

        if self.kind == "json_schema":
            return str(LLMatcher.grammar_from_json_schema(self.text, overrides=_LAYOUT))
        if self.kind == "regex":
            return str(LLMatcher.grammar_from_regex(self.text))
        return str(LLMatcher.grammar_from_lark(self.text))

    def problems(self) -> Iterator[Problem]:
        """What can't be enforced, or is wrong. Paths start at the field."""
        if self.kind != "json_schema":
            error = _compile_error(self)
            if error is not None:
                yield Problem((), error)
            return
        schema: Any = json.loads(self.text)
        unsupported = list(keyword_problems(schema))
        yield from unsupported
        found = None if unsupported else locate(schema, _schema_error)
        if found is not None:
            yield found


def named(kind: Kind, problem: Problem) -> str:
    """The path of a problem from `generate` on."""
    return ".".join(map(str, ("generate", kind, *problem.path)))


def _schema_error(schema: Any) -> str | None:
    return _compile_error(Grammar("json_schema", json.dumps(schema)))


def _compile_error(grammar: Grammar) -> str | None:
    from llguidance import LLMatcher

    error = LLMatcher.validate_grammar(grammar.lowered())
    return str(error).strip() or None


__all__ = ["Grammar", "Kind", "Path", "Problem", "named"]
