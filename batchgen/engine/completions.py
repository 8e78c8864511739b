"""From a sequence that ends to what the engine gives back."""

import math

from batchgen.engine.request import Completion, FinishReason, Request, RequestError
from batchgen.engine.sequence import Scores, Sequence

NON_FINITE = RequestError(
    "non_finite",
    "the model gave logits that are no finite numbers; try another dtype (float32) if this happens to many rows",
)


def completed(seq: Sequence, reason: FinishReason, token: int) -> Completion:
    """The completion of an answer that ends for `reason`, with this token."""
    if reason == "error":
        problem = (seq.matcher and seq.matcher.problem) or f"token {token} does not follow it"
        return failed(seq.request, seq.sample, RequestError("constraint", f"the grammar can't go on: {problem}"))
    ended_by_token = token in seq.stop_ids
    return Completion(
        request_id=seq.request.request_id,
        sample=seq.sample,
        token_ids=tuple(seq.outputs),
        finish_reason=reason,
        prompt_tokens=seq.prompt_length,
        cached_tokens=seq.cached_tokens,
        stop_token_id=token if ended_by_token else None,
        logprobs=None if seq.request.params.logprobs is None else tuple(seq.logprobs),
    )


def scored(seq: Sequence, scores: Scores) -> Completion:
    """The completion of a request whose targets are all scored."""
    finite = all(map(math.isfinite, (value for values in scores.values for value in values)))
    if not finite:
        return failed(seq.request, 0, NON_FINITE)
    return Completion(
        request_id=seq.request.request_id,
        sample=0,
        token_ids=(),
        finish_reason="stop",
        prompt_tokens=seq.prompt_length,
        cached_tokens=scores.cached_tokens,
        target_logprobs=tuple(scores.values),
    )


def failed(request: Request, sample: int, error: RequestError) -> Completion:
    """The completion of a sample that failed."""
    return Completion(
        request_id=request.request_id,
        sample=sample,
        token_ids=(),
        finish_reason="error",
        prompt_tokens=len(request.token_ids),
        cached_tokens=0,
        error=error,
    )
