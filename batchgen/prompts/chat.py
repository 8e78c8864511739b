"""A model's chat template, rendered as transformers renders it, in the sandbox of this package."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import Namespace

from batchgen.errors import JobFileError
from batchgen.prompts.budget import TemplateLimitError, TemplateLimits
from batchgen.prompts.failure import RowFailure
from batchgen.prompts.sandbox import RENDER_ERRORS, BoundedEnvironment
from batchgen.prompts.template import check_tree

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training; here it only passes text on."""

    tags = {"generation"}  # noqa: RUF012 - the type that Jinja declares

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_pass_on"), [], [], body)
        block.set_lineno(line)
        return block

    def _pass_on(self, caller: Macro) -> str:
        text: str = caller()
        return text


class _Dict:
    """The function `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """A dict with these keys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's namespace, without private names."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a chat template may not store the private name {name!r}")
        super().__setitem__(name, value)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


class ChatTemplate:
    """A compiled chat template.

    `place` names its file in messages, `variables` are the tokenizer's (`bos_token` and the like) and the job's own,
    `now` is what `strftime_now` says, so that a job which runs past midnight keeps its prompts. Raises JobFileError for
    a template that can't be compiled, reaches for Python's internals, or is over the limits for a chat of one message.
    """

    def __init__(
        self,
        source: str,
        place: str,
        limits: TemplateLimits,
        *,
        variables: Mapping[str, Any] | None = None,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.source = source
        self._variables = dict(variables or {})
        self._env = BoundedEnvironment(
            limits, trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        self._env.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda form: now().strftime(form),
            dict=_Dict(),
            namespace=_Namespace,
        )
        try:
            tree = self._env.parse(source)
            check_tree(tree, place)
            self._template = self._env.from_string(source)
        except TemplateSyntaxError as error:
            raise JobFileError(f"{place}: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise JobFileError(f"{place}: the template is nested too deeply") from error
        self.takes_parts = any(_names(loop.iter) == "content" for loop in tree.find_all(nodes.For))
        """Whether the template walks through a message's content, and so takes it as a list of parts."""
        self._try(place)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text that the model is given for a conversation.

        It ends where the answer starts: after the header of the assistant's turn, or, with `continue_final_message`,
        within the last message. Raises RowFailure with the template's own words.
        """
        try:
            return self._render(messages, tools, documents, continue_final_message)
        except RENDER_ERRORS as error:
            raise RowFailure("template_error", f"chat template: {error or type(error).__name__}") from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        documents: Sequence[Any] | None,
        continue_final_message: bool,
    ) -> str:
        if not messages:
            raise ValueError("the conversation is empty")
        # As transformers does: a null field is an absent one, and reasoning is found under each of its names.
        chat = [_with_reasoning({key: item for key, item in m.items() if item is not None}) for m in messages]
        final = _tag_final(chat, self.source) if continue_final_message else None
        text = self._env.render(
            self._template,
            {
                **self._variables,
                "messages": chat,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": not continue_final_message,
            },
        )
        return text if final is None else _cut_at_tag(text, final)

    def _try(self, place: str) -> None:
        try:
            self._render([{"role": "user", "content": "text"}], None, None, False)
        except (SecurityError, TemplateLimitError) as error:
            raise JobFileError(f"{place}: {error.message}") from error
        except RENDER_ERRORS:
            pass  # a template may want another conversation than this; rows will tell


def _names(node: nodes.Node) -> Any:
    """The last name in `a.b`, `a['b']` or `b`, filtered or not."""
    match node:
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)) | nodes.Name(name=name):
            return name
        case nodes.Filter(node=nodes.Node() as inner):
            return _names(inner)
    return None


def _with_reasoning(message: Message) -> Message:
    reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tag_final(chat: list[Message], source: str) -> str:
    """Mark the end of the last message's text; that text."""
    last = dict(chat[-1])
    if "content" not in source:
        raise ValueError("the template puts out no message content that an answer could continue")
    content = last.get("content")
    if isinstance(content, list):
        parts = [dict(part) for part in content]
        text_part = next((part for part in reversed(parts) if "text" in part), None)
        if text_part is None:
            raise ValueError("the last message has no text to continue")
        final = str(text_part["text"])
        text_part["text"] = final + _CONTINUE_TAG
        last["content"] = parts
    elif isinstance(content, str):
        final = content
        last["content"] = content + _CONTINUE_TAG
    else:
        raise ValueError("the last message has no text to continue")
    chat[-1] = last
    return final


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    if final.strip() not in text or tag not in text:
        raise ValueError("the template leaves out parts of the message that the answer should continue")
    place = text.rindex(tag)
    if text.startswith(_CONTINUE_TAG, place):
        return text[:place]
    return text[:place].rstrip()  # the template trims messages, so it would have trimmed this one
