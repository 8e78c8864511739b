"""YAML 1.2 scalars on PyYAML's parser, with line numbers: `no` is text, `1e-3` is a number, and 010 is ten.

PyYAML alone follows YAML 1.1, where a label `no` turns into false and 1e-3 into text.
"""

import re

import yaml

_CORE = "tag:yaml.org,2002:"
_PLAIN = {
    "null": re.compile(r"(?:null|Null|NULL|~|)$"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}

# What PyYAML says, and what a person should do about it. The first match counts.
_ADVICE = (
    (r"found character '\\t'", "a tab; indent with spaces"),
    (r"found character '%'", "a value can't begin with %; put the template in quotes"),
    (r"found character '[@`]'", "a value can't begin with @ or `; put the text in quotes"),
    (
        r"mapping values are not allowed",
        "a second `: ` in one value, or a line indented too far; put the text in quotes",
    ),
    (r"expected a single document", "a second document (---) in the file; write one job per file"),
    (r"found undefined alias", "an alias (*name) without its anchor (&name); put text that begins with * in quotes"),
    (r"unexpected end of stream", "a quote that is never closed; close it"),
    (
        r"expected ',' or '[\]}]'",
        "a bracket that is never closed; close it, or put a template that begins with {{ in quotes",
    ),
    (
        r"expected (<block end>|'<document start>').*'<scalar>'",
        "text after the end of a value; put the whole value in quotes",
    ),
    (r"expected <block end>", "the indentation does not fit the lines above; align the fields of a section"),
    (
        r"could not find expected ':'",
        "a line that is no `field: value`; write a colon and a space after the field's name",
    ),
)


class YamlMistake(Exception):  # noqa: N818 - a message on its way to the list of mistakes
    """The text is no YAML."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the plain scalars of YAML 1.2 in place of its own."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name


for _name, _pattern in _PLAIN.items():
    _Loader.add_implicit_resolver(_CORE + _name, _pattern, None)


def compose(text: str) -> yaml.Node | None:
    """The tree of one YAML document; None when there is nothing in it. Raises YamlMistake."""
    try:
        return _Loader(text).get_single_node()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlMistake(line, f"a control character (U+{error.character:04X}); remove it") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = f"{error.context or ''} {error.problem or ''}".strip()
        advice = next(
            (text for pattern, text in _ADVICE if re.search(pattern, problem)),
            f"no YAML: {problem}; put text in quotes",
        )
        raise YamlMistake(mark.line + 1 if mark else 1, advice) from error
    except RecursionError as error:
        raise YamlMistake(1, "brackets nested too deeply; flatten them") from error


def scalar_value(node: yaml.ScalarNode, text: str) -> str | int | float | bool | None:
    """The value of a scalar whose text is now `text`: the node's own, or what substitution made of it.

    Raises ValueError for a tag that is not of YAML's core, and for text that its tag does not fit.
    """
    tag = node.tag.removeprefix(_CORE)
    if node.style is None and tag == _plain_tag(node.value):
        tag = _plain_tag(text)
    match tag:
        case "str":  # JSON writes a character beyond the first 65,536 as two escapes
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
        case "float":
            return float(re.sub(r"\.(?=[in])", "", text.lower()))
    raise ValueError(f"the tag {node.tag} means nothing here; remove it")


def _plain_tag(text: str) -> str:
    """What a text without quotes is."""
    return next((name for name, pattern in _PLAIN.items() if pattern.match(text)), "str")
