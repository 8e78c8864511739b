"""Token ids back to text, byte by byte: no character is broken, no space is lost or cleaned up."""

import codecs
import json
import re
from collections.abc import Sequence

from batchgen.prompts.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer:
    """The bytes that each token stands for behind other text.

    An answer always follows a prompt, so a SentencePiece word keeps the space before it. Special tokens are left out
    with `skip_special_tokens`; other added tokens are text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend
        self._skipped = frozenset(tokenizer.special_tokens.values()) if skip_special_tokens else frozenset()
        spec = json.loads(tokenizer.backend.to_str())
        kinds = _decoder_kinds(spec.get("decoder"))
        self._added: dict[int, str] = {token["id"]: token["content"] for token in spec["added_tokens"]}
        self._is_byte_level = "ByteLevel" in kinds
        self._has_byte_tokens = "ByteFallback" in kinds
        self._has_word_marks = "Metaspace" in kinds or "Replace" in kinds
        self._by_id: dict[int, bytes] = {}

    def piece(self, token_id: int) -> bytes:
        """The bytes of one token; none for an id outside the vocabulary."""
        found = self._by_id.get(token_id)
        if found is None:
            found = self._by_id[token_id] = self._piece(token_id)
        return found

    def _piece(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None or token_id in self._skipped:
            return b""
        if token_id in self._added:
            return self._added[token_id].encode()
        if self._is_byte_level:
            known = [_BYTES.get(char) for char in token]
            return token.encode() if None in known else bytes(byte for byte in known if byte is not None)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return (token.replace("▁", " ") if self._has_word_marks else token).encode()

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of an answer: always valid UTF-8.

        A character that the end cuts off is left out. Bytes that are no UTF-8 become U+FFFD, one for each sequence that
        can't be a character's beginning (the rule of the Unicode standard, and of Python's and Rust's decoders).
        """
        return decode_utf8(b"".join(map(self.piece, token_ids)))


def decode_utf8(data: bytes) -> str:
    """Text of bytes, without the incomplete character at their end (if there is one)."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


def _decoder_kinds(decoder: object) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    return {str(decoder.get("type"))}.union(*(_decoder_kinds(inner) for inner in decoder.get("decoders", ())))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable Latin-1 stands for itself, the rest for letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()
