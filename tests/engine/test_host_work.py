"""The host's work in a step does not grow with the batch: counted in Python calls, not in seconds."""

import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine import Engine, EngineConfig, Request, SamplingParams


class NullModel:
    """Computes nothing, and always says token 5."""

    device, dtype, kv_bytes_per_token, max_length = torch.device("cpu"), torch.float32, 8, 256

    def __init__(self) -> None:
        self.config = SimpleNamespace(
            vocab_size=16,
            eos_token_ids=(0, 1),
            max_positions=256,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            layer_windows=(None,),
        )
        self._row = torch.nn.functional.one_hot(torch.tensor([5]), 16).float()

    def __call__(self, token_ids: Tensor, *others: Any) -> Tensor:
        rows = others[-1]
        return torch.zeros(len(token_ids) if rows is None else len(rows), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._row.expand(len(hidden), -1)


def calls_per_decode_step(batch: int, lag: int) -> int:
    """Calls, of Python and C functions, in a decode step in which nobody finishes and nobody needs a page."""
    model: Any = NullModel()
    engine = Engine(model, EngineConfig(max_batch_rows=batch, page_size=64, lag=lag))
    for i in range(batch):
        engine.add(Request(i, [2, 3, 4], SamplingParams(max_tokens=50)))
    while engine.stats.decode_steps < 4:
        engine.step()
    count = 0

    def counting(_: FrameType, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counting)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    assert engine.num_running == batch
    return count


@pytest.mark.parametrize("lag", [0, 1])
def test_a_decode_step_makes_as_many_calls_for_512_rows_as_for_8(lag: int) -> None:
    few, many = calls_per_decode_step(8, lag), calls_per_decode_step(512, lag)
    assert few == many
    assert many < 400
