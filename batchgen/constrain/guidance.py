"""Constraints by llguidance: a grammar compiled once, and a matcher for each answer."""

import os
from collections.abc import Iterable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.numpy import fill_next_token_bitmask_par

from batchgen.constrain.grammar import Grammar
from batchgen.engine.request import Matcher

_SILENT = 0
_MOST_THREADS = 8


class GuidanceMatcher:
    """An answer's place in its grammar. `root` numbers those whose matchers share what they learn."""

    def __init__(self, matcher: llguidance.LLMatcher, root: int) -> None:
        self.inner = matcher
        self.root = root

    @property
    def is_accepting(self) -> bool:
        """Whether the answer may end here."""
        return bool(self.inner.is_accepting())

    @property
    def is_complete(self) -> bool:
        """Whether the answer must end here."""
        return bool(self.inner.is_stopped() and self.inner.is_accepting())

    @property
    def problem(self) -> str | None:
        """What went wrong, such as a grammar that became too complex."""
        error = self.inner.get_error().strip().split("\n", 1)[0]
        return error or None

    def accept(self, token_ids: Sequence[int]) -> bool:
        """Go on by these tokens. False when they are not allowed."""
        return bool(self.inner.consume_tokens(token_ids))

    def rollback(self, num_tokens: int) -> None:
        """Go back by so many tokens."""
        self.inner.rollback(num_tokens)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next: those in which the tokenizer would write the text that must come."""
        return list(self.inner.compute_ff_tokens())


class GuidanceConstraint:
    """A compiled grammar. Copies of one matcher share what they learn of it, and wait for one another.

    So there are several to copy in turn, for threads that make masks.
    """

    def __init__(self, tokenizer: llguidance.LLTokenizer, grammar: str, executor: "llguidance.LLExecutor") -> None:
        self._executor = executor
        self._roots = [_compiled(tokenizer, grammar) for _ in range(_num_threads())]
        self._turn = 0
        self.error: str | None = self._roots[0].get_error().strip() or None

    def matcher(self) -> GuidanceMatcher:
        """A matcher at the start of an answer."""
        self._turn = (self._turn + 1) % len(self._roots)
        return GuidanceMatcher(self._roots[self._turn].deep_copy(), self._turn)

    def accept_tokens(self, tokens: Sequence[tuple[Matcher, int]]) -> list[bool]:
        """Let each matcher go on by one token. Whether it is allowed."""
        ours = _by_root(tokens)
        found = self._executor.consume_token_par([(matcher.inner, tokens[place][1]) for place, matcher in ours])
        allowed = dict(zip((place for place, _ in ours), found, strict=True))
        return [allowed[place] for place in range(len(tokens))]

    def fill_masks(self, matchers: Sequence[tuple[Matcher, int]], masks: npt.NDArray[np.int32]) -> None:
        """Write the allowed next tokens of each matcher into its row of masks[R, W]."""
        pairs = [(matcher.inner, matchers[place][1]) for place, matcher in _by_root(matchers)]
        fill_next_token_bitmask_par(self._executor, pairs, masks)


class GuidanceCompiler:
    """Compiles grammars for one vocabulary: a tokenizer.json, and the width of the logits.

    No text may stand for a control token in it (`Tokenizer.plain_spec`): forced text would become one.
    Raises ValueError for a tokenizer whose tokens have no known bytes, or that has more tokens than the model.
    """

    def __init__(self, tokenizer: str, num_tokens: int, eos_ids: Iterable[int]) -> None:
        try:
            self._tokenizer = llguidance.LLTokenizer(tokenizer, n_vocab=num_tokens, eos_token=list(eos_ids))
        except ValueError as error:
            raise ValueError(f"no grammar can be followed with the model's tokenizer ({error})") from error
        self._executor = llguidance.LLExecutor(_num_threads())

    def compile(self, grammar: Grammar) -> GuidanceConstraint:
        """The constraint. Raises ValueError for a grammar that has problems."""
        constraint = GuidanceConstraint(self._tokenizer, grammar.lowered(), self._executor)
        if constraint.error is not None:
            raise ValueError(constraint.error)
        return constraint


def _by_root(matchers: Sequence[tuple[Matcher, int]]) -> list[tuple[int, GuidanceMatcher]]:
    """The matchers with their places, one root's after another: threads take runs, and don't wait for one another."""
    ours = [(place, matcher) for place, (matcher, _) in enumerate(matchers) if isinstance(matcher, GuidanceMatcher)]
    return sorted(ours, key=lambda pair: pair[1].root)


def _compiled(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(tokenizer, grammar, log_level=_SILENT)


def _num_threads() -> int:
    return max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
