"""E05: windows and head shapes give the logits of transformers, also far beyond the window."""

import random

import pytest
import torch

MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {"sliding_window": 8, "use_sliding_window": True}
MODELS = {
    "mistral-every-layer": ("MistralForCausalLM", {"sliding_window": 8}),
    "qwen2-unused": ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2-from-layer-1": ("Qwen2ForCausalLM", {**WINDOWED, "max_window_layers": 1}),
    "qwen2-mixed": ("Qwen2ForCausalLM", {**WINDOWED, "layer_types": MIXED}),
    "qwen3-mixed": ("Qwen3ForCausalLM", {**WINDOWED, "layer_types": MIXED, "head_dim": 16}),
    "one-kv-head": ("MistralForCausalLM", {"sliding_window": 8, "num_key_value_heads": 1, "head_dim": 16}),
    "4-heads-of-16": ("LlamaForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}),
    "9-heads-3-kv": ("Qwen2ForCausalLM", {"num_attention_heads": 9, "hidden_size": 72}),
    "no-grouping": ("LlamaForCausalLM", {"num_key_value_heads": 12}),
}


@pytest.mark.parametrize("name", MODELS)
def test_E05_logits_equal_transformers(name, saved, load, runner, reference):
    architecture, config = MODELS[name]
    theirs, folder = saved(architecture, **config)
    model = load(folder)
    draw = random.Random(11)
    prompts = [draw.choices(range(97), k=length) for length in (7, 8, 9, 40, 150)]
    expected = [reference(theirs, prompt) for prompt in prompts]
    for page_size, chunks in ((8, (1000,)), (3, (5, 8, 1))):
        for got, want in zip(runner(model, page_size).logits(prompts, chunks), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_E05_the_window_is_neither_ignored_nor_off_by_one(saved, load, runner):
    model = load(saved("MistralForCausalLM", sliding_window=8, num_hidden_layers=1)[1])
    prompt = random.Random(1).choices(range(97), k=20)
    (before,) = runner(model).logits([prompt])
    (after,) = runner(model).logits([[(prompt[0] + 1) % 97, *prompt[1:]]])
    changed = (before - after).abs().amax(dim=1) > 0
    assert changed.tolist() == [True] * 8 + [False] * 12
