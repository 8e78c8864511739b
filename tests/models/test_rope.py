"""E03: every kind of rotary scaling gives the logits of transformers at the positions where kinds differ."""

import random

import pytest
import torch
import transformers
from transformers.models.phi3 import modeling_phi3

from batchgen.models.rope import RopeConfig
from batchgen.models.rope_table import cos_sin_table

LAST, ORIGINAL = 96, 24
PROMPT = random.Random(3).choices(range(97), k=LAST)
BORDERS = [0, 1, ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, LAST - 1]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
KINDS = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": YARN,
    "yarn-attention-factor": YARN | {"attention_factor": 0.5},
    "yarn-mscale": YARN | {"mscale": 1.5, "mscale_all_dim": 0.7},
    "yarn-no-truncate": YARN | {"truncate": False},
    "yarn-betas": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "llama3": LLAMA3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_E03_logits_at_the_borders(kind, saved, load, runner, reference):
    theirs, folder = saved("LlamaForCausalLM", max_position_embeddings=LAST, head_dim=16, rope_parameters=KINDS[kind])
    plain, _ = saved("LlamaForCausalLM", max_position_embeddings=LAST, head_dim=16)
    expected = reference(theirs, PROMPT)
    (got,) = runner(load(folder)).logits([PROMPT], (10,))
    torch.testing.assert_close(got[BORDERS], expected[BORDERS], atol=1e-4, rtol=0)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    if kind != "dynamic":  # which is no other than the plain one up to the model's own length
        assert (expected - reference(plain, PROMPT))[-1].abs().max() > 1e-2


def test_E03_dynamic_beyond_the_models_length(saved, load, runner, reference):
    theirs, folder = saved("LlamaForCausalLM", max_position_embeddings=ORIGINAL, rope_parameters=KINDS["dynamic"])
    model = load(folder, max_length=LAST)
    assert model.config.max_positions == ORIGINAL
    (got,) = runner(model).logits([PROMPT])
    torch.testing.assert_close(got, reference(theirs, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [ORIGINAL, LAST])
def test_E03_longrope_takes_short_or_long_factors(length, saved, load, runner, reference):
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1],
        "long_factor": [1.5, 4.0],
        "original_max_position_embeddings": ORIGINAL,
    }
    theirs, folder = saved("LlamaForCausalLM", max_position_embeddings=LAST, rope_parameters=longrope)
    (got,) = runner(load(folder, max_length=length)).logits([PROMPT[:length]])
    torch.testing.assert_close(got, reference(theirs, PROMPT[:length]), atol=1e-4, rtol=0)


def test_E03_partial_rotary_factor(saved, load, runner, reference, monkeypatch):
    """Llama of transformers knows no partial rotation, so it borrows that of Phi-3, which does."""
    llama = transformers.models.llama.modeling_llama
    monkeypatch.setattr(llama, "apply_rotary_pos_emb", modeling_phi3.apply_rotary_pos_emb)
    partial = modeling_phi3.Phi3RotaryEmbedding.compute_default_rope_parameters
    monkeypatch.setattr(llama.LlamaRotaryEmbedding, "compute_default_rope_parameters", staticmethod(partial))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    theirs, folder = saved("LlamaForCausalLM", head_dim=16, rope_parameters=rope)
    model = load(folder)
    assert model.config.rope.rotary_dim == 8
    (got,) = runner(model).logits([PROMPT])
    torch.testing.assert_close(got, reference(theirs, PROMPT), atol=1e-4, rtol=0)


def test_table_holds_cosines_and_sines_by_position():
    rope = RopeConfig(kind="default", theta=100.0, rotary_dim=4, max_positions=8, original_positions=8)
    table = cos_sin_table(rope, 8, torch.device("cpu"))
    angles = torch.arange(8.0)[:, None] * torch.tensor([1.0, 0.1])
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.stack((angles.cos(), angles.sin()), dim=1))
