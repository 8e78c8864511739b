"""Between prompts and the engine: what the engine is asked for a row, and the output rows that its answers become."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

from batchgen.data.rows import OutputRow
from batchgen.engine.request import Completion, Request, SamplingParams
from batchgen.errors import InternalError, RowError
from batchgen.job.generate import Generate
from batchgen.job.spec import Job
from batchgen.labels import Labeller
from batchgen.prompts.builder import PromptResult
from batchgen.prompts.stop import Answer, StopStrings
from batchgen.prompts.text import Detokenizer
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.row_params import brings_seed, row_generate
from batchgen.votes import voted
from batchgen.windows import PlannedPrompt

_StopsKey = tuple[tuple[str, ...], bool, int, bool]
_MOST_STOPS = 256  # kinds of stop strings that are kept; rows may bring their own


@dataclass(slots=True)
class _Asked:
    """A row that the engine is busy with, and those that get the same answer."""

    prompt: PromptResult
    merged: tuple[PromptResult, ...]
    generate: Generate
    stops: StopStrings
    samples_left: int
    held: list[OutputRow] = field(default_factory=list)
    """Finished samples that wait for the others: a vote is taken among all."""


class Answers:
    """Keeps the rows that are with the engine. `carried` picks a row's values for the output.

    `prior` is what calibrated choices are corrected by.
    """

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        carried: Callable[[Mapping[str, Any]], dict[str, Any]],
        prior: tuple[float, ...] | None = None,
    ) -> None:
        self._job = job
        self._labeller = Labeller(job.generate, prior)
        self._carried = carried
        self._tokenizer = tokenizer
        self._params = _params(job.generate)
        self._detokenizers: dict[bool, Detokenizer] = {}
        self._stops: dict[_StopsKey, StopStrings] = {}
        self._job_stops = self._stop_strings(job.generate)
        self._asked: dict[int, _Asked] = {}

    def ask(self, planned: PlannedPrompt) -> Request | list[OutputRow]:
        """The request for a row; or its output rows at once, when there is nothing to ask."""
        prompt = planned.prompt
        if prompt.error is not None:
            return self._without_answer(prompt, prompt.error, "skipped" if prompt.skipped else "error")
        row = prompt.row.index
        generate, params, stops = self._job.generate, self._params, self._job_stops
        seed = row_seed(generate.seed, row)
        own = row_generate(self._job, prompt)
        if isinstance(own, RowError):
            return self._without_answer(prompt, own, "error")
        if own is not generate:
            generate, params, stops = own, _params(own), self._stop_strings(own)
            seed = own.seed if brings_seed(self._job, prompt) else seed
        self._asked[row] = _Asked(prompt, planned.merged, generate, stops, generate.n)
        assert prompt.token_ids is not None
        return Request(
            request_id=row,
            token_ids=prompt.token_ids,  # type: ignore[arg-type]  # an array is no Sequence by name
            params=replace(params, seed=seed),
            n=generate.n,
            stop_check=stops.check if stops.stops else None,
            targets=prompt.choices,
            shared_with_next=planned.shared_with_next,
        )

    def finish(self, completion: Completion) -> list[OutputRow]:
        """The output rows of a completion: the row's own, then those of the rows that were merged into it.

        With a vote they come all at once, with the last sample.
        Nothing was computed for the merged ones. Raises InternalError for a completion that was not asked for.
        """
        asked = self._asked.get(completion.request_id) if isinstance(completion.request_id, int) else None
        if asked is None:
            raise InternalError(
                f"row {completion.request_id} came back from the engine, but was not asked for or came before"
            )
        asked.samples_left -= 1
        if asked.samples_left == 0:
            del self._asked[asked.prompt.row.index]
        fields: dict[str, Any]
        if completion.error is not None:
            fields = {"status": "error", "error": RowError(*completion.error)}
        elif completion.target_logprobs is not None:
            fields = self._scored(asked, completion.target_logprobs)
        else:
            fields = self._text(asked, completion)
        rows = [
            OutputRow(
                row=prompt.row.index,
                sample=completion.sample,
                prompt_tokens=completion.prompt_tokens,
                cached_tokens=completion.cached_tokens if prompt is asked.prompt else completion.prompt_tokens,
                truncated_tokens=prompt.truncated_tokens,
                carried=self._carried(prompt.row.values),
                **fields,
            )
            for prompt in (asked.prompt, *asked.merged)
        ]
        if asked.generate.vote is None:
            return rows
        asked.held += rows
        return [] if asked.samples_left else voted(asked.held)

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
        tokens = [{**self._token(i, value), "top": []} for i, value in zip(ids, values, strict=True)]
        return {
            "status": "ok",
            "output": text,
            "finish_reason": "score",
            "score": math.fsum(values),
            "score_mean": math.fsum(values) / len(values),
            "logprobs": tokens if asked.generate.logprobs is not None else None,
        }

    def _text(self, asked: _Asked, completion: Completion) -> dict[str, Any]:
        by_string = completion.finish_reason == "stop" and completion.stop_token_id is None
        answer = asked.stops.finish(completion.token_ids, is_stopped=by_string)
        return {
            "status": "length" if completion.finish_reason == "length" else "ok",
            "output": answer.text,
            "finish_reason": completion.finish_reason,
            "output_tokens": len(completion.token_ids),
            "logprobs": self._logprobs(completion, answer),
        }

    def _logprobs(self, completion: Completion, answer: Answer) -> list[dict[str, Any]] | None:
        if completion.logprobs is None:
            return None
        return [
            {**self._token(entry.token_id, entry.logprob), "top": [self._token(*other) for other in entry.top]}
            for entry in completion.logprobs[: answer.num_tokens]
        ]

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token_id": token_id, "token": text, "logprob": logprob}

    def _stop_strings(self, generate: Generate) -> StopStrings:
        key = (tuple(generate.stop), generate.include_stop, generate.min_tokens, generate.skip_special_tokens)
        found = self._stops.get(key)
        if found is None:
            if len(self._stops) >= _MOST_STOPS:
                self._stops.clear()
            detokenizer = self._detokenizer(generate.skip_special_tokens)
            found = self._stops[key] = StopStrings(
                generate.stop, detokenizer, include_stop=generate.include_stop, min_tokens=generate.min_tokens
            )
        return found

    def _detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        if skip_special_tokens not in self._detokenizers:
            self._detokenizers[skip_special_tokens] = Detokenizer(
                self._tokenizer, skip_special_tokens=skip_special_tokens
            )
        return self._detokenizers[skip_special_tokens]


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
