"""ModelConfig says what the files say, and refuses with field and value what batchgen can't run."""

import json
import subprocess
import sys

import pytest

from batchgen.errors import JobFileError
from batchgen.models.config import ModelConfig, from_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def config_of(**changes):
    return from_config({**LLAMA, **changes}, "config.json")


def refusal(**changes):
    with pytest.raises(JobFileError) as caught:
        config_of(**changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_those_of_the_architecture():
    config = config_of()
    assert (config.head_dim, config.rms_eps, config.act, config.tie_embeddings) == (12, 1e-6, "silu", False)
    assert config.rope.theta == 10_000.0
    assert config_of(num_key_value_heads=None).num_kv_heads == 4
    assert config_of(architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert config_of(architectures=["MistralForCausalLM"]).layer_windows == (4096,) * 4
    assert config_of(architectures=["MistralForCausalLM"], sliding_window=None).layer_windows == (None,) * 4
    assert config_of(architectures=None, model_type="qwen2").architecture == "Qwen2ForCausalLM"


def test_biases_are_where_the_family_has_them():
    flags = {
        name: (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm)
        for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
        if (config := config_of(architectures=[f"{name}ForCausalLM"], attention_bias=True, mlp_bias=True))
    }
    assert flags == {
        "Llama": (True, True, True, False),
        "Mistral": (False, False, False, False),
        "Qwen2": (True, False, False, False),
        "Qwen3": (True, True, False, True),
    }


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["architectures ['GPT2LMHeadModel']", "LlamaForCausalLM"]),
        ({"architectures": [], "model_type": "bert"}, ["model_type 'bert'", "LlamaForCausalLM"]),
        ({"architectures": "BloomForCausalLM"}, ["architectures ['BloomForCausalLM']"]),
        ({"hidden_act": ["silu"]}, ["hidden_act", "['silu']"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "'1e-5'"]),
        ({"hidden_act": "relu2"}, ["hidden_act", "'relu2'", "silu"]),
        ({"vocab_size": "many"}, ["vocab_size", "'many'"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quant_method", "'awq'", "GGUF"]),
    ],
)
def test_what_is_not_supported_is_named(changes, said):
    message = refusal(**changes)
    assert all(part in message for part in ["config.json", *said]), message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 5}, ["num_attention_heads 12", "num_key_value_heads 5"]),
        ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["hidden_size 48", "num_attention_heads 5", "head_dim"]),
        ({"head_dim": 15}, ["15", "even"]),
    ],
)
def test_E05_heads_that_do_not_divide(changes, said):
    message = refusal(**changes)
    assert all(part in message for part in said), message


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_E05_windows_by_flags(name):
    def windows(**changes):
        return config_of(architectures=[name], head_dim=12, **changes).layer_windows

    mixed = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    assert windows(sliding_window=8) == (None,) * 4
    assert windows(sliding_window=8, use_sliding_window=False, max_window_layers=0) == (None,) * 4
    assert windows(sliding_window=8, use_sliding_window=True, max_window_layers=2) == (None, None, 8, 8)
    assert windows(sliding_window=8, use_sliding_window=True) == (None,) * 4
    assert windows(sliding_window=8, use_sliding_window=True, layer_types=mixed) == (None, 8, None, 8)
    with pytest.raises(JobFileError, match="sliding_window is not set"):
        windows(sliding_window=8, layer_types=mixed)
    with pytest.raises(JobFileError, match="'chunked_attention'"):
        windows(layer_types=["chunked_attention"] * 4)
    with pytest.raises(JobFileError, match="2 entries for 4 layers"):
        windows(layer_types=["full_attention"] * 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
        {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
    ],
)
def test_E03_theta_under_every_name(changes):
    rope = config_of(**changes).rope
    assert (rope.kind, rope.theta, rope.rotary_dim) == ("default", 5e5, 12)


def test_E03_scaling_under_every_name():
    values = {"factor": 4.0, "original_max_position_embeddings": 32}
    ropes = {
        config_of(rope_theta=5e5, rope_scaling={"type": "yarn", **values}).rope,
        config_of(rope_theta=5e5, rope_scaling={"rope_type": "yarn", **values}).rope,
        config_of(rope_parameters={"rope_theta": 5e5, "rope_type": "yarn", **values}).rope,
        config_of(rope_parameters={"full_attention": {"rope_theta": 5e5, "rope_type": "yarn", **values}}).rope,
    }
    assert len(ropes) == 1
    assert ropes.pop().longest == 128
    assert config_of(rope_scaling={"type": "yarn", "factor": 4.0}).max_positions == 512


def test_E03_rope_by_layer_type():
    ropes = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    config = config_of(
        architectures=["Qwen2ForCausalLM"],
        sliding_window=8,
        use_sliding_window=True,
        max_window_layers=2,
        rope_parameters=ropes,
    )
    assert [rope.theta for rope in config.layer_ropes] == [1e6, 1e6, 1e4, 1e4]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, ["rope_scaling.type", "'spiral'", "llama3"]),
        ({"rope_parameters": {"rope_type": "axial"}}, ["rope_parameters.rope_type", "'axial'", "llama3"]),
        ({"rope_scaling": {"type": None, "factor": 2.0}}, ["rope_scaling.type", "None"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor", "'linear'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor", "'llama3'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, ["factor", "'2'"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        ({"rope_theta": 0}, ["rope_theta", "0"]),
        ({"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, ["rope_parameters", "'full_attention'"]),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            ["short_factor", "1 numbers", "expected 6"],
        ),
        ({"partial_rotary_factor": 0.25}, ["partial_rotary_factor 0.25", "rotates 3"]),
    ],
)
def test_E03_unknown_settings_are_refused(changes, said):
    message = refusal(**changes)
    assert all(part in message for part in ["config.json", *said]), message


def test_B08_code_of_a_model_is_refused_and_not_run(tmp_path):
    (tmp_path / "configuration_tiny.py").write_text("import os\nos.mkdir('MARKER')\n")
    auto_map = {"AutoConfig": "configuration_tiny.TinyConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "tiny_custom", "auto_map": auto_map}))
    with pytest.raises(JobFileError, match="auto_map") as caught:
        ModelConfig.from_folder(tmp_path)
    assert "trust_remote_code" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "configuration_tiny.py"]


def test_B08_a_known_architecture_needs_no_code_of_its_own():
    assert config_of(auto_map={"AutoModelForCausalLM": "modeling.Model"}).architecture == "LlamaForCausalLM"


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_ends_of_sequence_are_the_union_of_all_files(tmp_path):
    write(
        tmp_path,
        config=LLAMA | {"eos_token_id": 2, "bos_token_id": 1},
        generation_config={"eos_token_id": [7, 2]},
        tokenizer_config={"eos_token": "<end>", "added_tokens_decoder": {"9": {"content": "<end>"}}},
    )
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == (2, 7, 9)
    assert config.bos_token_id == 1


@pytest.mark.parametrize(
    "tokenizer",
    [{"added_tokens": [{"id": 9, "content": "<end>"}]}, {"model": {"vocab": {"<end>": 9}}}],
)
def test_eos_that_only_the_tokenizer_knows(tmp_path, tokenizer):
    write(tmp_path, config=LLAMA, special_tokens_map={"eos_token": {"content": "<end>"}}, tokenizer=tokenizer)
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == (9,)


def test_no_eos_anywhere(tmp_path):
    assert ModelConfig.from_folder(write(tmp_path, config=LLAMA)).eos_token_ids == ()


def test_a_folder_without_or_with_a_broken_config(tmp_path):
    with pytest.raises(JobFileError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobFileError, match="can't be read as JSON"):
        ModelConfig.from_folder(tmp_path)


def test_reading_configs_loads_no_torch(tmp_path):
    write(tmp_path, config=LLAMA)
    code = (
        "import sys\nfrom batchgen.models.config import ModelConfig\n"
        "from batchgen.models.resolve import resolve_model\n"
        "from batchgen.models.gguf_tokenizer import gguf_tokenizer\n"
        f"ModelConfig.from_folder({str(tmp_path)!r}); print(sorted({{'torch', 'transformers'}} & sys.modules.keys()))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
