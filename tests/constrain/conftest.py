"""A vocabulary of bytes, and whether a text follows a grammar."""

import json
from typing import Any

import pytest

from batchgen.constrain.grammar import Grammar
from batchgen.constrain.guidance import GuidanceCompiler
from tests.conftest import byte_tokenizer

EOS = 258


class Follows:
    """Texts against grammars, token by token."""

    def __init__(self) -> None:
        tokenizer = byte_tokenizer()
        self.tokenizer = tokenizer
        self.compiler = GuidanceCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [EOS])

    def text(self, grammar: Grammar, text: str) -> bool:
        """Whether the grammar allows the whole text, and an end behind it."""
        matcher = self.compiler.compile(grammar).matcher()
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return matcher.accept(ids) and matcher.is_accepting

    def value(self, schema: Any, value: Any) -> bool:
        """Whether the schema allows a value, written as answers are."""
        return self.text(Grammar("json_schema", json.dumps(schema)), json.dumps(value, ensure_ascii=False))


@pytest.fixture(scope="session")
def follows() -> Follows:
    """See Follows."""
    return Follows()
