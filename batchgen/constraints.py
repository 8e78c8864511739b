"""The grammars of a job's answers: its own is compiled before the model loads, a row's when the row is asked for."""

import json
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchgen.constrain.grammar import Grammar, named
from batchgen.constrain.parsed import Parsed, ValueTooLargeError, parsed_column
from batchgen.errors import JobFileError, RowError
from batchgen.job.generate import CONSTRAINTS, Generate
from batchgen.job.spec import Job
from batchgen.models.config import ModelConfig
from batchgen.prompts.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batchgen.constrain.guidance import GuidanceCompiler
    from batchgen.engine.request import Constraint

_MOST_KEPT = 256  # grammars; rows may bring their own


class Constraints:
    """Compiles what answers have to follow, and reads the answers of JSON schemas.

    Raises JobFileError, when it is made, for what is wrong with the job's own grammar.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer, config: ModelConfig) -> None:
        self._tokenizer = tokenizer
        self._num_tokens = min(tokenizer.vocab_size, config.vocab_size)
        self._eos_ids = [token for token in config.eos_token_ids if token < self._num_tokens]
        self._compiled: dict[Grammar, Constraint | RowError] = {}
        generate = job.generate
        self._parsed: Parsed | None = None
        if generate.json_schema is not None or "json_schema" in generate.templates:
            self._parsed = parsed_column(generate.json_schema if isinstance(generate.json_schema, dict) else None)
        own = Grammar.of(generate)
        if own is not None:
            mistakes = [f"{job.where(named(own.kind, problem))}: {problem.message}" for problem in own.problems()]
            if mistakes:
                raise JobFileError("\n".join(mistakes))
        if own is not None or generate.templates.keys() & CONSTRAINTS:
            where = job.where("generate." + next(name for name in CONSTRAINTS if generate.asks_for(name)))
            try:
                compiled = own and self._compiler.compile(own)
            except ValueError as error:
                raise JobFileError(f"{where}: {error}") from error
            if own is not None and compiled is not None:
                self._compiled[own] = compiled

    @property
    def parsed_type(self) -> Any:
        """The Arrow type of the column `parsed`; None without one."""
        return self._parsed and self._parsed.type

    def of(self, generate: Generate) -> "Constraint | RowError | None":
        """What a row's answers have to follow. A RowError for a grammar of its own that can't be compiled."""
        grammar = Grammar.of(generate)
        if grammar is None:
            return None
        found = self._compiled.get(grammar)
        if found is None:
            if len(self._compiled) >= _MOST_KEPT:
                self._compiled.clear()
            found = self._compiled[grammar] = self._compile(grammar)
        return found

    def parsed(self, text: str) -> dict[str, Any]:
        """The columns of a whole answer that follows a JSON schema."""
        if self._parsed is None:
            return {}
        try:
            value = json.loads(text)
            return {"parsed": None if value is None else self._parsed.value_of(value)}
        except ValueTooLargeError as error:
            return {"status": "invalid", "error": RowError("bad_value", f"column 'parsed': {error}")}

    def _compile(self, grammar: Grammar) -> "Constraint | RowError":
        problem = next(grammar.problems(), None)
        if problem is not None:
            return RowError("bad_request", f"{named(grammar.kind, problem)}: {problem.message}")
        try:
            return self._compiler.compile(grammar)
        except ValueError as error:
            return RowError("bad_request", f"generate.{grammar.kind}: {error}")

    @cached_property
    def _compiler(self) -> "GuidanceCompiler":
        from batchgen.constrain.guidance import GuidanceCompiler

        if not self._eos_ids:
            raise ValueError(
                "the model has no end-of-sequence token that its tokenizer knows, and an answer could never end"
            )
        return GuidanceCompiler(self._tokenizer.plain_spec, self._num_tokens, self._eos_ids)
