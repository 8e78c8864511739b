"""The job file as plain values, the line of each, and the mistakes found so far. Knows nothing of the fields."""

import re
from pathlib import Path
from typing import Any

import yaml

from batchgen import env
from batchgen.errors import JobFileError
from batchgen.job.places import FieldPath, Places
from batchgen.job.yaml12 import YamlMistake, compose, scalar_value

MAX_VALUES = 100_000  # aliases of aliases grow without bound
MAX_DEPTH = 50  # and an alias of itself has no end
_VARIABLE = re.compile(r"\$(\$\{)|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


class Document:
    """The values of one job file. Reading goes on after a mistake, so that all of them are told at once."""

    def __init__(self, path: Path) -> None:
        self.lines: dict[FieldPath, int] = {}
        self.places = Places(str(path), path.absolute().parent, self.lines)
        self.broken_fields: set[FieldPath] = set()
        self._mistakes: list[tuple[int, str]] = []
        self._num_values = 0
        self.values = self._read(path)

    def mistake(self, path: FieldPath, message: str, line: int | None = None) -> None:
        """Note what is wrong with a field, at its own line when no other is given."""
        line = self.places.line(path) if line is None else line
        self._mistakes.append((line, f"{self.places.where(path, line)}: {message}"))

    def broken(self, path: FieldPath, message: str, line: int | None = None) -> None:
        """Note a mistake that leaves the field with no value to check any further."""
        self.broken_fields.add(path)
        self.mistake(path, message, line)

    @property
    def mistakes(self) -> list[str]:
        """Every mistake so far, in the order of the file."""
        return [message for _, message in sorted(self._mistakes, key=lambda mistake: mistake[0])]

    def build(self, node: yaml.Node, path: FieldPath, line: int | None = None) -> Any:
        """The plain value of a node, its lines noted. `line` is given for values that come from elsewhere."""
        self.lines.setdefault(path, node.start_mark.line + 1 if line is None else line)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise YamlMistake(
                self.lines[path], f"more than {MAX_VALUES:,} values; remove aliases that repeat one another"
            )
        if len(path) > MAX_DEPTH:
            raise YamlMistake(self.lines[path], f"values nested more than {MAX_DEPTH} deep; flatten them")
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(node, path, line)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(child, (*path, index), line) for index, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        text = node.value if line is not None else self._substitute(node.value, path)
        try:
            return scalar_value(node, text)
        except ValueError as error:
            self.broken(path, str(error))
            return None

    def _build_mapping(self, node: yaml.MappingNode, path: FieldPath, line: int | None) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, child in node.value:
            here = key.start_mark.line + 1 if line is None else line
            if not isinstance(key, yaml.ScalarNode):
                self.broken(path, "a mapping in place of a name; put a template that begins with {{ in quotes", here)
                break
            field = (*path, key.value)
            if key.value in values:
                self.mistake(field, f"given twice, first in line {self.lines[field]}; keep one of them", here)
                continue
            self.lines[field] = here
            values[key.value] = self.build(child, field, line)
        return values

    def _substitute(self, text: str, path: FieldPath) -> str:
        """Put the environment's values in for `${NAME}` and `${NAME:-default}`; `$${` is a plain `${`."""

        def value(match: re.Match[str]) -> str:
            literal, name, default = match.groups()
            if literal:
                return "${"
            found = env.job_variable(name)
            if not found and default is not None:
                return str(default)
            if found is None:
                advice = f"set it, write ${{{name}:-default}}, or $${{{name}}} for the text itself"
                self.broken(path, f"the environment has no {name}; {advice}")
            return found or ""

        return _VARIABLE.sub(value, text)

    def _read(self, path: Path) -> dict[str, Any]:
        text = _read_text(path)
        try:
            node = compose(text)
            if isinstance(node, yaml.MappingNode):
                values: dict[str, Any] = self.build(node, ())
                return values
        except YamlMistake as error:
            raise JobFileError(f"{path}:{error.line}: {error.message}") from error
        what = "the file is empty" if node is None else "this is no mapping of fields"
        raise JobFileError(
            f"{path}:1: {what}; start with `version: 1`, then `model:`, `input:`, `prompt:` and `output:`"
        )


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise JobFileError(f"{path}: there is no such file; check the path of the job file") from error
    except OSError as error:
        raise JobFileError(f"{path}: can't be read ({error.strerror}); give the path of a job file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JobFileError(
            f"{path}:{line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error
