"""GGUF files: the header in the words of a config, the weights as a folder of safetensors would give them."""

import dataclasses
import json
import random

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file

from batchgen.errors import EngineError, JobFileError
from batchgen.models.config import ModelConfig
from batchgen.models.gguf import GGUFFile, content_fingerprint
from batchgen.models.gguf_tokenizer import gguf_tokenizer
from batchgen.models.gguf_weights import open_gguf

PROMPT = list(range(3, 33))
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
KINDS = ("F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "BF16")


def gguf_tensors(folder, permute):
    """The tensors of a safetensors folder as llama.cpp's converter names and orders them."""
    config = json.loads((folder / "config.json").read_text())
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, (stem, _, suffix) = tensor.numpy(), name.rpartition(".")
        prefix = ""
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{layer}."
        stem = NAMES[stem]
        if permute and stem in heads:  # the converter's own formula
            shape = (heads[stem], 2, len(values) // heads[stem] // 2, *values.shape[1:])
            values = values.reshape(shape).swapaxes(1, 2).reshape(values.shape)
        tensors[f"{prefix}{stem}.{suffix}"] = np.ascontiguousarray(values)
    return tensors


def gguf_metadata(folder, architecture, **more):
    config = json.loads((folder / "config.json").read_text())
    keys = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
    values = {f"{architecture}.{key}": config[name] for key, name in keys.items()}
    return values | {f"{architecture}.rope.freq_base": config["rope_parameters"]["rope_theta"]} | more


@pytest.fixture
def twin(saved, make_gguf):
    """A tiny transformers model, its folder, and the same model as a GGUF file."""

    def make(architecture, name, metadata=None, quantized=None, **config):
        shape = {"hidden_size": 96, "intermediate_size": 64} | config
        theirs, folder = saved(architecture, **shape)
        tensors = gguf_tensors(folder, permute=name == "llama")
        path = make_gguf(name, gguf_metadata(folder, name, **(metadata or {})), tensors, quantized)
        return theirs, folder, path

    return make


@pytest.mark.parametrize(
    ("architecture", "name", "config", "metadata"),
    [
        ("LlamaForCausalLM", "llama", {"tie_word_embeddings": True}, {}),
        ("LlamaForCausalLM", "llama", {"attention_bias": True}, {}),
        ("Qwen2ForCausalLM", "qwen2", {}, {}),
        ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}, {"qwen3.attention.key_length": 16}),
    ],
)
def test_logits_equal_those_of_the_folder(
    architecture, name, config, metadata, twin, load, runner, reference, own_cache
):
    theirs, folder, path = twin(architecture, name, metadata, **config)
    model = load(path)
    assert dataclasses.replace(model.config, rms_eps=1e-6) == dataclasses.replace(
        ModelConfig.from_folder(folder), eos_token_ids=(), bos_token_id=None
    )
    (got,) = runner(model).logits([PROMPT], (7,))
    torch.testing.assert_close(got, reference(theirs, PROMPT), atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_weights(kind, twin, load, own_cache):
    name, type_ = "blk.1.ffn_up.weight", gguf.GGMLQuantizationType[kind]
    _, folder, path = twin("LlamaForCausalLM", "llama", quantized={name: type_})
    original = load_file(folder / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].numpy()
    expected = gguf.dequantize(gguf.quantize(original, type_), type_)
    got = load(path).checkpoint_tensors()["layers.1.mlp.up_proj.weight"]
    assert np.array_equal(got.numpy(), expected)


def test_llama3_factors_in_the_file(twin, load, runner, reference, saved, make_gguf, own_cache):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    }
    theirs, folder = saved("LlamaForCausalLM", head_dim=16, rope_parameters=rope)
    plain = 1.0 / 500.0 ** (np.arange(0, 16, 2) / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7
    metadata = gguf_metadata(folder, "llama") | {"llama.attention.key_length": 16, "llama.rope.dimension_count": 16}
    tensors = gguf_tensors(folder, permute=True) | {"rope_freqs.weight": factors}
    (got,) = runner(load(make_gguf("llama", metadata, tensors))).logits([PROMPT])
    torch.testing.assert_close(got, reference(theirs, PROMPT), atol=1e-4, rtol=0)


def test_scaling_and_ends_of_sequence_of_the_header(twin):
    metadata = {
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 64,
        "tokenizer.ggml.eos_token_id": 5,
        "tokenizer.ggml.eot_token_id": 6,
        "tokenizer.ggml.bos_token_id": 4,
    }
    config = ModelConfig.from_gguf(twin("Qwen2ForCausalLM", "qwen2", metadata)[2])
    assert (config.rope.kind, config.rope.factor, config.rope.original_positions) == ("yarn", 4.0, 64)
    assert (config.eos_token_ids, config.bos_token_id) == ((5, 6), 4)


def test_converted_weights_are_cached_by_content(twin, load, own_cache, monkeypatch):
    _, _, path = twin("LlamaForCausalLM", "llama")
    first = load(path)
    reads = []
    read = GGUFFile.read
    monkeypatch.setattr(GGUFFile, "read", lambda self, name: reads.append(name) or read(self, name))
    moved = path.rename(path.with_name("moved.gguf"))
    second = load(moved)
    assert not reads
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert len(list(own_cache.glob("gguf/*"))) == 1
    data = bytearray(moved.read_bytes())
    data[-1] ^= 1
    moved.write_bytes(data)
    load(moved)
    assert reads
    assert len(list(own_cache.glob("gguf/*"))) == 2


def test_a_cache_that_can_not_be_written_is_done_without(twin, load, own_cache, caplog):
    own_cache.parent.mkdir()
    own_cache.write_text("in the way")
    load(twin("LlamaForCausalLM", "llama")[2])
    assert "can't be cached" in caplog.text


def test_a_full_disk_is_done_without(twin, load, own_cache, caplog, monkeypatch):
    def no_space(*_arguments):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("batchgen.models.gguf_weights.save_file", no_space)
    load(twin("LlamaForCausalLM", "llama")[2])
    assert "No space left on device" in caplog.text
    assert list(own_cache.glob("gguf/.*")) == []


def test_a_damaged_cache_is_made_again(twin, load, own_cache):
    _, _, path = twin("LlamaForCausalLM", "llama")
    first = load(path)
    (file,) = own_cache.glob("gguf/*/*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(b"")
    assert torch.equal(load(path).embed, first.embed)
    assert file.read_bytes() == whole


def test_a_conversion_that_dies_leaves_nothing(twin, own_cache, monkeypatch):
    _, _, path = twin("LlamaForCausalLM", "llama")

    def die(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("batchgen.models.gguf_weights.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        open_gguf(path, torch.float32)
    assert list(own_cache.glob("gguf/*")) == list(own_cache.glob("gguf/.*")) == []


def test_files_that_are_no_whole_gguf(twin, tmp_path):
    _, _, path = twin("LlamaForCausalLM", "llama")
    data = path.read_bytes()
    for content, said in (
        (b"", "can't be read"),
        (b"PK\3\4" + data[4:], "no GGUF file"),
        (data[:4] + b"\1" + data[5:], "version 1"),
        (data[:200], "damaged"),
        (data[:-40], "cut off"),
    ):
        path.write_bytes(content)
        with pytest.raises(JobFileError, match=said) as caught:
            ModelConfig.from_gguf(path)
        assert str(path) in str(caught.value)


def test_any_damaged_header_is_refused_or_read(twin):
    _, _, path = twin("LlamaForCausalLM", "llama", {"tokenizer.ggml.tokens": ["a", "b"], "general.alignment": 32})
    data = path.read_bytes()
    header = min(tensor.start for tensor in GGUFFile(path).tensors.values())
    draw = random.Random(0)
    outcomes = []
    for _ in range(300):
        damaged = bytearray(data)
        damaged[draw.randrange(4, header)] = draw.choice((0, 255, draw.randrange(256)))
        path.write_bytes(damaged)
        try:
            ModelConfig.from_gguf(path)
        except JobFileError as error:
            outcomes.append(str(error))
    assert 50 < len(outcomes) < 300
    assert all(str(path) in message for message in outcomes)


def test_what_is_not_supported_is_named(twin, make_gguf, load, own_cache):
    _, folder, _ = twin("LlamaForCausalLM", "llama")
    tensors = gguf_tensors(folder, permute=True)
    with pytest.raises(JobFileError, match=r"general\.architecture is 'gemma3'"):
        ModelConfig.from_gguf(make_gguf("gemma3", {}, tensors))
    with pytest.raises(JobFileError, match=r"no llama\.embedding_length"):
        ModelConfig.from_gguf(make_gguf("llama", {"llama.attention.head_count": 4}, tensors))
    metadata = gguf_metadata(folder, "llama")
    with pytest.raises(JobFileError, match=r"llama\.expert_count is 8"):
        ModelConfig.from_gguf(make_gguf("llama", metadata | {"llama.expert_count": 8}, tensors))
    odd = tensors | {"blk.0.ffn_gate_inp.weight": np.ones((4, 96), np.float32)}
    with pytest.raises(EngineError, match=r"blk\.0\.ffn_gate_inp\.weight is not part"):
        load(make_gguf("llama", metadata, odd))
    packed = {"blk.0.attn_q.weight": gguf.GGMLQuantizationType.TQ2_0}
    wide = tensors | {"blk.0.attn_q.weight": np.ones((96, 256), np.float32)}
    with pytest.raises(JobFileError, match=r"blk\.0\.attn_q\.weight has format number 35"):
        ModelConfig.from_gguf(make_gguf("llama", metadata, wide, packed))


def test_fingerprint_of_a_large_file_sees_its_parts(tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(300 << 20)
    first = content_fingerprint(path)
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"x")
    second = content_fingerprint(path)
    with open(path, "r+b") as file:
        file.truncate((300 << 20) + 1)
    assert len({first, second, content_fingerprint(path)}) == 3


def test_smollm2_equals_transformers(smollm2, load, runner, reference, own_cache):
    model = load(smollm2)
    assert model.config.eos_token_ids == (2,)
    (folder,) = own_cache.glob("gguf/*")  # the converted weights are a model folder but for the config
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )
    transformers.GenerationConfig().save_pretrained(folder)
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder, config=config, attn_implementation="eager").eval()
    tokenizer = gguf_tokenizer(smollm2).tokenizer
    for text, answer in (("The capital of France is", " Paris"), ("One, two, three, four,", " five")):
        prompt = tokenizer.encode(text).ids
        (got,) = runner(model, 4).logits([prompt], (3,))
        torch.testing.assert_close(got, reference(theirs, prompt), atol=1e-3, rtol=0)
        assert tokenizer.decode([int(got[-1].argmax())]) == answer
