"""The engine's border: what it is given and what it gives back. Token ids only."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

FinishReason = Literal["eos", "stop", "length", "error"]
TokenIds = Sequence[int] | npt.NDArray[np.integer]

StopCheck = Callable[[Sequence[int]], int | None]
"""Called with all output token ids after each new token. Returns how many of them to keep when the answer ends here, or
None to go on. Stop strings live above the engine as one of these; each sample gets a fresh one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn, in the order grammar, logit bias, min_tokens, penalties, temperature, top-k, top-p, min-p.

    Logprobs are of the raw logits, before all of it. `temperature` below 1e-5 is greedy, and ties go to the lowest id.
    Noise depends on (seed, sample, position, token id) alone.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0 and -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: of the token itself and the k likeliest


class Matcher(Protocol):
    """Where one answer stands in its grammar. Ends of sequence are no tokens of an answer: they are never accepted."""

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""

    @property
    def is_complete(self) -> bool:
        """Whether the answer must end here: it is whole, and no token may follow."""

    @property
    def problem(self) -> str | None:
        """What went wrong, such as a grammar that became too complex. Such a matcher accepts nothing more."""

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens. False when they are not allowed."""

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens."""

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next, as far as there is no choice. They are not accepted yet."""


class Constraint(Protocol):
    """A grammar that answers follow, compiled for the model's vocabulary."""

    def matcher(self) -> Matcher:
        """A matcher at the start of an answer."""

    def accept_tokens(self, tokens: Sequence[tuple[Matcher, int]]) -> list[bool]:
        """Let each matcher go on by one token, all of them at once. Whether it is allowed; else the matcher has failed.

        The matchers may come from any constraints of the same kind.
        """

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: npt.NDArray[np.int32]) -> None:
        """Write the allowed next tokens of each matcher, ends of sequence among them, into its row of masks[R, W].

        Token t is bit t % 32 of word t // 32. The matchers may come from any constraints of the same kind.
        """


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer. With `targets`, nothing is generated: each target's log-probability after the prompt is.

    With a `constraint`, only tokens that it allows are drawn, and the answer ends where it is complete.
    `shared_with_next` is how many of its first tokens the next request begins with too. Their KV is kept for that one.
    A request that comes between two of a planned order is not `in_order`: what is kept stays kept.
    """

    request_id: Hashable
    token_ids: TokenIds
    params: SamplingParams = SamplingParams()
    n: int = 1
    stop_check: Callable[[], StopCheck] | None = None
    targets: tuple[tuple[int, ...], ...] = ()
    constraint: Constraint | None = None
    shared_with_next: int = 0
    in_order: bool = True


class TokenLogprob(NamedTuple):
    """Log-probability of one output token, and of the likeliest alternatives at its place, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class RequestError(NamedTuple):
    """Why a request failed alone.

    `kind` is `prompt_too_long`, `bad_token`, `empty_prompt`, `bad_request`, `non_finite`, `constraint` or
    `out_of_memory`.
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished sample of a request. `token_ids` leaves out the end-of-sequence token that ended it (when one did).

    `stop_token_id` is the eos or stop token that ended it. For a request with targets, `target_logprobs[i][j]` is the
    log-probability of token j of target i, and the finish reason is "stop". `cached_tokens` are prompt tokens whose KV
    was not computed for this request.
    """

    request_id: Hashable
    sample: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    target_logprobs: tuple[tuple[float, ...], ...] | None = None
    error: RequestError | None = None
