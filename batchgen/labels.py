"""From the log-probabilities of choices to a label, the probability of each, and the margin of the first."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from batchgen.job.generate import Generate


def choice_scores(logprobs: Sequence[Sequence[float]], *, length_normalize: bool) -> list[float]:
    """What choices are compared by: the sum of their tokens' log-probabilities, or the mean."""
    return [math.fsum(values) / (len(values) if length_normalize else 1) for values in logprobs]


def normalized(scores: Sequence[float]) -> list[float]:
    """Probabilities of the choices among themselves, from their scores."""
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def log_prior(probabilities: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """The log of each choice's mean probability over inputs."""
    by_choice = list(zip(*probabilities, strict=True))
    # A choice that never has any probability in float64 keeps what it has: no number can be made of it.
    return tuple(math.log(mean) if (mean := math.fsum(one) / len(one)) > 0 else 0.0 for one in by_choice)


class Labeller:
    """Makes the label columns. `prior` are log-probabilities to take off each choice's score: the job's calibration."""

    def __init__(self, generate: Generate, prior: Sequence[float] | None = None) -> None:
        self._generate = generate
        self._prior = prior

    def columns(self, labels: Sequence[str], logprobs: Sequence[Sequence[float]]) -> dict[str, Any]:
        """The label is the likeliest choice; of equal ones the first."""
        scores = choice_scores(logprobs, length_normalize=self._generate.length_normalize)
        if self._prior is not None:
            scores = [score - prior for score, prior in zip(scores, self._prior, strict=True)]
        probabilities = normalized(scores)
        first, second = sorted([*probabilities, 0.0], reverse=True)[:2]
        raw = map(math.fsum, logprobs)
        return {
            "label": labels[scores.index(max(scores))],
            "label_probs": dict(zip(labels, probabilities, strict=True)),
            "margin": first - second,
            "label_logprobs": dict(zip(labels, raw, strict=True)) if self._generate.choice_logprobs else None,
        }
