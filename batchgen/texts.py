"""From the tokens of a generated answer to its columns: text, thinking part, and whether it is what was asked for."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.request import Completion, StopCheck
from batchgen.errors import RowError
from batchgen.job.generate import Generate
from batchgen.prompts.reasoning import Split, Thinking
from batchgen.prompts.stop import Answer, StopStrings
from batchgen.prompts.text import Detokenizer
from batchgen.prompts.tokenizer import Tokenizer

_StopsKey = tuple[tuple[str, ...], bool, int, bool]
_MOST_STOPS = 256  # kinds of stop strings that are kept; rows may bring their own
_NO_THINKING = Split(None, 0, "", is_open=False)


class Texts:
    """Reads the answers of a job. `thinking` finds their thinking part; None where there is none to find."""

    def __init__(self, generate: Generate, tokenizer: Tokenizer, thinking: Thinking | None) -> None:
        self._tokenizer = tokenizer
        self._thinking = thinking
        self._expected = None if generate.expect is None else re.compile(generate.expect)
        self._detokenizers: dict[bool, Detokenizer] = {}
        self._stops: dict[_StopsKey, StopStrings] = {}

    @property
    def have_thinking(self) -> bool:
        """Whether answers have a thinking part."""
        return self._thinking is not None

    def thinking_of(self, token_ids: Sequence[int], *, opened: bool) -> tuple[tuple[int, ...], Sequence[int]]:
        """The tokens of an answer's thinking part, and those that the model has not written to end it."""
        split = self._split(token_ids, opened)
        if split.thought is None or self._thinking is None:
            return (), ()
        return tuple(token_ids), self._thinking.end_ids if split.is_open else ()

    def opens_thinking(self, prompt_ids: npt.NDArray[np.int32]) -> bool:
        """Whether a prompt has begun the thinking part of its answer."""
        return self._thinking is not None and self._thinking.opened_by(prompt_ids)

    def stop_strings(self, generate: Generate) -> StopStrings:
        """The stop strings of a row."""
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

    def stop_check(
        self, stops: StopStrings, *, opened: bool = False, behind_thinking: bool = False, apart: bool = False
    ) -> Callable[[], StopCheck] | None:
        """What the engine asks after each token; None where nothing has to be looked at while the answer grows.

        `apart`: the answer is asked for by a request of its own, behind the thinking part.
        """
        thinking = None if behind_thinking else self._thinking
        if thinking is not None and apart:
            return thinking.check(None, opened=opened)
        if thinking is not None and (stops.stops or thinking.budget is not None):
            return thinking.check(stops, opened=opened)
        return stops.check if stops.stops else None

    def columns(
        self,
        completion: Completion,
        stops: StopStrings,
        *,
        opened: bool,
        thought: Sequence[int] | None = None,
        apart: bool = False,
    ) -> dict[str, Any] | None:
        """The columns of an answer. None: this is its thinking part alone, and the answer is still to be asked for.

        So it is when the thinking has used up its tokens, and always with `apart`. `thought` are the tokens of the
        thinking part, when this is the answer behind it.
        """
        token_ids = completion.token_ids
        by_string = completion.finish_reason == "stop" and completion.stop_token_id is None
        split = self._split(token_ids if thought is None else thought, opened)
        first = split.first if thought is None else 0
        is_open = split.is_open and thought is None
        if thought is None and by_string and (is_open or apart):
            return None
        if thought is None and apart and split.thought is None and completion.finish_reason != "length":
            return None
        answer = stops.finish(token_ids[first:], is_stopped=by_string)
        text = answer.text if split.thought is None else (split.left_over + answer.text).lstrip()
        is_cut = completion.finish_reason in ("length", "error")
        return {
            **self._judged(None if is_open else text, is_cut=is_cut),
            "finish_reason": "length" if is_cut else completion.finish_reason,
            "output_tokens": len(thought or ()) + len(token_ids),
            "reasoning": split.thought,
            "reasoning_tokens": len(thought or ()) + first,
            "logprobs": self._logprobs(completion, first, answer),
        }

    def token(self, token_id: int, logprob: float) -> dict[str, Any]:
        """A token as the column `logprobs` has it."""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return {"token_id": token_id, "token": text, "logprob": logprob}

    def _split(self, token_ids: Sequence[int], opened: bool) -> Split:
        return _NO_THINKING if self._thinking is None else self._thinking.split(token_ids, opened=opened)

    def _judged(self, text: str | None, *, is_cut: bool) -> dict[str, Any]:
        """The text, and whether it is whole and what was asked for."""
        if is_cut:
            return {"status": "length", "output": text}
        if text is None:
            error = RowError("no_answer", "the model ended its answer while it was thinking")
        elif self._expected is not None and not self._expected.fullmatch(text.strip()):
            error = RowError("unexpected", f"the answer does not match generate.expect: {text.strip()!r:.100}")
        else:
            return {"status": "ok", "output": text}
        return {"status": "invalid", "output": text, "error": error}

    def _logprobs(self, completion: Completion, first: int, answer: Answer) -> list[dict[str, Any]] | None:
        if completion.logprobs is None:
            return None
        return [
            {**self.token(entry.token_id, entry.logprob), "top": [self.token(*other) for other in entry.top]}
            for entry in completion.logprobs[first : first + answer.num_tokens]
        ]

    def _detokenizer(self, skip_special_tokens: bool) -> Detokenizer:
        if skip_special_tokens not in self._detokenizers:
            self._detokenizers[skip_special_tokens] = Detokenizer(
                self._tokenizer, skip_special_tokens=skip_special_tokens
            )
        return self._detokenizers[skip_special_tokens]
