"""The parts of `generate` that are about more than one go at an answer: retries, votes, and thinking before it."""

import math
from typing import Annotated

from pydantic import Field

from batchgen.job.section import Section, Text
from batchgen.job.units import Multiple, parse_multiple

Times = Annotated[int, Field(ge=0, le=100)]


class RetryInvalid(Section):
    """Another go at an answer that does not fit what was asked for."""

    times: Times = 1
    """Most further attempts."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    """The temperature of those; the job's own when not given."""


class RetryLength(Section):
    """Another go at an answer that was cut."""

    times: Times = 1
    """Most further attempts."""
    max_tokens: Annotated[int, Field(ge=1)] | Multiple = "x2"
    """Longest answer of those: a number, or a multiple of the attempt before it."""

    def longer(self, max_tokens: int) -> int:
        """The longest answer after an attempt of `max_tokens` was cut."""
        wanted = self.max_tokens
        return wanted if isinstance(wanted, int) else math.ceil(max_tokens * parse_multiple(wanted))


class Retry(Section):
    """Which answers the model has another go at, in the same run. The last attempt is kept."""

    invalid: Times | RetryInvalid = 0
    """For an answer with status `invalid`."""
    length: Times | RetryLength = 0
    """For an answer with status `length`; twice as long each time when it is a number of attempts."""

    @property
    def on_invalid(self) -> RetryInvalid:
        """`invalid` as a mapping."""
        return self.invalid if isinstance(self.invalid, RetryInvalid) else RetryInvalid(times=self.invalid)

    @property
    def on_length(self) -> RetryLength:
        """`length` as a mapping."""
        return self.length if isinstance(self.length, RetryLength) else RetryLength(times=self.length)


class Vote(Section):
    """Among what of the answers a vote is taken."""

    field: Annotated[str, Field(pattern=r"^parsed(\.[^.]+)+$")]
    """A field of the column `parsed`: `parsed.label`, or one inside another, `parsed.order.state`."""


class Reasoning(Section):
    """How the thinking part of an answer is told from the rest."""

    start: Text | None = None
    """The text that begins it; the model's own when not given."""
    end: Text | None = None
    """The text that ends it."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of thinking: then its end is written for the model, which goes on with the answer."""
