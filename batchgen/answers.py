"""Between prompts and the engine: what the engine is asked for a row, and the output rows that its answers become."""

import math
import struct
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from batchgen.constraints import Constraints
from batchgen.data.rows import OutputRow, Status
from batchgen.engine.request import Completion, Constraint, Request, SamplingParams
from batchgen.errors import InternalError, RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Job
from batchgen.labels import Labeller
from batchgen.prompts.builder import PromptResult
from batchgen.prompts.reasoning import Thinking
from batchgen.prompts.stop import StopStrings
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.retries import attempt_seed, next_attempt
from batchgen.row_params import brings_seed, row_generate
from batchgen.texts import Texts
from batchgen.votes import voted
from batchgen.windows import PlannedPrompt


@dataclass(slots=True)
class _Asked:
    """A row that the engine is busy with, and those that get the same answer. `generate` is what it asks for first."""

    prompt: PromptResult
    merged: tuple[PromptResult, ...]
    generate: Generate
    seed: int
    constraint: Constraint | None
    opened: bool
    """The prompt has begun the thinking part of the answer."""
    samples_left: int
    held: list[OutputRow] = field(default_factory=list)
    """Finished samples that wait for the others: a vote is taken among all."""


@dataclass(slots=True)
class _Turn:
    """A request that is with the engine: the first one of a row for all its samples, a later one for one of them."""

    asked: _Asked
    generate: Generate
    stops: StopStrings
    left: int
    """Samples that have not come back."""
    first_sample: int = 0
    endings: tuple[Status, ...] = ()
    """How the attempts before this one ended."""
    thought: tuple[int, ...] | None = None
    """Tokens of a thinking part that was ended for the model: this request is for the answer behind it."""


class Answers:
    """Keeps the rows that are with the engine. `carried` picks a row's values for the output.

    `constraints` are what answers have to follow, `prior` is what calibrated choices are corrected by, and `thinking`
    finds the thinking part of answers.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        carried: Callable[[Mapping[str, Any]], dict[str, Any]],
        constraints: Constraints,
        prior: tuple[float, ...] | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        self._job = job
        self._labeller = Labeller(job.generate, prior)
        self._carried = carried
        self._texts = Texts(job.generate, tokenizer, thinking)
        self._constraints = constraints
        self._params = _params(job.generate)
        self._stops = self._texts.stop_strings(job.generate)
        self._turns: dict[Hashable, _Turn] = {}

    def ask(self, planned: PlannedPrompt) -> Request | list[OutputRow]:
        """The request for a row; or its output rows at once, when there is nothing to ask."""
        prompt = planned.prompt
        if prompt.error is not None:
            return self._without_answer(prompt, prompt.error, "skipped" if prompt.skipped else "error")
        row = prompt.row.index
        generate, params, stops = self._job.generate, self._params, self._stops
        seed = row_seed(generate.seed, row)
        own = row_generate(self._job, prompt)
        if isinstance(own, RowError):
            return self._without_answer(prompt, own, "error")
        if own is not generate:
            generate, params, stops = own, _params(own), self._texts.stop_strings(own)
            seed = own.seed if brings_seed(self._job, prompt) else seed
        constraint = self._constraints.of(generate)
        if isinstance(constraint, RowError):
            return self._without_answer(prompt, constraint, "error")
        assert prompt.token_ids is not None
        opened = self._texts.opens_thinking(prompt.token_ids)
        asked = _Asked(prompt, planned.merged, generate, seed, constraint, opened, samples_left=generate.n)
        self._turns[row] = _Turn(asked, generate, stops, left=generate.n)
        return Request(
            request_id=row,
            token_ids=prompt.token_ids,
            params=replace(params, seed=seed),
            n=generate.n,
            stop_check=self._texts.stop_check(stops, opened=opened, apart=constraint is not None),
            targets=prompt.choices,
            constraint=None if self._texts.have_thinking else constraint,
            shared_with_next=planned.shared_with_next,
        )

    def finish(self, completion: Completion) -> list[OutputRow] | Request:
        """The output rows of a completion: the row's own, then those of the rows that were merged into it.

        With a vote they come all at once, with the last sample. Nothing was computed for the merged ones. A Request
        is what to ask next instead: another attempt, or the answer behind a thinking part that was ended. Raises
        InternalError for a completion that was not asked for.
        """
        turn = self._turns.get(completion.request_id)
        if turn is None:
            raise InternalError(
                f"row {completion.request_id} came back from the engine, but was not asked for or came before"
            )
        turn.left -= 1
        if turn.left == 0:
            del self._turns[completion.request_id]
        asked, sample = turn.asked, turn.first_sample + completion.sample
        fields = self._fields(turn, completion)
        if fields is None:
            return self._behind_thinking(turn, sample, completion)
        endings = (*turn.endings, fields["status"])
        is_cut_short = fields.get("output_tokens", 0) < (turn.generate.max_tokens or 0)
        again = next_attempt(asked.generate, endings, has_room=not is_cut_short)
        if again is not None:
            return self._again(asked, sample, again, endings)
        asked.samples_left -= 1
        rows = self._rows(asked, sample, completion.cached_tokens, {**fields, "attempts": len(endings)})
        vote = asked.generate.vote
        if vote is None:
            return rows
        asked.held += rows
        return [] if asked.samples_left else voted(asked.held, vote)

    def _fields(self, turn: _Turn, completion: Completion) -> dict[str, Any] | None:
        """What came of a request; None for a thinking part that is to be ended."""
        asked, error = turn.asked, completion.error
        if completion.target_logprobs is not None:
            return self._scored(asked, completion.target_logprobs)
        # Behind a thinking part there may be no room for an answer: it is cut.
        if error is not None and (turn.thought is None or error.kind not in ("prompt_too_long", "out_of_memory")):
            return {"status": "error", "error": RowError(*error)}
        apart = asked.constraint is not None and self._texts.have_thinking
        columns = self._texts.columns(completion, turn.stops, opened=asked.opened, thought=turn.thought, apart=apart)
        if columns is not None and columns["status"] == "ok" and asked.generate.json_schema is not None:
            columns |= self._constraints.parsed(columns["output"])
        return columns

    def _rows(self, asked: _Asked, sample: int, cached_tokens: int, fields: Mapping[str, Any]) -> list[OutputRow]:
        prompt_tokens = 0 if asked.prompt.token_ids is None else len(asked.prompt.token_ids)
        return [
            OutputRow(
                row=prompt.row.index,
                sample=sample,
                prompt_tokens=prompt_tokens,
                cached_tokens=min(cached_tokens, prompt_tokens) if prompt is asked.prompt else prompt_tokens,
                truncated_tokens=prompt.truncated_tokens,
                carried=self._carried(prompt.row.values),
                **fields,
            )
            for prompt in (asked.prompt, *asked.merged)
        ]

    def _again(self, asked: _Asked, sample: int, generate: Generate, endings: tuple[Status, ...]) -> Request:
        """Another attempt at a sample, with noise of its own."""
        seed = attempt_seed(asked.seed, sample, len(endings))
        turn = _Turn(asked, generate, self._texts.stop_strings(generate), 1, sample, endings)
        return self._one_more(turn, np.asarray(asked.prompt.token_ids), generate.max_tokens, seed)

    def _behind_thinking(self, turn: _Turn, sample: int, completion: Completion) -> Request:
        """The answer behind a thinking part; one that has used up its tokens gets its end written for the model."""
        thought, end = self._texts.thinking_of(completion.token_ids, opened=turn.asked.opened)
        ids = np.concatenate((np.asarray(turn.asked.prompt.token_ids), thought, end)).astype(np.int32)
        longest = turn.generate.max_tokens
        seed = attempt_seed(turn.asked.seed, sample, len(turn.endings), part=1)
        rest = _Turn(turn.asked, turn.generate, turn.stops, 1, sample, turn.endings, thought)
        return self._one_more(rest, ids, None if longest is None else max(1, longest - len(thought)), seed)

    def _one_more(self, turn: _Turn, ids: npt.NDArray[Any], max_tokens: int | None, seed: int) -> Request:
        behind_thinking = turn.thought is not None
        request_id = (turn.asked.prompt.row.index, turn.first_sample, len(turn.endings), behind_thinking)
        self._turns[request_id] = turn
        return Request(
            request_id=request_id,
            token_ids=ids,
            params=replace(_params(turn.generate.model_copy(update={"max_tokens": max_tokens})), seed=seed),
            stop_check=self._texts.stop_check(
                turn.stops,
                opened=turn.asked.opened,
                behind_thinking=behind_thinking,
                apart=turn.asked.constraint is not None,
            ),
            constraint=turn.asked.constraint if behind_thinking or not self._texts.have_thinking else None,
            in_order=False,
        )

    def _without_answer(self, prompt: PromptResult, error: RowError, status: Any) -> list[OutputRow]:
        carried = self._carried(prompt.row.values)
        samples = range(self._job.generate.n)
        return [OutputRow(prompt.row.index, sample, status, error=error, carried=carried) for sample in samples]

    def _scored(self, asked: _Asked, logprobs: tuple[tuple[float, ...], ...]) -> dict[str, Any]:
        """The label among several choices; or the score of one text."""
        if asked.generate.choices is not None:
            columns = self._labeller.columns(asked.prompt.labels, logprobs)
            return {"status": "ok", "output": columns["label"], "finish_reason": "choice", **columns}
        (text,), (ids,), (values,) = asked.prompt.labels, asked.prompt.choices, logprobs
        tokens = [{**self._texts.token(i, value), "top": []} for i, value in zip(ids, values, strict=True)]
        return {
            "status": "ok",
            "output": text,
            "finish_reason": "score",
            "score": math.fsum(values),
            "score_mean": math.fsum(values) / len(values),
            "logprobs": tokens if asked.generate.logprobs is not None else None,
        }


def row_seed(seed: int, row: int) -> int:
    """Seed of a row's noise, from the job's seed and the row's index."""
    return xxhash.xxh3_64_intdigest(struct.pack("<qq", seed, row)) >> 1


def _params(generate: Generate) -> SamplingParams:
    return SamplingParams(
        max_tokens=2**31 if generate.max_tokens is None else generate.max_tokens,
        min_tokens=generate.min_tokens,
        temperature=generate.temperature,
        top_k=generate.top_k,
        top_p=generate.top_p,
        min_p=generate.min_p,
        repetition_penalty=generate.repetition_penalty,
        presence_penalty=generate.presence_penalty,
        frequency_penalty=generate.frequency_penalty,
        logit_bias=generate.logit_bias,
        seed=generate.seed,
        stop_token_ids=tuple(generate.stop_token_ids),
        ignore_eos=generate.ignore_eos,
        logprobs=generate.logprobs,
    )
