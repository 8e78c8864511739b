"""`--set field.path=value`: values from the command line on top of the job file's."""

from typing import Any

from batchgen.job.document import Document
from batchgen.job.places import OVERRIDE_LINE, FieldPath, dotted, split_dotted
from batchgen.job.yaml12 import YamlMistake, compose


def override(document: Document, setting: str) -> None:
    """Apply one `field.path=value` to a document. The value is read as YAML; lists take an index as a step."""
    name, equals, text = setting.partition("=")
    path = split_dotted(name.strip())
    if not equals or "" in path:
        document.mistake((), f"{setting!r} sets nothing; write --set generate.max_tokens=8", OVERRIDE_LINE)
        return
    if not _has_place(document, path):
        return
    for line in [line for line in document.lines if line[: len(path)] == path]:
        del document.lines[line]
    for depth in range(1, len(path) + 1):
        document.lines.setdefault(path[:depth], OVERRIDE_LINE)
    try:
        node = compose(text)
        value = None if node is None else document.build(node, path, OVERRIDE_LINE)
    except YamlMistake as error:
        document.broken(path, error.message)
        return
    _put(document.values, path, value)


def _has_place(document: Document, path: FieldPath) -> bool:
    """Whether a value can go there. Sections on the way may be missing, other values may not be in the way."""
    spot: Any = document.values
    for depth, step in enumerate(path):
        if isinstance(spot, list):
            if not isinstance(step, int) or step >= len(spot):
                document.mistake(path, f"{dotted(path[:depth])} has the indexes 0 to {len(spot) - 1}", OVERRIDE_LINE)
                return False
            spot = spot[step]
        elif isinstance(spot, dict):
            spot = _section(spot, step)
        else:
            document.mistake(path, f"{dotted(path[:depth])} is a single value; set it as a whole", OVERRIDE_LINE)
            return False
    return True


def _put(values: dict[str, Any], path: FieldPath, value: Any) -> None:
    spot: Any = values
    for step in path[:-1]:
        if isinstance(spot, list):
            spot = spot[int(step)]
        else:
            section = _section(spot, step)
            spot[str(step)] = section
            spot = section
    if isinstance(spot, list):
        spot[int(path[-1])] = value
    else:
        spot[str(path[-1])] = value


def _section(values: dict[str, Any], step: str | int) -> Any:
    found = values.get(str(step))
    return {} if found is None else found
