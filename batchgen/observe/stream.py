"""A text stream that never ends the job: once it can't be written to, it is silent."""

import os
import sys
from typing import Any, TextIO


class QuietStream:
    """Passes text on to `stream` until that is closed, broken or gone; then drops it. None drops everything."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        """How the stream encodes text."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def write(self, text: str) -> int:
        """Write and flush."""
        if self._stream is None:
            return len(text)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up(self._stream)
        return len(text)

    def flush(self) -> None:
        """Nothing: `write` has done it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)  # fileno, which tells the width of a terminal

    def _give_up(self, stream: TextIO) -> None:
        self._stream = None
        if stream is sys.stderr:
            # What is left in its buffer would fail once more when Python ends, and change the exit code.
            sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the end
