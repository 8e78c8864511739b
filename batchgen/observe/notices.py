"""Log records as lines for people: a kind of message is shown once, and from then on counted."""

import logging
from collections.abc import Callable

MOST_KINDS = 50


class Notices(logging.Handler):
    """Shows each record through `write`. Records of one kind have the same text before its arguments are put in."""

    def __init__(self, write: Callable[[str], None], level: int = logging.WARNING) -> None:
        super().__init__(level)
        self._write = write
        self._repeats: dict[tuple[str, object], int] = {}
        self._last: dict[tuple[str, object], str] = {}
        self._unshown = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Show the first of its kind; count the others."""
        kind = (record.name, record.msg)
        if kind in self._repeats:
            self._repeats[kind] += 1
            self._last[kind] = _line(record)
        elif len(self._repeats) < MOST_KINDS:
            self._repeats[kind] = 0
            self._write(_line(record))
        else:
            self._unshown += 1

    def summarise(self) -> None:
        """Say how often the messages came again, and forget them."""
        for kind, count in self._repeats.items():
            if count:
                self._write(f"{self._last[kind]} (and {count:,} like it before)")
        if self._unshown:
            self._write(f"warning: {self._unshown:,} more messages are not shown")
        self._repeats.clear()
        self._last.clear()
        self._unshown = 0


def _line(record: logging.LogRecord) -> str:
    text = " ".join(record.getMessage().split())
    return f"{record.levelname.lower()}: {text}"
