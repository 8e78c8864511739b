"""Weights: every tensor in its place, and a clear word when one is not."""

import json
import logging
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.errors import EngineError
from batchgen.models.config import ModelConfig
from batchgen.models.decoder import Model
from batchgen.models.linear import can_pack
from batchgen.models.load import load_model
from batchgen.models.weights import SafetensorsCheckpoint, load_weights

PROMPT = list(range(5, 25))


@pytest.fixture
def edited(saved):
    """Save a tiny Llama whose tensors and config were changed by hand."""

    def edit(change, **config):
        model, folder = saved("LlamaForCausalLM", **config)
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return model, folder

    return edit


def head_of(scale):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale

    return change


def nothing(tensors):
    assert "lm_head.weight" not in tensors


def test_E01_tied_without_a_head(edited, load, runner, reference):
    theirs, folder = edited(nothing, tie_word_embeddings=True)
    model = load(folder)
    torch.testing.assert_close(runner(model).logits([PROMPT])[0], reference(theirs, PROMPT), atol=1e-4, rtol=0)
    assert model.lm_head.weight is model.embed


def test_E01_tied_with_an_equal_head(edited, load, runner, reference, caplog):
    theirs, folder = edited(head_of(1.0), tie_word_embeddings=True)
    model = load(folder)
    torch.testing.assert_close(runner(model).logits([PROMPT])[0], reference(theirs, PROMPT), atol=1e-4, rtol=0)
    assert model.lm_head.weight is model.embed
    assert not caplog.records


def test_E01_tied_with_another_head_uses_it_with_a_warning(edited, load, runner, caplog):
    original, folder = edited(head_of(2.0), tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING, "batchgen"):
        model = load(folder)
    assert "lm_head.weight differs from embed_tokens.weight" in caplog.text
    theirs = type(original).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([PROMPT]), use_cache=False).logits[0]
    torch.testing.assert_close(runner(model).logits([PROMPT])[0], expected, atol=1e-4, rtol=0)


def test_E01_untied_without_a_head(edited, load):
    _, folder = edited(lambda tensors: tensors.pop("lm_head.weight"), tie_word_embeddings=False)
    with pytest.raises(EngineError, match=r"tensor lm_head\.weight is missing"):
        load(folder)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM"])
def test_E01_an_absent_flag_is_the_architectures_default(architecture, saved, load):
    _, folder = saved(architecture)
    config = json.loads((folder / "config.json").read_text())
    del config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)
    assert model.lm_head.weight is not model.embed


def test_E01_tied_with_a_head_alone(edited, load):
    def only_head(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    theirs, folder = edited(only_head, tie_word_embeddings=True)
    assert torch.equal(load(folder).embed, theirs.lm_head.weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "layers.1.mlp.up_proj.weight is missing"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(1)}), "layers.0.mlp.gate.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(47)}), "has shape [47]"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}), "torch.int8"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, said, edited, load):
    _, folder = edited(change)
    with pytest.raises(EngineError, match=re.escape(said)) as caught:
        load(folder)
    assert str(folder) in str(caught.value)


def test_old_rotary_buffers_are_no_weights(edited, load):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(edited(lambda tensors: tensors.update({name: torch.ones(2)}))[1])


def test_shards_are_read_through_their_index(saved, load, runner, reference):
    theirs, folder = saved("Qwen3ForCausalLM")
    (folder / "model.safetensors").unlink()
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(runner(load(folder)).logits([PROMPT])[0], reference(theirs, PROMPT), atol=1e-4, rtol=0)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(EngineError, match=r"model-00002-of-\d+\.safetensors is missing"):
        load(folder)


def test_folders_without_weights(saved, load):
    _, folder = saved("LlamaForCausalLM")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(EngineError, match=r"model\.safetensors can't be read"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(EngineError, match=r"only pytorch_model\.bin"):
        load(folder)


CPU = torch.device("cpu")


def test_bfloat16_weights_are_rounded_once(saved):
    theirs, folder = saved("LlamaForCausalLM")
    model = Model(ModelConfig.from_folder(folder), device=CPU, dtype=torch.bfloat16)
    load_weights(model, SafetensorsCheckpoint(folder))
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert torch.equal(model.embed, theirs.model.embed_tokens.weight.bfloat16())
    assert torch.equal(
        model.checkpoint_tensors()["layers.1.self_attn.k_proj.weight"],
        theirs.model.layers[1].self_attn.k_proj.weight.bfloat16(),
    )


@pytest.mark.parametrize("tied", [True, False])
def test_packed_weights_compute_the_same(tied, saved, runner):
    """Both round to bfloat16; the order of the sums may differ."""
    if not can_pack(CPU, torch.bfloat16):
        pytest.skip("needs a CPU that multiplies bfloat16")
    _, folder = saved("LlamaForCausalLM", attention_bias=True, mlp_bias=True, tie_word_embeddings=tied)
    plain = Model(ModelConfig.from_folder(folder), device=CPU, dtype=torch.bfloat16)
    load_weights(plain, SafetensorsCheckpoint(folder))
    packed = load_model(folder, device=CPU, dtype=torch.bfloat16)
    assert sum(parameter.dim() == 2 for parameter in packed.parameters()) == 1  # the embedding, which is looked up
    (expected,), (got,) = (runner(model).logits([PROMPT], (7,)) for model in (plain, packed))
    torch.testing.assert_close(got, expected, atol=0.05, rtol=0.02)


def test_only_bfloat16_on_a_cpu_is_packed():
    assert not can_pack(CPU, torch.float32)
    assert not can_pack(torch.device("cuda"), torch.bfloat16)


def test_dummy_weights_need_a_config_alone(saved, load, runner):
    _, folder = saved("Qwen3ForCausalLM")
    (folder / "model.safetensors").unlink()
    model = load(folder, dummy=True)
    (logits,) = runner(model).logits([PROMPT])
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01
    assert torch.equal(model.embed, load(folder, dummy=True).embed)
