"""The `generate` section: what the model is asked for."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from batchgen.job.attempts import Reasoning, Retry, Vote
from batchgen.job.section import Section, Text, mistake

Probability = Annotated[float, Field(gt=0, le=1)]
GREEDY_BELOW = 1e-5
_OF_LABELS = frozenset({"choices", "choice_logprobs", "calibrate", "length_normalize", "score", "vote"})
FIXED = _OF_LABELS | {"n", "logprobs", "expect", "retry", "reasoning", "templates"}
"""Fields that are the same on all rows; each other one may be a template."""
CONSTRAINTS = ("json_schema", "regex", "grammar")
"""Fields that say what an answer has to look like."""
_ENDS = ("stop", "stop_token_ids", "min_tokens", "ignore_eos")


class Generate(Section):
    """What the model is asked for. Most fields may be a Jinja template over the row's columns: `"{{ budget }}"`."""

    choices: Text | Annotated[list[str], Field(min_length=2)] | None = None
    """The answer is one of these texts, with the probability of each; or the column that has the row's own list."""
    choice_logprobs: bool = False
    """Keep the log-probability of each choice, as the model gives it, in `label_logprobs`."""
    calibrate: Literal["content_free", "batch"] | None = None
    """Take out what the model prefers anyway: on inputs without content, or over 256 rows of the input."""
    length_normalize: bool = False
    """Compare choices by their mean log-probability per token instead of the sum."""
    score: Text | None = None
    """Jinja template of a text: its log-probability after the prompt is computed, and nothing is generated."""
    json_schema: Text | dict[str, Any] | None = None
    """The answer is JSON that this schema allows, also in the column `parsed`: a schema, or the file that holds it."""
    regex: Text | None = None
    """The answer is a text that this regular expression matches as a whole."""
    grammar: Text | None = None
    """The answer follows this grammar in Lark's notation, or the one in this `.lark` file."""
    max_tokens: Annotated[int, Field(ge=1)] | None = 256
    """Longest answer; `null` for as much as fits."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """No end of sequence and no stop before this many tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """0 takes the likeliest token; below 1e-5 counts as 0."""
    top_k: Annotated[int, Field(ge=-1)] = 0
    """Sample among this many likeliest tokens; 0 and -1 mean all."""
    top_p: Probability = 1.0
    """Sample among the likeliest tokens that together have this probability."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample among tokens at least this probable, relative to the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """Divides positive logits (multiplies negative ones) of tokens seen in prompt or output."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of every token seen in the output."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted for each time that a token was seen in the output."""
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], float], Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]+$"}})
    ] = {}
    """Added to the logits of these token ids."""
    stop: Text | list[Text] = []
    """End the answer before the first of these texts."""
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    """End the answer at these tokens, besides the model's own ends of sequence."""
    include_stop: bool = False
    """Keep the stop text in the output."""
    ignore_eos: bool = False
    """Go on past the model's ends of sequence; only length and `stop` end an answer."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the output text."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """The job's seed: each row's noise comes from (seed, row, sample) alone."""
    n: Annotated[int, Field(ge=1)] = 1
    """Answers per row, each one output row; more than one needs a temperature."""
    vote: Literal["majority"] | Vote | None = None
    """Which answer most of a row's `n` samples gave, or which value of `{field: parsed.label}`, and their share."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Log-probabilities of the answer's tokens, with this many alternatives each."""
    expect: Text | None = None
    """Regular expression that the whole answer has to match, blanks around it left out; else the row is `invalid`."""
    retry: Retry | None = None
    """Another go at answers that are invalid or cut, in the same run: `{invalid: 1, length: 1}`."""
    reasoning: bool | Reasoning = False
    """The model thinks before it answers: that part goes into the column `reasoning`."""

    templates: dict[str, str] = {}
    """Templates of fields, by name. `max_tokens: "{{ budget }}"` comes here by itself."""

    @model_validator(mode="before")
    @classmethod
    def _set_templates_apart(cls, values: Any) -> Any:
        """A text with `{{` or `{%` in it is a template, in every field that may differ from row to row."""
        if not isinstance(values, dict):
            return values
        found = {name: value for name, value in values.items() if name not in FIXED and _is_template(value)}
        if not found:
            return values
        kept = {name: value for name, value in values.items() if name not in found}
        return kept | {"templates": {**values.get("templates", {}), **found}}

    @field_validator("templates")
    @classmethod
    def _of_fields(cls, value: dict[str, str]) -> dict[str, str]:
        wrong = next((name for name in value if name in FIXED or name not in cls.model_fields), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no field that may be a template")
        return value

    @field_validator("stop")
    @classmethod
    def _as_list(cls, value: str | list[str]) -> list[str]:
        return [value] if isinstance(value, str) else value

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _token_ids(cls, value: Any) -> Any:
        """Keys of a mapping in a file are text."""
        if not isinstance(value, dict):
            return value
        wrong = next((key for key in value if not str(key).isdecimal()), None)
        if wrong is not None:
            raise ValueError(f"{wrong!r} is no token id; write whole numbers, such as `{{50256: -100}}`")
        return {int(key): bias for key, bias in value.items()}

    @field_validator("choices")
    @classmethod
    def _distinct(cls, value: str | list[str] | None) -> str | list[str] | None:
        if not isinstance(value, list):
            return value
        if "" in value:
            raise ValueError("an empty text is no choice; write at least one character for each")
        if len(set(value)) != len(value):
            raise ValueError(f"has {next(c for c in value if value.count(c) > 1)!r} twice; keep each choice once")
        return value

    @field_validator("expect")
    @classmethod
    def _is_regex(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _fits(self) -> "Generate":
        by_row = self.templates
        if self.max_tokens is not None and self.min_tokens > self.max_tokens and "max_tokens" not in by_row:
            raise mistake("min_tokens", f"{self.min_tokens} is more than max_tokens ({self.max_tokens}); lower it")
        if self.scores and self.n > 1:
            raise mistake("n", "is for sampled answers, and choices and scores have one answer each; leave it out")
        if self.vote is not None and self.n == 1:
            raise mistake("vote", "is taken among several samples; write `n: 5` (and a temperature) too")
        if isinstance(self.vote, Vote) and not self.asks_for("json_schema"):
            raise mistake(
                "vote", f"{self.vote.field} is a field of answers with a `json_schema`; write `vote: majority`"
            )
        self._check_choices()
        self._check_attempts()
        self._check_constraint()
        if self.n > 1 and self.temperature < GREEDY_BELOW and "temperature" not in by_row:
            raise mistake("n", f"{self.n} answers at temperature 0 are all the same; raise temperature or leave n out")
        return self

    @property
    def scores(self) -> bool:
        """Whether given texts are scored, choices or another, instead of a text being generated."""
        return self.choices is not None or self.score is not None

    @property
    def is_certain(self) -> bool:
        """Whether the same prompt gets the same answer by definition, whatever the seed."""
        draws_again = self.retry is not None and self.retry.on_invalid.times > 0
        return self.scores or (self.temperature < GREEDY_BELOW and not draws_again)

    @property
    def thinking(self) -> Reasoning | None:
        """`reasoning` as a mapping; None for a model that does not think."""
        if isinstance(self.reasoning, Reasoning):
            return self.reasoning
        return Reasoning() if self.reasoning else None

    def _check_attempts(self) -> None:
        for name in ("expect", "retry", "reasoning"):
            if self.scores and getattr(self, name):
                raise mistake(name, "is for generated answers, and choices and scores generate nothing; leave it out")
        budget = 0 if self.thinking is None else self.thinking.max_tokens or 0
        if self.max_tokens is not None and budget >= self.max_tokens and "max_tokens" not in self.templates:
            raise mistake(
                "reasoning",
                f"thinks for {budget} tokens, and max_tokens ({self.max_tokens}) counts thinking and answer together; "
                "raise max_tokens",
            )
        retry = self.retry
        if retry is None:
            return
        if retry.on_length.times and self.max_tokens is None:
            raise mistake("retry", "length: with `max_tokens: null` an answer is as long as it can be; leave it out")
        longest = retry.on_length.max_tokens
        if isinstance(longest, int) and longest <= (self.max_tokens or 0) and "max_tokens" not in self.templates:
            raise mistake(
                "retry",
                f"length: {longest} tokens are no more than max_tokens ({self.max_tokens}); raise them",
            )
        invalid = retry.on_invalid
        temperature = self.temperature if invalid.temperature is None else invalid.temperature
        if invalid.times and temperature < GREEDY_BELOW and "temperature" not in self.templates:
            raise mistake(
                "retry",
                "invalid: at temperature 0 the next attempt is the same; write `invalid: {times: "
                f"{invalid.times}, temperature: 0.7}}`",
            )

    def _check_choices(self) -> None:
        if self.choices is not None and self.score is not None:
            raise mistake("score", "is for one given text, and choices are for several; keep one of the two")
        if self.score is not None and self.logprobs:
            raise mistake("logprobs", "a score has no alternatives; write `logprobs: 0` for each token's own")
        for name in ("choice_logprobs", "calibrate", "length_normalize"):
            if getattr(self, name) and self.choices is None:
                raise mistake(name, "belongs to choices; write `choices: [...]` too, or leave it out")
        if self.calibrate is not None and not isinstance(self.choices, list):
            raise mistake("calibrate", "needs the same choices on all rows; write `choices: [...]` as a list")

    def asks_for(self, name: str) -> bool:
        """Whether a field has a value, the same for all rows or by a template."""
        return getattr(self, name) not in (None, [], 0) or name in self.templates

    def _check_constraint(self) -> None:
        given = [name for name in CONSTRAINTS if self.asks_for(name)]
        if not given:
            return
        if self.scores:
            raise mistake(
                given[0], "is for generated answers, and choices and scores are given texts; keep one of them"
            )
        if len(given) > 1:
            raise mistake(given[1], f"and {given[0]} exclude one another; keep one of them")
        ends = next((name for name in _ENDS if self.asks_for(name)), None)
        if ends is not None:
            raise mistake(ends, f"doesn't go with {given[0]}, which says all that an answer may hold; leave it out")


def _is_template(value: Any) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)
