"""What a model is, read once from its folder or GGUF header into one frozen object. No torch is imported here."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from batchgen.errors import JobFileError
from batchgen.models.folder import eos_token_ids, read_config_json, token_ids
from batchgen.models.rope import RopeConfig, layer_ropes

Act = Literal["silu", "gelu_tanh"]
NormOrder = Literal["cast_then_scale", "scale_then_cast", "one_plus"]

_ACTS: dict[str, Act] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}

_MOST, _MOST_LAYERS = 1 << 31, 10_000  # a damaged file must not fill the memory
_NULLABLE = ("sliding_window", "num_key_value_heads", "head_dim")


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture of the common decoder differs: what its config leaves unsaid, and where its biases are."""

    model_type: str
    defaults: Mapping[str, Any]
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: as the config's attention_bias says
    o_bias: bool | None = None
    windows: str = "none"  # none: never; always: sliding_window in every layer; flagged: as use_sliding_window says


_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = {
    **_COMMON,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILIES = {
    "LlamaForCausalLM": Family("llama", {**_COMMON, "max_position_embeddings": 2048}),
    "MistralForCausalLM": Family(
        "mistral",
        {**_COMMON, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        qkv_bias=False,
        o_bias=False,
        windows="always",
    ),
    "Qwen2ForCausalLM": Family("qwen2", _QWEN, qkv_bias=True, o_bias=False, windows="flagged"),
    "Qwen3ForCausalLM": Family("qwen3", {**_QWEN, "head_dim": 128}, qk_norm=True, windows="flagged"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder. `layer_windows[i]` is how many tokens layer i sees, the newest included; None is all."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_eps: float
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    act: Act
    tie_embeddings: bool
    layer_ropes: tuple[RopeConfig, ...]
    layer_windows: tuple[int | None, ...]
    norm_order: NormOrder = "cast_then_scale"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def rope(self) -> RopeConfig:
        """The rotary settings of the first layer; most models have one for all."""
        return self.layer_ropes[0]

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @staticmethod
    def from_folder(path: str | Path) -> "ModelConfig":
        """Read config.json, generation_config.json and the tokenizer's ends of sequence. Raises JobFileError."""
        folder = Path(path)
        config = read_config_json(folder)
        return from_config(config, str(folder / "config.json"), eos=eos_token_ids(folder, config))

    @staticmethod
    def from_gguf(path: str | Path) -> "ModelConfig":
        """Read the header of a GGUF file. Raises JobFileError."""
        from batchgen.models.gguf import GGUFFile
        from batchgen.models.gguf_config import hf_config

        with GGUFFile(path) as file:
            config = hf_config(file)
        return from_config(config, str(path), eos=token_ids(config.get("eos_token_id")))


def from_config(config: Mapping[str, Any], where: str, *, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Make a ModelConfig of the contents of a config.json; `where` names it in errors. Raises JobFileError."""
    architecture = _architecture(config, where)
    family = FAMILIES[architecture]
    given = {**family.defaults, **config}
    for name, value in family.defaults.items():  # null means "as the class says", except where it has a meaning
        if given[name] is None and name not in _NULLABLE:
            given[name] = value
    if (quantization := given.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise JobFileError(
            f"{where}: quantization_config.quant_method {method!r} is not supported; "
            "use the unquantized weights or a GGUF file"
        )
    act = given["hidden_act"]
    if not isinstance(act, str) or act not in _ACTS:
        raise JobFileError(f"{where}: hidden_act is {act!r}, which is not supported; supported: {', '.join(_ACTS)}")
    num_layers = _count(given, "num_hidden_layers", where, most=_MOST_LAYERS)
    num_q_heads, num_kv_heads, head_dim = _heads(given, where)
    given["max_position_embeddings"] = _count(given, "max_position_embeddings", where)
    types, windows = _layers(family, given, num_layers, where)
    ropes = layer_ropes(given, head_dim=head_dim, layer_types=types, where=where)
    bias = bool(given.get("attention_bias", False))
    bos = token_ids(config.get("bos_token_id"))
    return ModelConfig(
        architecture=architecture,
        vocab_size=_count(given, "vocab_size", where),
        hidden_size=_count(given, "hidden_size", where),
        num_layers=num_layers,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=_count(given, "intermediate_size", where),
        max_positions=min(rope.longest for rope in ropes),
        rms_eps=_positive(given, "rms_norm_eps", where),
        qk_norm=family.qk_norm,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        o_bias=bias if family.o_bias is None else family.o_bias,
        mlp_bias=family.model_type == "llama" and bool(given.get("mlp_bias", False)),
        act=_ACTS[act],
        tie_embeddings=bool(given["tie_word_embeddings"]),
        layer_ropes=ropes,
        layer_windows=windows,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name in FAMILIES:
            return str(name)
    model_type = config.get("model_type")
    if not names:
        for name, family in FAMILIES.items():
            if family.model_type == model_type and "auto_map" not in config:
                return name
    asked = f"architectures {names}" if names else f"model_type {model_type!r}"
    if "auto_map" in config:
        raise JobFileError(
            f"{where}: {asked} brings its own code (auto_map), and batchgen never runs a model's code "
            f"(there is no trust_remote_code); supported: {', '.join(FAMILIES)}"
        )
    raise JobFileError(f"{where}: {asked} is not supported; supported: {', '.join(FAMILIES)}")


def _heads(given: Mapping[str, Any], where: str) -> tuple[int, int, int]:
    num_q_heads = _count(given, "num_attention_heads", where)
    num_kv_heads = num_q_heads
    if given.get("num_key_value_heads") is not None:
        num_kv_heads = _count(given, "num_key_value_heads", where)
    if num_q_heads % num_kv_heads:
        raise JobFileError(
            f"{where}: num_attention_heads {num_q_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    if given.get("head_dim") is not None:
        return num_q_heads, num_kv_heads, _count(given, "head_dim", where)
    hidden = _count(given, "hidden_size", where)
    if hidden % num_q_heads:
        raise JobFileError(
            f"{where}: hidden_size {hidden} is not a multiple of num_attention_heads {num_q_heads}, "
            "and there is no head_dim"
        )
    return num_q_heads, num_kv_heads, hidden // num_q_heads


def _layers(
    family: Family, given: Mapping[str, Any], num_layers: int, where: str
) -> tuple[tuple[str, ...], tuple[int | None, ...]]:
    """Type and window of each layer. Only the fields that the family's own code reads count, as in transformers."""
    window = given.get("sliding_window")
    if window is not None:
        window = _count(given, "sliding_window", where)
    if family.windows == "none" or (family.windows == "flagged" and not given.get("use_sliding_window", False)):
        window = None
    if family.windows == "flagged" and given.get("layer_types") is not None:
        types = tuple(given["layer_types"])
        if len(types) != num_layers:
            raise JobFileError(f"{where}: layer_types holds {len(types)} entries for {num_layers} layers")
        for kind in types:
            if kind not in ("full_attention", "sliding_attention"):
                raise JobFileError(
                    f"{where}: layer_types holds {kind!r}, which is not supported; "
                    "supported: full_attention, sliding_attention"
                )
        if window is None and "sliding_attention" in types:
            raise JobFileError(
                f"{where}: layer_types holds 'sliding_attention', "
                "but sliding_window is not set or use_sliding_window is false"
            )
    else:
        first = _count(given, "max_window_layers", where, least=0) if family.windows == "flagged" else 0
        types = tuple(
            "sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)
        )
    return types, tuple(window if kind == "sliding_attention" else None for kind in types)


def _positive(given: Mapping[str, Any], name: str, where: str) -> float:
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise JobFileError(f"{where}: {name} is {value!r}; expected a number above 0")
    return float(value)


def _count(given: Mapping[str, Any], name: str, where: str, least: int = 1, most: int = _MOST) -> int:
    if name not in given:
        raise JobFileError(f"{where}: {name} is missing")
    value = given[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise JobFileError(f"{where}: {name} is {value!r}; expected a whole number from {least} to {most}")
    return value
