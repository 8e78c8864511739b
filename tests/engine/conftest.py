"""A model that shows what its KV pages hold, grammars by states, and helpers to run an engine to its end."""

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from batchgen.engine import Completion, Engine, EngineConfig, Request
from batchgen_kernels import AttentionMetadata, copy_slots

VOCAB = 50
EOS = 0
POISON = 49
"""A token that makes the logits of all that follows NaN."""


def prefix_hash(tokens: Iterable[int]) -> int:
    """A number below 2^20 that depends on all tokens and their order."""
    value = 7
    for token in tokens:
        value = (value * 1021 + token + 1) % 1_000_003
    return value


def logits_of(state: Tensor) -> Tensor:
    """Logits [S, VOCAB] of prefix hashes [S]: pseudo-random, from 0 to 8. POISON is never drawn."""
    factors = torch.arange(1, VOCAB + 1, dtype=torch.float64) * 7919 + 31
    logits = (state.double().unsqueeze(1) * factors) % 104_729 / 104_729 * 8
    logits[:, POISON] -= 50
    return logits.float()


class PrefixModel:
    """Its KV is each token and its position, and its logits depend on all the tokens that it reads back from the pages.

    So a wrong page, a stale one, a wrong position or a missed write changes the text, or makes the logits NaN.
    """

    def __init__(self, max_positions: int = 64) -> None:
        self.config = SimpleNamespace(
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            max_positions=max_positions,
            num_layers=2,
            num_kv_heads=1,
            head_dim=1,
            layer_windows=(None, None),
        )
        self.max_length = max_positions
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.kv_bytes_per_token = 16
        self.steps: list[AttentionMetadata] = []

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: list[tuple[Tensor, Tensor]],
        meta: AttentionMetadata,
        rows: Tensor | None,
    ) -> Tensor:
        self.steps.append(meta)
        page_size = kv[0][0].shape[2]
        for keys, values in kv:
            keys[slots // page_size, 0, slots % page_size, 0] = token_ids.float()
            values[slots // page_size, 0, slots % page_size, 0] = positions.float()
            if meta.copies is not None:
                copy_slots(keys, values, meta.copies)
        states = []
        for index, length in enumerate(meta.kv_lens.tolist()):
            first, end = meta.query_start[index : index + 2].tolist()
            place = torch.arange(length)
            pages = meta.block_table[index, place // page_size].long()
            layers = [tensor[pages, 0, place % page_size, 0] for layer in kv for tensor in layer]
            until = [length] * length
            if meta.tree is not None:
                until = meta.tree.seen_until(torch.tensor([index]), place.unsqueeze(0))[0].tolist()
            for query in range(length - (end - first), length):
                seen = [key for key in range(query + 1) if query < until[key]]
                tokens, places, *others = (layer[seen] for layer in layers)
                bad = POISON in tokens or not torch.equal(places, torch.arange(len(seen)).float())
                bad = bad or not all(map(torch.equal, (tokens, places), others))
                states.append(float("nan") if bad else prefix_hash(map(int, tokens.tolist())))
        hidden = torch.tensor(states, dtype=torch.float64).unsqueeze(1)
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        return logits_of(hidden[:, 0])


SCHEDULES = st.fixed_dictionaries(
    {
        "page_size": st.integers(1, 5),
        "max_batch_rows": st.integers(1, 6),
        "max_batch_tokens": st.integers(1, 20),
        "lag": st.sampled_from([0, 1, 2]),
        "output_reserve": st.sampled_from([0.0, 0.5, 1.0, None]),
        "prefix_caching": st.booleans(),
        "refill_share": st.sampled_from([0.0, 0.125, 0.6]),
    }
)
"""What an engine's answers must not depend on."""

Edges = Mapping[int, Mapping[int, int]]
MOST_FORCED = 12


class Automaton:
    """A constraint by states: `edges[state][token]` is the next one. A state without edges ends the answer."""

    def __init__(self, edges: Edges, accepting: Sequence[int], eos: int = 0) -> None:
        self.edges, self.accepting, self.eos = edges, frozenset(accepting), eos
        self.fills: list[int] = []

    def matcher(self) -> "Walk":
        return Walk(self)

    def accept_tokens(self, tokens: Sequence[tuple[Any, int]]) -> list[bool]:
        return [walk.accept([token]) for walk, token in tokens]

    def fill_masks(self, matchers: Sequence[tuple[Any, int]], masks: np.ndarray) -> None:
        self.fills.append(len(matchers))
        for walk, row in matchers:
            bits = np.zeros(masks.shape[1] * 32, np.uint8)
            bits[walk.allowed()] = 1
            masks[row] = np.packbits(bits, bitorder="little").view(np.int32)

    def next(self, state: int) -> Mapping[int, int]:
        return self.edges.get(state, {})

    def ends(self, state: int) -> bool:
        return state in self.accepting or not self.next(state)


class Walk:
    """The states of an answer so far."""

    problem = None

    def __init__(self, automaton: Automaton) -> None:
        self.automaton, self.states = automaton, [0]

    @property
    def is_accepting(self) -> bool:
        return self.automaton.ends(self.states[-1])

    @property
    def is_complete(self) -> bool:
        return not self.automaton.next(self.states[-1])

    def accept(self, token_ids: Sequence[int]) -> bool:
        for token in token_ids:
            state = self.automaton.next(self.states[-1]).get(token)
            if state is None:
                return False
            self.states.append(state)
        return True

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]

    def forced_tokens(self) -> list[int]:
        state, tokens = self.states[-1], []
        while len(tokens) < MOST_FORCED and len(self.automaton.next(state)) == 1 and not self.automaton.ends(state):
            ((token, state),) = self.automaton.next(state).items()
            tokens.append(token)
        return tokens

    def allowed(self) -> list[int]:
        return [*self.automaton.next(self.states[-1]), *([self.automaton.eos] if self.is_accepting else [])]


class Rig:
    """Engines over a PrefixModel, and what they should answer."""

    VOCAB, EOS, POISON = VOCAB, EOS, POISON

    @staticmethod
    def engine(*, pages: int = 200, page_size: int = 4, num_tokens: int | None = None, **options: Any) -> Engine:
        """An engine with at most so many pages of KV cache to use, and any field of EngineConfig."""
        model: Any = PrefixModel(options.pop("max_positions", 64))
        options.setdefault("max_batch_rows", max(8, pages))
        kv_bytes = (pages + 1) * page_size * model.kv_bytes_per_token
        config = EngineConfig(page_size=page_size, kv_bytes=kv_bytes, poison_freed_pages=True, **options)
        return Engine(model, config, num_tokens=num_tokens)

    @staticmethod
    def logits(tokens: Sequence[int]) -> Tensor:
        """Logits [VOCAB] after these tokens."""
        return logits_of(torch.tensor([prefix_hash(tokens)]))[0]

    def answer(self, prompt: Sequence[int], max_tokens: int, eos: Iterable[int] = (EOS,)) -> tuple[list[int], str]:
        """The greedy answer, and why it ends."""
        tokens: list[int] = []
        while len(tokens) < max_tokens:
            token = int(self.logits([*prompt, *tokens]).argmax())
            if token in eos:
                return tokens, "eos"
            tokens.append(token)
        return tokens, "length"

    @staticmethod
    def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[Any, int], Completion]:
        """Completions by (request id, sample). The pages must add up after every step, and all be free at the end."""
        for request in requests:
            engine.add(request)
        done: dict[tuple[Any, int], Completion] = {}
        for _ in range(20_000):
            for completion in engine.step():
                key = (completion.request_id, completion.sample)
                assert key not in done
                done[key] = completion
            engine.check()
            if not (engine.num_waiting or engine.num_running):
                break
        assert engine.num_waiting == engine.num_running == 0
        assert engine.step() == [], "nothing is left in flight"
        engine.check()
        return done


@pytest.fixture(scope="session")
def rig() -> Rig:
    """See Rig."""
    return Rig()
