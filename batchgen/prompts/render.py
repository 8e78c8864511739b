"""From a row's values to the text of its prompt, with special-token text in the data marked."""

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.errors import JobFileError
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.chat import ChatTemplate
from batchgen.prompts.chat_source import ChatSource, read_chat_template
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.marks import texts_in
from batchgen.prompts.messages import (
    Message,
    column_messages,
    column_tools,
    with_flat_content,
    with_parsed_arguments,
)
from batchgen.prompts.template import column_text
from batchgen.prompts.templates import PromptTemplates
from batchgen.prompts.tokenizer import Tokenizer


class Rendered(NamedTuple):
    """A prompt's text. `mark` is the character that keeps special text of the data apart; `is_raw`: no chat."""

    text: str
    mark: str | None
    is_raw: bool


class Renderer:
    """Renders the prompts of a job. Raises JobFileError when a chat template is needed and there is none."""

    def __init__(
        self,
        templates: PromptTemplates,
        limits: TemplateLimits,
        tokenizer: Tokenizer,
        folder: Path,
        now: datetime.datetime,
    ) -> None:
        self._templates = templates
        self._prompt = prompt = templates.prompt
        self._tokenizer = tokenizer
        self._columns = templates.columns
        self._keeps_special_text = prompt.special_tokens == "text"
        self.chat_source: ChatSource | None = None
        """The chat template in use."""
        self._chat: ChatTemplate | None = None
        self._why_no_chat = ""
        self._limits = limits
        if prompt.kind == "text":
            return
        try:
            self.chat_source = self._choose_chat(folder)
        except JobFileError as error:
            if prompt.kind is not None:
                raise
            self._why_no_chat = str(error)  # an OpenAI file may hold raw prompts only
            return
        self._chat = ChatTemplate(
            *self.chat_source,
            limits,
            variables={**tokenizer.special_texts, **prompt.chat_template_args},
            now=lambda: now,
        )

    def render(self, row_values: Mapping[str, Any]) -> Rendered:
        """The prompt's text for one row. Raises RowFailure."""
        values = {name: row_values[name] for name in self._columns if name in row_values}
        is_raw = self._prompt.kind == "text" or (self._prompt.kind is None and values.get("messages") is None)
        if not is_raw:
            values = self._with_parsed_columns(values)
        data, mark = self._tokenizer.special_text.mark(values) if self._keeps_special_text else (values, None)
        try:
            text = self._raw(data) if is_raw else self._conversation(data)
        except RowFailure as failure:
            num_chars = sum(map(len, texts_in(list(values.values()))))
            if failure.error.kind != "template_error" or num_chars <= self._limits.chars // 4:
                raise
            # With so much text in the row, the template's limits are what a hopelessly long prompt runs into first.
            raise RowFailure("prompt_too_long", f"the row has {num_chars} characters: {failure}") from failure
        return Rendered(text, mark, is_raw)

    def _choose_chat(self, folder: Path) -> ChatSource:
        if self._prompt.chat_template is not None:
            return read_chat_template(folder / self._prompt.chat_template)
        return self._tokenizer.chat_templates.choose(tools=self._prompt.tools is not None)

    def _with_parsed_columns(self, values: dict[str, Any]) -> dict[str, Any]:
        """JSON text becomes messages before marks are made: a `\\u003c` in it must not hide special text."""
        messages, tools = self._templates.messages_column, self._templates.tools_column
        if self._prompt.kind is None:
            messages, tools = "messages", "tools"
        if messages is not None:
            found = column_messages(values, messages)
            values[messages] = with_parsed_arguments(found) if self._prompt.kind is None else found
        if tools is not None:
            values[tools] = column_tools(values, tools)
        return values

    def _raw(self, values: Mapping[str, Any]) -> str:
        templates = self._templates
        text = column_text(values, "prompt") if templates.text is None else templates.text.render(values)
        return text + (templates.assistant.render(values) if templates.assistant else "")

    def _conversation(self, values: Mapping[str, Any]) -> str:
        templates = self._templates
        if self._chat is None:
            raise RowFailure("template_error", self._why_no_chat)
        messages = self._messages(values)
        if templates.assistant is not None:
            messages.append({"role": "assistant", "content": templates.assistant.render(values)})
        tools = (
            self._prompt.tools
            if isinstance(self._prompt.tools, list)
            else values.get(templates.tools_column or "tools")
        )
        return self._chat.render(
            messages if self._chat.takes_parts else with_flat_content(messages),
            tools=tools if self._prompt.tools is not None or self._prompt.kind is None else None,
            documents=self._prompt.chat_template_args.get("documents"),
            continue_final_message=templates.assistant is not None,
        )

    def _messages(self, values: Mapping[str, Any]) -> list[Message]:
        templates = self._templates
        if templates.messages is not None:
            return templates.rendered_messages(values)
        if templates.user is not None:
            messages: list[Message] = [{"role": "user", "content": templates.user.render(values)}]
        else:
            messages = list(values[templates.messages_column or "messages"])
        if templates.system is not None and messages and messages[0].get("role") != "system":
            messages.insert(0, {"role": "system", "content": templates.system.render(values)})
        return messages
