"""A row becomes a prompt: rendered, tokenized, checked against the model's length; or it becomes an error."""

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.data.rows import Row
from batchgen.errors import JobFileError, RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt, Truncation
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.choices import ChoiceEncoder, Choices, row_choices
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.marks import unmark
from batchgen.prompts.overlong import Draft, FieldCutter, too_long, window_chars
from batchgen.prompts.render import Renderer
from batchgen.prompts.templates import PromptTemplates
from batchgen.prompts.tokenizer import Tokenizer

_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PromptRecipe:
    """All that a process needs to build a job's prompts: paths and settings, so that it travels to workers.

    `max_length` counts prompt and answer. `eos_id` ends choices that begin alike; the tokenizer's own when None.
    `folder` is where `prompt.chat_template` starts from, and `now` what a chat template takes for now: the start
    of the job, so that a job resumed on another day keeps its prompts.
    """

    prompt: Prompt
    generate: Generate
    limits: Limits
    model_path: str
    max_length: int
    tokenizer_path: str | None = None
    folder: Path = Path()
    eos_id: int | None = None
    now: datetime.datetime = field(default_factory=datetime.datetime.now)


@dataclass(frozen=True, slots=True)
class PromptResult:
    """What became of a row. Without `error` it has token ids (int32); with it, it has none.

    `skipped` rows are over-long ones that the job wants to leave out. `truncated_tokens` is what a cut took from the
    field. `labels` are the texts to score behind this prompt, and `choices` their token ids (see ChoiceEncoder).
    """

    row: Row
    token_ids: npt.NDArray[np.int32] | None = None
    text: str = ""
    error: RowError | None = None
    skipped: bool = False
    truncated_tokens: int = 0
    choices: Choices = ()
    labels: tuple[str, ...] = ()
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """What the row says for fields of `generate` that are templates, not yet checked."""
    has_own_bos: bool = False
    """The text began with a BOS, so none was added."""


class PromptBuilder:
    """Builds prompts. Raises JobFileError, when it is made, for whatever is wrong with every row."""

    def __init__(self, recipe: PromptRecipe, tokenizer: Tokenizer | None = None) -> None:
        self.recipe = recipe
        self.tokenizer = tokenizer or Tokenizer.load(recipe.model_path, recipe.tokenizer_path)
        self.templates = PromptTemplates(recipe.prompt, recipe.limits, recipe.generate)
        limits = recipe.limits
        template_limits = TemplateLimits(limits.template_seconds, limits.template_chars)
        self._renderer = Renderer(self.templates, template_limits, self.tokenizer, recipe.folder, recipe.now)
        self.chat_source = self._renderer.chat_source
        """The chat template in use, for the manifest."""
        self._overlong = limits.overlong
        self._cutter = (
            FieldCutter(limits.overlong.truncate, self.tokenizer) if isinstance(limits.overlong, Truncation) else None
        )
        self._choices: ChoiceEncoder | None = None
        if recipe.generate.scores:
            eos_id = self.tokenizer.eos_id if recipe.eos_id is None else recipe.eos_id
            if eos_id is None:
                raise JobFileError(
                    f"generate.choices: {self.tokenizer.place} names no end-of-sequence token to end one"
                )
            self._choices = ChoiceEncoder(self.tokenizer, eos_id)
            if isinstance(recipe.generate.choices, list):
                self._choices.check(recipe.generate.choices, recipe.max_length)
        self._max_length = recipe.max_length
        wanted = recipe.generate.max_tokens or 1
        # A cut makes room for the whole answer; a prompt that is not cut only has to leave room for one token.
        self._answer_room = wanted if self._cutter and wanted < recipe.max_length else 1

    def build(self, row: Row) -> PromptResult:
        """The prompt of one row. Never raises for a bad row."""
        if row.error is not None:
            return PromptResult(row, error=row.error)
        try:
            return self._build(row)
        except RowFailure as failure:
            skipped = failure.error.kind == "prompt_too_long" and self._overlong == "skip"
            return PromptResult(row, error=failure.error, skipped=skipped)
        except RecursionError:
            return PromptResult(row, error=RowError("not_text", "the row's values are nested too deeply"))

    def _build(self, row: Row) -> PromptResult:
        own_bos = False
        truncated_tokens = 0
        try:
            labels = self._labels(row.values)
            draft = self._draft(row.values)
            own_bos = draft.has_own_bos
            choices = self._encoded_choices(draft, labels)
            room = self._room(choices)
            if len(draft.ids) + room > self._max_length:
                what = "the longest text to score" if choices else "the answer"
                raise too_long(len(draft.ids), self._max_length, room, what=what)
        except RowFailure as failure:
            if failure.error.kind != "prompt_too_long" or self._cutter is None:
                raise
            draft, truncated_tokens = self._cut(row.values, labels, failure)
            choices = self._encoded_choices(draft, labels)
        if not draft.ids:
            raise RowFailure("empty_prompt", "the prompt is empty, and the tokenizer adds no token to start from")
        return PromptResult(
            row,
            np.asarray(draft.ids, dtype=np.int32),
            unmark(draft.rendered.text, draft.rendered.mark),
            truncated_tokens=truncated_tokens,
            choices=choices,
            labels=labels,
            parameters=self._parameters(row.values),
            has_own_bos=own_bos,
        )

    def _draft(self, values: Mapping[str, Any]) -> Draft:
        """Render and tokenize. Raises RowFailure; for a hopelessly long text before all of it is tokenized."""
        rendered = self._renderer.render(values)
        if not rendered.text.isascii() and _SURROGATE.search(rendered.text):
            raise RowFailure("bad_utf8", "the prompt holds half a character (a lone surrogate), which is no text")
        encode = self.tokenizer.encode_rendered
        size, num_tokens = window_chars(lambda part: encode(part, rendered.mark), rendered.text, self._max_length)
        if size < len(rendered.text):
            raise too_long(num_tokens, self._max_length, 1, at_least=True)
        if not rendered.is_raw:
            return Draft(encode(rendered.text, rendered.mark), rendered)
        ids, has_own_bos = self.tokenizer.encode_text(rendered.text, rendered.mark)
        return Draft(ids, rendered, has_own_bos)

    def _cut(self, values: Mapping[str, Any], labels: tuple[str, ...], failure: RowFailure) -> tuple[Draft, int]:
        assert self._cutter is not None
        room = self._answer_room
        if self._choices is not None:
            room = self._choices.longest(labels)
        cut = self._cutter.cut(values, self._draft, self._max_length - room)
        if cut is None:
            raise failure
        return cut.draft, cut.truncated_tokens

    def _labels(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """The texts to score behind the row's prompt."""
        if isinstance(choices := self.recipe.generate.choices, list):
            return tuple(choices)
        if self.templates.choices_column is not None:
            texts = row_choices(values, self.templates.choices_column)
        elif self.templates.score is not None:
            texts = (self.templates.score.render(values),)
        else:
            return ()
        if "" in texts:
            raise RowFailure("bad_request", "score: the text is empty, and has no log-probability")
        special = next(filter(None, map(self.tokenizer.special_text.pattern.search, texts)), None)
        if special is not None and self.recipe.prompt.special_tokens == "text":
            raise RowFailure("bad_request", f"{special[0]!r} is a special token, and can't be scored as text")
        return texts

    def _parameters(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A template that is a column and nothing else gives the column's value, any other one its text."""
        return {
            name: values.get(template.column) if template.column is not None else template.render(values)
            for name, template in self.templates.parameters.items()
        }

    def _encoded_choices(self, draft: Draft, labels: tuple[str, ...]) -> Choices:
        if self._choices is None or not draft.ids:
            return ()
        return self._choices.encode(labels, draft.rendered.text, draft.rendered.mark, draft.ids)

    def _room(self, choices: Choices) -> int:
        return max(map(len, choices)) if choices else self._answer_room
