"""Runs batches on the device: owns the KV pages and the last token of every row, which feeds the next step there."""

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.batch import Batch
from batchgen.engine.config import Limits
from batchgen.engine.request import TokenLogprob
from batchgen.engine.sampler import Sampled, Sampler
from batchgen.engine.sequence import Ints
from batchgen.models.config import ModelConfig
from batchgen_kernels import AttentionMetadata, copy_pages, token_logprobs

KVPages = tuple[Tensor, Tensor]


class CausalModel(Protocol):
    """What the engine asks of a model; batchgen.models.decoder.Model has it."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the KV cache, over all layers."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: list[KVPages],
        meta: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        """Write the KV of T tokens and return the hidden states `[S, H]` of those in `rows` (None: all)."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return `[S, vocab_size]`."""


class StepOutput(NamedTuple):
    """What the host reads of a step: per draw a token and whether its logits were finite, per score a number."""

    tokens: Ints
    finite: npt.NDArray[np.bool_]
    logprobs: dict[int, TokenLogprob]
    """Of the draws that want them, by their number."""
    scores: list[float]


class LaunchedStep:
    """A step that the device may still be busy with."""

    def __init__(self, batch: Batch, sampled: Sampled | None, scores: Tensor | None) -> None:
        self.batch, self._sampled, self._scores = batch, sampled, scores

    def read(self) -> StepOutput:
        """Wait for the step and bring its results to the host."""
        scores = [] if self._scores is None else self._scores.tolist()
        if self._sampled is None:
            return StepOutput(np.empty(0, np.int64), np.empty(0, np.bool_), {}, scores)
        tokens = self._sampled.ids.cpu().numpy()
        return StepOutput(tokens, self._sampled.finite.cpu().numpy(), self._logprobs(tokens), scores)

    def _logprobs(self, tokens: Ints) -> dict[int, TokenLogprob]:
        if self._sampled is None or self._sampled.logprobs is None:
            return {}
        asked = ((number, seq.request.params.logprobs) for number, seq in enumerate(self.batch.draws))
        wanted = [(number, count) for number, count in asked if count is not None]
        values = zip(*(tensor.tolist() for tensor in self._sampled.logprobs), strict=True)
        return {
            number: TokenLogprob(int(tokens[number]), chosen, tuple(zip(ids[:count], top[:count], strict=True)))
            for (number, count), (chosen, ids, top) in zip(wanted, values, strict=True)
        }


class ModelRunner:
    """Owns everything on the device but the weights."""

    def __init__(self, model: CausalModel, limits: Limits, num_tokens: int) -> None:
        self._model, self._num_tokens = model, num_tokens
        config = model.config
        shape = (limits.num_pages, config.num_kv_heads, limits.page_size, config.head_dim)
        self._kv = [
            (
                torch.empty(shape, dtype=model.dtype, device=model.device),
                torch.empty(shape, dtype=model.dtype, device=model.device),
            )
            for _ in range(config.num_layers)
        ]
        self._last_tokens = torch.zeros(limits.max_rows, dtype=torch.int64, device=model.device)
        self._sampler = Sampler(limits.max_rows, num_tokens, model.device)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Queue one step on the device. Nothing here waits for it."""
        meta = AttentionMetadata(
            block_table=self._upload(batch.block_table),
            query_start=self._upload(batch.query_start),
            kv_lens=self._upload(batch.kv_lens),
            max_query_len=batch.max_query_len,
            max_kv_len=batch.max_kv_len,
        )
        hidden = self._model(
            self._last_tokens[self._upload(batch.rows)] if batch.token_ids is None else self._upload(batch.token_ids),
            self._upload(batch.positions),
            self._upload(batch.slots),
            self._kv,
            meta,
            None if batch.wanted is None else self._upload(batch.wanted),
        )
        if batch.copies.size:
            keys, values = zip(*self._kv, strict=True)
            copy_pages(keys, values, *self._upload(batch.copies))
        if not len(hidden):
            return LaunchedStep(batch, None, None)
        logits = self._model.logits(hidden)[:, : self._num_tokens]
        return LaunchedStep(batch, self._sample(logits, hidden, batch), self._score(logits, batch))

    @torch.inference_mode()
    def poison(self, pages: list[int]) -> None:
        """Fill pages with NaN."""
        for tensor in (tensor for layer in self._kv for tensor in layer):
            tensor[pages] = torch.nan

    def _sample(self, logits: Tensor, hidden: Tensor, batch: Batch) -> Sampled | None:
        if not batch.draws:
            return None
        if batch.first_draw:
            self._sampler.assign(batch.draws)
        if batch.draw_from is not None:
            index = self._upload(batch.draw_from)
            logits, hidden = logits[index], hidden[index]
        sampled = self._sampler.sample(logits, hidden, batch)
        self._last_tokens[self._upload(batch.draw_rows)] = sampled.ids
        return sampled

    def _score(self, logits: Tensor, batch: Batch) -> Tensor | None:
        if not batch.scores:
            return None
        return token_logprobs(logits[self._upload(batch.score_from)], self._upload(batch.score_ids), 0).chosen

    def _upload(self, array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._model.device, non_blocking=True)
