"""What one rendering may cost: steps, and the size of the texts it builds. Counted, so that the answer never varies."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateRuntimeError

STEPS_PER_SECOND = 500_000
CHARS_PER_STEP = 256  # building text is work too
CHARS_PER_ITEM = 8  # a list item is a pointer
CLOCK_EVERY = 64
MAX_INT_BITS = 2**16


class TemplateLimitError(TemplateRuntimeError):
    """A template would take more time or memory than the job allows."""


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """Each of `seconds` allows half a million steps and a second of the processor; `chars` is the longest text."""

    seconds: float = 2.0
    chars: int = 64 * 2**20


class Budget:
    """The account of one rendering. Every spending method raises TemplateLimitError when too little is left."""

    def __init__(self, limits: TemplateLimits) -> None:
        self._limits = limits
        self._steps_left = int(limits.seconds * STEPS_PER_SECOND)
        self._chars_left = limits.chars
        self._calls = 0
        self._deadline = time.thread_time() + limits.seconds

    def step(self, steps: int = 1) -> None:
        """Charge `steps` passes through a block or items of a sequence."""
        self._steps_left -= steps
        self._calls += 1
        if self._steps_left < 0:
            raise TemplateLimitError(
                f"the template runs more than {int(self._limits.seconds * STEPS_PER_SECOND):,} steps "
                "(limits.template_seconds)"
            )
        # The processor's clock only backs the count up: an honest template's step takes about a microsecond.
        if self._calls % CLOCK_EVERY == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(
                f"the template runs longer than {self._limits.seconds:g} s (limits.template_seconds)"
            )

    def put(self, chars: int) -> None:
        """Charge `chars` characters of output."""
        self._chars_left -= chars
        if self._chars_left < 0:
            self._too_long("puts out")

    def grow(self, chars: int) -> None:
        """Check a text of `chars` characters before it is built."""
        if chars > self._limits.chars:
            self._too_long("would build")
        self.step(1 + max(chars, 0) // CHARS_PER_STEP)

    def check_int(self, bits: int) -> None:
        """Check a whole number of `bits` bits before it is computed."""
        if bits > MAX_INT_BITS:
            raise TemplateLimitError(f"the template would compute a number of more than {MAX_INT_BITS:,} bits")

    def _too_long(self, verb: str) -> None:
        raise TemplateLimitError(
            f"the template {verb} a text of more than {self._limits.chars:,} characters (limits.template_chars)"
        )

    def measure(self, value: Any) -> int:
        """About how long `str(value)` is, without building it; every item looked at is a step."""
        size = 0
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str | bytes | bytearray):
                size += len(item)
            elif isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                pending.extend(item)
            elif isinstance(item, int):
                size += item.bit_length() // 3
            size += 2
            self.step()
            if size > self._limits.chars:
                self._too_long("would build")
        return size
