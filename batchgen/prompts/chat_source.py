"""Where a model keeps its chat templates: files of their own, tokenizer_config.json, or the header of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from batchgen.errors import JobFileError

FILE = "chat_template.jinja"
FOLDER = "additional_chat_templates"


class ChatSource(NamedTuple):
    """The text of a chat template, and the file that it came from."""

    text: str
    place: str


class ChatTemplates(NamedTuple):
    """All chat templates of one model by name; `place` is the model's folder or file."""

    by_name: Mapping[str, ChatSource]
    place: str

    def choose(self, *, tools: bool) -> ChatSource:
        """The one for tools when there are tools, else the default. Raises JobFileError when there is none."""
        if tools and "tool_use" in self.by_name:
            return self.by_name["tool_use"]
        if "default" in self.by_name:
            return self.by_name["default"]
        others = f" called 'default' (there are: {', '.join(sorted(self.by_name))})" if self.by_name else ""
        raise JobFileError(
            f"{self.place} has no chat template{others}. Give one with `prompt.chat_template: FILE`, "
            "or use `prompt.text` for a model that is not made for chats"
        )


def read_chat_template(path: Path) -> ChatSource:
    """A chat template in a file of the job's own. Raises JobFileError."""
    try:
        return ChatSource(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"prompt.chat_template: {path} can't be read: {error}") from error


def folder_chat_templates(folder: Path, config: Mapping[str, Any]) -> ChatTemplates:
    """The templates of a model folder. Files win over `config`, the content of tokenizer_config.json."""
    files = {"default": folder / FILE} if (folder / FILE).is_file() else {}
    files.update({path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))})
    if files:
        return ChatTemplates({name: read_chat_template(path) for name, path in files.items()}, str(folder))
    place = str(folder / "tokenizer_config.json")
    found = config.get("chat_template")
    if found is None and (folder / "chat_template.json").is_file():  # the older place of multimodal models
        place = str(folder / "chat_template.json")
        found = json.loads((folder / "chat_template.json").read_text(encoding="utf-8")).get("chat_template")
    match found:
        case str():
            by_name = {"default": ChatSource(found, place)}
        case list():
            by_name = {item["name"]: ChatSource(item["template"], place) for item in found}
        case dict():
            by_name = {name: ChatSource(text, place) for name, text in found.items()}
        case _:
            by_name = {}
    return ChatTemplates(by_name, str(folder))
