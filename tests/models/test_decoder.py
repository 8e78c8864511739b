"""Logits equal those of transformers in float32, through chunks, page borders and mixed batches."""

import random

import pytest
import torch

from batchgen.models.load import load_model

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-3.1": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "smollm2": (
        "LlamaForCausalLM",
        {"num_attention_heads": 9, "hidden_size": 72, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2ForCausalLM", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 8}),
    "qwen3-bias": ("Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 8}),
    "mistral-head-dim": (
        "MistralForCausalLM",
        {"sliding_window": None, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 1},
    ),
}


def prompts_of(*lengths: int) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(97) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name, saved, load, runner, reference):
    architecture, config = MODELS[name]
    theirs, folder = saved(architecture, **config)
    model = load(folder)
    prompts = prompts_of(1, 7, 8, 9, 61)
    expected = [reference(theirs, prompt) for prompt in prompts]
    assert max(part.abs().max() for part in expected) > 1
    for page_size, chunks in ((16, (1000,)), (4, (1, 5, 3, 16)), (3, (1,)), (8, (8, 4))):
        for got, want in zip(runner(model, page_size).logits(prompts, chunks), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_logits_on_a_gpu_equal_transformers(name, saved, load, runner, reference):
    architecture, config = MODELS[name]
    theirs, folder = saved(architecture, **config)
    model = load(folder, "cuda")
    prompts = prompts_of(1, 15, 16, 17, 61)
    for chunks in ((1000,), (1, 5, 3, 16)):
        for prompt, got in zip(prompts, runner(model, 16).logits(prompts, chunks), strict=True):
            torch.testing.assert_close(got.cpu(), reference(theirs, prompt), atol=1e-4, rtol=0)
    everything = torch.cat(runner(model, 16).logits(prompts))
    rows = [0, 15, 31, 48, 109]
    torch.testing.assert_close(runner(model, 16).logits_of_rows(prompts, rows), everything[rows], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [[0], [0, 6, 15, 24], [24, 3], list(range(25)), list(range(3, 23))])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window"])
def test_last_layer_of_listed_rows_equals_that_of_all(name, rows, saved, load, runner):
    architecture, config = MODELS[name]
    model = load(saved(architecture, **config)[1])
    prompts = prompts_of(7, 9, 9)
    everything = torch.cat(runner(model).logits(prompts))
    torch.testing.assert_close(runner(model).logits_of_rows(prompts, rows), everything[rows], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["smollm2", "qwen3-bias"])
def test_bfloat16_strays_no_further_than_that_of_transformers(name, saved, runner, reference):
    architecture, config = MODELS[name]
    theirs, folder = saved(architecture, **config)
    model = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16)
    (prompt,) = prompts_of(200)
    exact = reference(theirs, prompt)
    ours = (runner(model).logits([prompt], (64,))[0].float() - exact).abs().mean()
    rounded = (reference(theirs.bfloat16(), prompt).float() - exact).abs().mean()
    assert 0 < rounded < 0.1
    assert ours < 1.2 * rounded


def test_no_rows_still_writes_the_cache(saved, load, runner):
    model = load(saved("LlamaForCausalLM")[1])
    run = runner(model)
    assert run.logits_of_rows(prompts_of(9), []).shape == (0, 97)
    assert not any((k[1:, :, 0] == 1e3).any() for k, _ in run._kv)


def test_kv_bytes_are_those_of_real_heads(saved, load):
    model = load(saved("MistralForCausalLM", head_dim=16, num_attention_heads=4, num_key_value_heads=1)[1])
    assert model.kv_bytes_per_token == 2 * 3 * 1 * 16 * 4
