"""From a request to the sequences that answer it, or to the reason why it can't be answered."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.config import Limits, num_pages
from batchgen.engine.kv_cache import common_pages, page_hashes
from batchgen.engine.request import Request, RequestError, SamplingParams
from batchgen.engine.sequence import Scores, Sequence, Tokens
from batchgen.engine.trie import make_tries

_CACHE_SIZE = 256  # kinds of targets: on most jobs all rows have the same


class Admission:
    """Checks requests against what the model and the engine can do, and makes their sequences."""

    def __init__(
        self, limits: Limits, *, vocab_size: int, num_tokens: int, eos_ids: frozenset[int], windowed: bool = False
    ) -> None:
        self._limits, self._vocab_size, self._num_tokens, self._eos_ids = limits, vocab_size, num_tokens, eos_ids
        self._windowed = windowed
        self._last_prompt, self._last_hashes = np.empty(0, np.int32), list[bytes]()

    def sequences(self, request: Request) -> list[Sequence] | RequestError:
        """The leaders of the request's sequences, each with its branches.

        There is one leader as long as all samples (or the trie of all targets) fit into the rows and pages of the
        engine at once; else there are several, of which the later ones share the prompt's pages. In a trie, tokens that
        are neighbours in the text lie apart, so a model with a window of attention gets its targets one by one.
        """
        prompt = _token_array(request.token_ids)
        if isinstance(prompt, RequestError):
            return prompt
        if error := self._check(request, prompt):
            return error
        all_pages = self._limits.num_pages - 1
        longest = _look_at(request.targets, self._num_tokens)[0] if request.targets else 0
        more = max(self._max_outputs(request, len(prompt)), longest, 1)
        # The last token of an answer or a target is never an input, so its KV is not needed.
        most = num_pages(len(prompt) + more - 1, self._limits.page_size)
        if most > all_pages:
            return RequestError(
                "out_of_memory",
                f"{len(prompt)} prompt tokens and {more} more need {most} pages of KV cache, but there are "
                f"{all_pages}: give the engine more KV memory, or lower max_tokens",
            )
        shared = len(prompt) // self._limits.page_size
        wave = min(self._limits.max_rows, max(1, (all_pages - shared) // max(1, most - shared)))
        hashes = self._page_hashes(prompt)
        if request.targets:
            leaders = self._scoring(request, prompt, hashes)
        else:
            leaders = self._sampling(request, prompt, hashes, wave)
        for leader in leaders[:-1]:
            leader.kept_tokens = len(prompt)
        for leader in leaders[1:]:
            leader.is_first = False
        leaders[-1].kept_tokens = request.shared_with_next
        return leaders

    def _page_hashes(self, prompt: Tokens) -> list[bytes]:
        """In a planned order most of them are those of the prompt before."""
        size = self._limits.page_size
        known = self._last_hashes[: common_pages(prompt, self._last_prompt, size)]
        self._last_prompt, self._last_hashes = prompt, page_hashes(prompt, size, known)
        return self._last_hashes

    def _sampling(self, request: Request, prompt: Tokens, hashes: list[bytes], wave: int) -> list[Sequence]:
        leaders = []
        for first in range(0, request.n, wave):
            samples = range(first, min(request.n, first + wave))
            leader, *branches = [self._sequence(request, sample, prompt, prompt, hashes) for sample in samples]
            leader.branches = branches
            leaders.append(leader)
        return leaders

    def _scoring(self, request: Request, prompt: Tokens, hashes: list[bytes]) -> list[Sequence]:
        """The prompt with a trie behind it; one for each trie when the targets need several."""
        count = len(request.targets)
        scores = Scores([()] * count, missing=count)
        room = min(self._limits.max_length, (self._limits.num_pages - 1) * self._limits.page_size) - len(prompt)
        leaders = []
        for targets, trie in make_tries(request.targets, room, chains_only=self._windowed):
            leader = self._sequence(request, 0, prompt, np.append(prompt, trie.tokens), hashes)
            leader.scores, leader.trie, leader.targets = scores, trie, targets
            leader.edge_logprobs = np.empty(len(trie.edge_ids))
            leaders.append(leader)
        return leaders

    def _sequence(self, request: Request, sample: int, prompt: Tokens, fill: Tokens, hashes: list[bytes]) -> Sequence:
        params = request.params
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        seq = Sequence(
            request=request,
            sample=sample,
            prompt_length=len(prompt),
            fill=fill,
            max_outputs=self._max_outputs(request, len(prompt)),
            eos_ids=eos_ids,
            stop_ids=eos_ids | frozenset(params.stop_token_ids),
            page_hashes=hashes,
            stop_check=request.stop_check() if request.stop_check and not request.targets else None,
        )
        if request.constraint is not None and not request.targets:
            seq.constrain(request.constraint.matcher())
        return seq

    def _max_outputs(self, request: Request, prompt_length: int) -> int:
        """`max_tokens`; where max_length cuts it anyway, what fits into the KV cache too."""
        if request.targets:
            return 0
        room = self._limits.max_length - prompt_length
        if request.params.max_tokens <= room:
            return request.params.max_tokens
        return min(room, max(1, (self._limits.num_pages - 1) * self._limits.page_size - prompt_length + 1))

    def _check(self, request: Request, prompt: Tokens) -> RequestError | None:
        if len(prompt) == 0:
            return RequestError("empty_prompt", "the prompt has no tokens: there is nothing to go on from")
        if error := _bad_token(prompt, self._vocab_size, "the prompt"):
            return error
        limit = self._limits.max_length
        if len(prompt) >= limit:
            return RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens, and max_length is {limit}: "
                f"at most {limit - 1} leave room for an answer",
            )
        return self._check_targets(request, len(prompt)) if request.targets else self._check_params(request)

    def _check_targets(self, request: Request, prompt_length: int) -> RequestError | None:
        longest, fit = _look_at(request.targets, self._num_tokens)
        if fit and prompt_length + longest <= self._limits.max_length:
            return None
        for index, target in enumerate(request.targets):
            if not target:
                return RequestError("bad_request", f"target {index} has no tokens")
            if error := _bad_token(np.array(target, np.int64), self._num_tokens, f"target {index}"):
                return error
            if prompt_length + len(target) > self._limits.max_length:
                return RequestError(
                    "prompt_too_long",
                    f"the prompt has {prompt_length} tokens and target {index} has {len(target)}: together more than "
                    f"max_length {self._limits.max_length}",
                )
        return None

    def _check_params(self, request: Request) -> RequestError | None:
        if request.n < 1:
            return RequestError("bad_request", f"n is {request.n}: ask for 1 sample or more")
        if problem := check_params(request.params):
            return RequestError("bad_request", problem)
        params = request.params
        if request.constraint and (
            request.stop_check or params.min_tokens or params.stop_token_ids or params.ignore_eos
        ):
            return RequestError(
                "bad_request",
                "a constraint ends an answer itself: it goes with no stop check, stop tokens, min_tokens or ignore_eos",
            )
        outside = [token for token in request.params.logit_bias if not 0 <= token < self._num_tokens]
        if outside:
            return RequestError(
                "bad_request", f"logit_bias names token {outside[0]}, but the model has {self._num_tokens}"
            )
        return None


@lru_cache(_CACHE_SIZE)
def _look_at(targets: tuple[tuple[int, ...], ...], num_tokens: int) -> tuple[int, bool]:
    """The length of the longest target, and whether all have tokens, of those that there are."""
    return max(map(len, targets)), all(target and min(target) >= 0 and max(target) < num_tokens for target in targets)


def check_params(params: SamplingParams) -> str | None:
    """What is wrong with sampling parameters, or None. Not-a-number is outside of every range."""
    for name, right, wanted in _RULES:
        if not right(params):
            return f"{name} is {getattr(params, name)}, but must be {wanted}"
    return None


_RULES: tuple[tuple[str, Callable[[SamplingParams], bool], str], ...] = (
    ("max_tokens", lambda p: p.max_tokens >= 1, "1 or more"),
    ("min_tokens", lambda p: 0 <= p.min_tokens <= p.max_tokens, "from 0 to max_tokens"),
    ("temperature", lambda p: 0 <= p.temperature < math.inf, "0 or more"),
    ("top_k", lambda p: p.top_k >= -1, "-1 or more"),
    ("top_p", lambda p: 0 < p.top_p <= 1, "above 0 and up to 1"),
    ("min_p", lambda p: 0 <= p.min_p <= 1, "from 0 to 1"),
    ("repetition_penalty", lambda p: 0 < p.repetition_penalty < math.inf, "above 0"),
    ("presence_penalty", lambda p: math.isfinite(p.presence_penalty), "a number"),
    ("frequency_penalty", lambda p: math.isfinite(p.frequency_penalty), "a number"),
    ("logit_bias", lambda p: all(map(math.isfinite, p.logit_bias.values())), "numbers"),
    ("logprobs", lambda p: p.logprobs is None or p.logprobs >= 0, "None, 0 or more"),
    ("seed", lambda p: -(2**63) <= p.seed < 2**64, "a number of 64 bits"),
)


def _token_array(token_ids: object) -> Tokens | RequestError:
    """The prompt as int32; an id that does not fit is no token of any model."""
    tokens = np.asarray(token_ids)
    if tokens.size == 0:
        return np.empty(0, np.int32)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return RequestError("bad_token", f"the prompt is no list of token ids: {tokens.dtype} of shape {tokens.shape}")
    if error := _bad_token(tokens, 2**31, "the prompt"):
        return error
    return tokens.astype(np.int32)


def _bad_token(tokens: npt.NDArray[np.integer[Any]], size: int, where: str) -> RequestError | None:
    bad = tokens[(tokens < 0) | (tokens >= size)]
    if bad.size == 0:
        return None
    return RequestError("bad_token", f"{where} holds token {bad[0]}, but the model has {size} tokens (0 to {size - 1})")
