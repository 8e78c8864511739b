"""Draws tokens from logits, and takes log-probabilities. What a row does not ask for, it does not pay for."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.batch import Batch
from batchgen.engine.request import SamplingParams
from batchgen.engine.sequence import Ints, Sequence
from batchgen.engine.transfer import Array, upload
from batchgen_kernels import TokenLogprobs, apply_bitmask, filter_logits, gumbel_sample, penalize, token_logprobs
from batchgen_kernels.sample import GREEDY_BELOW

Needs = npt.NDArray[np.uint8]
_FILTER, _PENALTY, _ADJUST, _LOGPROBS, _MASK = 1, 2, 4, 8, 16
_SPECIAL = _FILTER | _PENALTY | _ADJUST | _MASK
_MASK64 = 2**64 - 1


class Sampled(NamedTuple):
    """Drawn tokens, int64 [S]; whether their logits were finite, bool [S]; `logprobs` of the rows that want them."""

    ids: Tensor
    finite: Tensor
    logprobs: TokenLogprobs | None


class Adjustment(NamedTuple):
    """Logit bias and forbidden ends of sequence of one row."""

    bias_ids: Tensor
    bias: Tensor
    end_ids: Tensor
    min_tokens: int


def row_seed(seed: int, sample: int) -> int:
    """Seed of one sample's noise (splitmix64 of both), as a signed 64-bit number."""
    x = (seed + (sample + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return x - 2**64 if x >= 2**63 else x


class Sampler:
    """Sampling state by row, on the device. What a row needs is also known on the host: nothing is asked of the GPU."""

    def __init__(self, max_rows: int, num_tokens: int, device: torch.device) -> None:
        self._num_tokens, self._device, self._max_rows = num_tokens, device, max_rows
        self._needs = np.zeros(max_rows, np.uint8)
        self._top_logprobs = np.zeros(max_rows, np.int64)
        # temperature, top_p, min_p, repetition, presence, frequency
        self._numbers = torch.zeros(6, max_rows, device=device)
        self._top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._adjustments: dict[int, Adjustment] = {}
        self._seen: tuple[Tensor, Tensor] | None = None

    def assign(self, seqs: Seq[Sequence]) -> None:
        """Set the rows of sequences that are about to draw their first token there."""
        params = [seq.request.params for seq in seqs]
        numbers = [
            (p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
            for p in params
        ]
        rows, values, top_k, seeds = self._upload(
            np.array([seq.row for seq in seqs], np.int64),
            np.array(numbers, np.float32).T,
            np.array([max(0, p.top_k) for p in params], np.int32),
            np.array([row_seed(seq.request.params.seed, seq.sample) for seq in seqs], np.int64),
        )
        self._numbers[:, rows], self._top_k[rows], self._seeds[rows] = values, top_k, seeds
        for seq, p in zip(seqs, params, strict=True):
            needs = self._needs[seq.row] = _needs(p) | (_MASK if seq.matcher is not None else 0)
            self._top_logprobs[seq.row] = min(p.logprobs or 0, self._num_tokens)
            if needs & _PENALTY:
                self._assign_seen(seq)
            if needs & _ADJUST:
                self._adjustments[seq.row] = self._adjustment(seq)

    def plain(self, rows: Ints) -> bool:
        """Whether these rows need nothing but `draw`."""
        return not self._needs[rows].any()

    def draw(self, logits: Tensor, hidden: Tensor, rows: Tensor, draw_index: Tensor) -> Sampled:
        """Draw one token from each row of logits[S, V], which come from hidden[S, H], by temperature alone."""
        ids = gumbel_sample(logits, self._numbers[0, rows], self._seeds[rows], draw_index)
        drawn = logits.gather(1, ids.unsqueeze(1)).squeeze(1)
        return Sampled(ids, drawn.isfinite() & hidden.sum(-1).isfinite(), None)

    def sample(self, logits: Tensor, hidden: Tensor, batch: Batch, masks: Tensor | None = None) -> Sampled:
        """`draw`, and whatever else the rows ask for. `masks` [C, W] are those of the draws that follow a grammar."""
        needs = self._needs[batch.draw_rows]
        rows, index = self._upload(batch.draw_rows, batch.draw_index)
        special = np.flatnonzero(needs & _SPECIAL)
        if len(special) == 0:
            sampled = self.draw(logits, hidden, rows, index)
        else:
            plain, at = self._upload(np.flatnonzero(needs & _SPECIAL == 0), special)
            processed = self._process(
                logits[at].float(), batch.draw_rows[special], batch.draw_index[special], needs[special], masks
            )
            sampled = _merge(
                (at, self.draw(processed, hidden[at], rows[at], index[at])),
                (plain, self.draw(logits[plain], hidden[plain], rows[plain], index[plain])),
            )
        logprobs = self._logprobs(logits, sampled.ids, batch.draw_rows, needs)
        if len(special):  # last of all: a step that ran out of memory runs again, and must not count twice
            self._count(sampled.ids[at], batch.draw_rows[special], needs[special])
        return sampled._replace(logprobs=logprobs)

    def _process(self, logits: Tensor, rows: Ints, draw_index: Ints, needs: Needs, masks: Tensor | None) -> Tensor:
        """Masks, bias, min_tokens, penalties, and the filters of temperature, in this order, on logits[S, V]."""
        if masks is not None:
            which = np.flatnonzero(needs & _MASK)
            if len(which) == len(rows):
                logits = apply_bitmask(logits, masks)
            else:
                (at,) = self._upload(which)
                logits[at] = apply_bitmask(logits[at], masks)
        for index in np.flatnonzero(needs & _ADJUST).tolist():
            adjust = self._adjustments[rows[index]]
            logits[index].index_add_(0, adjust.bias_ids, adjust.bias)
            if draw_index[index] < adjust.min_tokens:
                logits[index].index_fill_(0, adjust.end_ids, -torch.inf)
        if len(which := np.flatnonzero(needs & _PENALTY)):
            at, row = self._upload(which, rows[which])
            mask, counts = self._seen_tokens()
            logits[at] = penalize(logits[at], mask[row], counts[row], *self._numbers[3:, row].unbind())
        if len(which := np.flatnonzero(needs & _FILTER)):
            at, row = self._upload(which, rows[which])
            temperature, top_p, min_p = self._numbers[:3, row].unbind()
            logits[at] = filter_logits(logits[at], temperature, self._top_k[row], top_p, min_p)
        return logits

    def _count(self, ids: Tensor, rows: Ints, needs: Needs) -> None:
        """Note drawn tokens in the rows that have penalties."""
        if len(which := np.flatnonzero(needs & _PENALTY)):
            at, row = self._upload(which, rows[which])
            self._seen_tokens()[1][row, ids[at]] += 1

    def _logprobs(self, logits: Tensor, ids: Tensor, rows: Ints, needs: Needs) -> TokenLogprobs | None:
        """Log-probabilities of the raw logits, for the rows that want them, in their order."""
        which = np.flatnonzero(needs & _LOGPROBS)
        if len(which) == 0:
            return None
        (at,) = self._upload(which)
        return token_logprobs(logits[at], ids[at], int(self._top_logprobs[rows[which]].max()))

    def _adjustment(self, seq: Sequence) -> Adjustment:
        params = seq.request.params
        bias_ids, bias, end_ids = self._upload(
            np.array(list(params.logit_bias), np.int64),
            np.array(list(params.logit_bias.values()), np.float32),
            np.array([token for token in seq.stop_ids if token < self._num_tokens], np.int64),
        )
        return Adjustment(bias_ids, bias, end_ids, params.min_tokens)

    def _assign_seen(self, seq: Sequence) -> None:
        mask, counts = self._seen_tokens()
        bits = np.zeros(mask.shape[1] * 32, np.uint8)
        bits[seq.fill[: seq.prompt_length]] = 1
        words = np.packbits(bits, bitorder="little").view(np.int32)
        output_counts = np.bincount(seq.outputs, minlength=self._num_tokens).astype(np.int32)
        mask[seq.row], counts[seq.row] = self._upload(words, output_counts)

    def _seen_tokens(self) -> tuple[Tensor, Tensor]:
        """Bitmask of each row's prompt tokens and counts of its output tokens; made when a row first has penalties."""
        if self._seen is None:
            words = -(-self._num_tokens // 32)
            self._seen = (
                torch.zeros(self._max_rows, words, dtype=torch.int32, device=self._device),
                torch.zeros(self._max_rows, self._num_tokens, dtype=torch.int32, device=self._device),
            )
        return self._seen

    def _upload(self, *arrays: Array) -> list[Tensor]:
        return upload(arrays, self._device)


def _merge(*parts: tuple[Tensor, Sampled]) -> Sampled:
    """The draws of all parts, each of which has its places in the whole."""
    order = torch.cat([at for at, _ in parts]).argsort()
    ids, finite = (torch.cat(tensors)[order] for tensors in zip(*((s.ids, s.finite) for _, s in parts), strict=True))
    return Sampled(ids, finite, None)


def _needs(params: SamplingParams) -> int:
    """What a row's tokens need besides the largest logit, as bits."""
    needs = _LOGPROBS if params.logprobs is not None else 0
    if params.temperature >= GREEDY_BELOW and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0):
        needs |= _FILTER
    if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
        needs |= _PENALTY
    if params.logit_bias or params.min_tokens:
        needs |= _ADJUST
    return needs
