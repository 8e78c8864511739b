"""All templates of a job file's `prompt`, compiled and checked before a model loads."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from batchgen.errors import JobFileError
from batchgen.job.generate import Generate
from batchgen.job.spec import Limits, Prompt, Truncation
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.messages import Message
from batchgen.prompts.template import RowTemplate, unknown_column

GENERATE = Generate()
OPENAI_COLUMNS = ("messages", "prompt", "tools")  # what an OpenAI batch request brings


class PromptTemplates:
    """The compiled templates, and the columns that they read.

    Raises one JobFileError with every mistake in them.
    """

    def __init__(self, prompt: Prompt, limits: Limits, generate: Generate = GENERATE) -> None:
        self._limits = TemplateLimits(limits.template_seconds, limits.template_chars)
        self._mistakes: list[str] = []
        self._by_place: dict[str, RowTemplate] = {}
        self.prompt = prompt
        self.text = self._compiled(prompt.text, "prompt.text")
        self.system = self._compiled(prompt.system, "prompt.system")
        self.user = self._compiled(prompt.user, "prompt.user")
        self.assistant = self._compiled(prompt.assistant, "prompt.assistant")
        self.messages = self._compiled_messages(prompt.messages) if isinstance(prompt.messages, list) else None
        self.messages_column = prompt.messages if isinstance(prompt.messages, str) else None
        self.tools_column = prompt.tools if isinstance(prompt.tools, str) else None
        self.score = self._compiled(generate.score, "generate.score")
        self.parameters = {
            name: template
            for name, source in generate.templates.items()
            if (template := self._compiled(source, f"generate.{name}")) is not None
        }
        self.choices_column = generate.choices if isinstance(generate.choices, str) else None
        if isinstance(limits.overlong, Truncation):
            self._check_cut(limits.overlong.truncate.field)
        if self._mistakes:
            raise JobFileError("\n".join(self._mistakes))

    @property
    def columns(self) -> frozenset[str]:
        """Every column that a prompt may need. Sources read these, and those that are carried over."""
        named = (self.messages_column, self.tools_column, self.choices_column)
        whole = {name for name in named if name is not None}
        from_openai = set(OPENAI_COLUMNS) if self.prompt.kind is None else set()
        return frozenset().union(whole, from_openai, *(template.columns for template in self._by_place.values()))

    @property
    def required_columns(self) -> frozenset[str]:
        """The columns that every row should have: those for which no template has a default."""
        return frozenset(name for _, name in self._reads())

    def check_columns(
        self,
        columns: Collection[str],
        has_column: Callable[[str], bool] | None = None,
        where: Callable[[str], str] = str,
    ) -> None:
        """Raise JobFileError for each column that is read and that the input has not.

        `columns` are those known; `has_column` is asked before one is called missing, for inputs without a schema.
        `where` names a field in messages.
        """
        known = sorted(columns)
        has = has_column or columns.__contains__
        mistakes = [f"{where(place)}: {unknown_column(name, known)}" for place, name in self._reads() if not has(name)]
        if mistakes:
            raise JobFileError("\n".join(mistakes))

    def rendered_messages(self, values: Mapping[str, Any]) -> list[Message]:
        """The messages of `prompt.messages`, when it is a list, for one row. Raises RowFailure."""
        return [
            {**message, "content": _rendered(content, values)}
            for message, content in zip(self.prompt.messages or [], self.messages or [], strict=True)
            if isinstance(message, dict)
        ]

    def _reads(self) -> Iterator[tuple[str, str]]:
        for place, template in self._by_place.items():
            for name in sorted(template.columns - template.optional):
                yield place, name
        if self.messages_column is not None:
            yield "prompt.messages", self.messages_column
        if self.tools_column is not None:
            yield "prompt.tools", self.tools_column
        if self.choices_column is not None:
            yield "generate.choices", self.choices_column

    def _compiled(self, source: str | None, place: str) -> RowTemplate | None:
        if source is None:
            return None
        try:
            self._by_place[place] = RowTemplate(source, place, self._limits)
        except JobFileError as error:
            self._mistakes.append(str(error))
            return None
        return self._by_place[place]

    def _compiled_messages(self, messages: list[dict[str, Any]]) -> list[Any]:
        return [self._compiled_message(m, f"prompt.messages.{place}") for place, m in enumerate(messages)]

    def _compiled_message(self, message: dict[str, Any], place: str) -> Any:
        if not isinstance(message.get("role"), str):
            self._mistakes.append(f"{place}: has no role; write `role: user` (or system, assistant) into it")
        content = message.get("content")
        if isinstance(content, str):
            return self._compiled(content, f"{place}.content")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            return [self._compiled(p["text"], f"{place}.content.{i}.text") for i, p in enumerate(content)]
        self._mistakes.append(f"{place}.content: must be a template; write `content: ...` into it")
        return None

    def _check_cut(self, field: str) -> None:
        place = "limits.overlong.truncate.field"
        if field in (self.messages_column, self.tools_column) or self.prompt.kind is None:
            self._mistakes.append(f"{place}: {field!r} holds messages; only a column of text can be cut")
        elif field not in self.columns and not self._mistakes:
            self._mistakes.append(
                f"{place}: no template reads {field!r}; cut one of: {', '.join(sorted(self.columns))}"
            )


def _rendered(content: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(content, RowTemplate):
        return content.render(values)
    return [{"type": "text", "text": part.render(values)} for part in content]
