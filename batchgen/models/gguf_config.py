"""The header of a GGUF file in the words of a config.json."""

from typing import Any

from batchgen.errors import JobFileError
from batchgen.models.gguf import GGUFFile

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_FACTORS = "rope_freqs.weight"


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """Return what the model's config.json would hold. Raises JobFileError for what is not supported."""
    architecture = file.architecture
    if architecture not in _CLASSES:
        raise JobFileError(
            f"{file.path}: general.architecture is {architecture!r}, which is not supported; "
            f"supported: {', '.join(_CLASSES)}"
        )
    if (experts := file.setting("expert_count", 0)) > 0:
        raise JobFileError(
            f"{file.path}: {architecture}.expert_count is {experts}; mixtures of experts are not supported"
        )
    if "token_embd.weight" not in file.tensors:
        raise JobFileError(f"{file.path}: there is no tensor token_embd.weight")
    heads = _needed(file, "attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise JobFileError(f"{file.path}: {architecture}.attention.head_count is {heads!r}; expected a whole number")
    head_dim = file.setting("attention.key_length") or _needed(file, "embedding_length") // heads
    if (value_dim := file.setting("attention.value_length", head_dim)) != head_dim:
        raise JobFileError(
            f"{file.path}: keys of {head_dim} and values of {value_dim} per head are not supported; they must be alike"
        )
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": _needed(file, "embedding_length"),
        "intermediate_size": _needed(file, "feed_forward_length"),
        "num_hidden_layers": _needed(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.setting("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": _needed(file, "context_length"),
        "rms_norm_eps": _needed(file, "attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_parameters": _rope(file, head_dim),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            file.metadata[key]
            for key in (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
            if key in file.metadata
        ],
    }


def _needed(file: GGUFFile, key: str) -> Any:
    value = file.setting(key)
    if value is None:
        raise JobFileError(f"{file.path}: the header has no {file.architecture}.{key}")
    return value


def _rope(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    rope = {
        "rope_type": file.setting("rope.scaling.type", "none"),
        "rope_theta": file.setting("rope.freq_base", 10_000.0),
        "partial_rotary_factor": file.setting("rope.dimension_count", head_dim) / max(head_dim, 1),
        "factor": file.setting("rope.scaling.factor") or file.setting("rope.scale_linear"),
        "original_max_position_embeddings": file.setting("rope.scaling.original_context_length"),
        "beta_fast": file.setting("rope.scaling.yarn_beta_fast"),
        "beta_slow": file.setting("rope.scaling.yarn_beta_slow"),
    }
    if rope["rope_type"] == "none":
        rope["rope_type"] = "linear" if file.setting("rope.scale_linear") else "default"
    if _FACTORS in file.tensors:  # Llama 3.1 and later: the scaling, worked out per frequency
        factors = file.read(_FACTORS).tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return {name: value for name, value in rope.items() if value is not None}
