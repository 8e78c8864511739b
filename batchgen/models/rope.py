"""Rotary position settings as model folders write them, under old and new names. No torch here: see rope_table.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.errors import JobFileError

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")

_OLD_NAMES = {"su": "longrope"}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
_NUMBERS = (
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "low_freq_factor",
    "high_freq_factor",
)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One way to rotate: `rotary_dim` of each head's values, by frequencies of base `theta`, scaled as `kind` says.

    `original_positions` is the length the model was first trained at, `max_positions` the config's own limit.
    """

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    original_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def longest(self) -> int:
        """Tokens a sequence may have: yarn stretches the trained length by its factor, the others state theirs."""
        if self.kind == "yarn" and self.factor is not None:
            return max(self.max_positions, int(self.original_positions * self.factor))
        return self.max_positions


def layer_ropes(
    config: Mapping[str, Any], *, head_dim: int, layer_types: tuple[str, ...], where: str
) -> tuple[RopeConfig, ...]:
    """One RopeConfig a layer, from `rope_parameters`, or from `rope_scaling` and `rope_theta`.

    Both may hold one set for all layers or one for each layer type. Raises JobFileError naming the field and value.
    """
    field = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(field) or {}
    if not isinstance(settings, Mapping):
        raise JobFileError(f"{where}: {field} is {settings!r}; expected an object or null")
    if not any(isinstance(value, Mapping) for value in settings.values()):
        rope = _rope(config, settings, head_dim, f"{where}: {field}")
        return (rope,) * len(layer_types)
    if missing := sorted(set(layer_types) - settings.keys()):
        raise JobFileError(f"{where}: {field} has no entry for layer type {missing[0]!r}; it has {sorted(settings)}")
    ropes = {kind: _rope(config, settings[kind], head_dim, f"{where}: {field}.{kind}") for kind in set(layer_types)}
    return tuple(ropes[kind] for kind in layer_types)


def _rope(config: Mapping[str, Any], settings: Any, head_dim: int, where: str) -> RopeConfig:
    if not isinstance(settings, Mapping):
        raise JobFileError(
            f"{where} is {settings!r}; expected an object (layers without rotary positions are not supported)"
        )
    kind = settings.get("rope_type", settings.get("type", "default"))
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in ROPE_TYPES:
        name = "rope_type" if "rope_type" in settings else "type"
        raise JobFileError(f"{where}.{name} is {kind!r}, which is not supported; supported: {', '.join(ROPE_TYPES)}")
    for name in _NEEDED.get(kind, ()):
        if settings.get(name) is None:
            raise JobFileError(f"{where}.{name} is missing; rope type {kind!r} needs it")
    max_positions = config["max_position_embeddings"]
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    share = _number(settings, config, "partial_rotary_factor", where)
    rotary_dim = int(round(head_dim * (1.0 if share is None else share), 6))  # 44 * (30 / 44) is 29.999...
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_dim:
        raise JobFileError(
            f"{where}: head size {head_dim} with partial_rotary_factor {share} rotates {rotary_dim} values; "
            f"expected an even number from 2 to {head_dim}"
        )
    numbers = {name: _number(settings, {}, name, where) for name in _NUMBERS}
    original = _length(original, max_positions, where)
    if kind == "yarn" and numbers["factor"] is None:
        numbers["factor"] = max_positions / original
    theta = _number(settings, config, "rope_theta", where)
    return RopeConfig(
        kind=kind,
        theta=10_000.0 if theta is None else theta,
        rotary_dim=rotary_dim,
        max_positions=max_positions,
        original_positions=original,
        truncate=bool(settings.get("truncate", True)),
        short_factor=_factors(settings, "short_factor", rotary_dim, where) if kind == "longrope" else (),
        long_factor=_factors(settings, "long_factor", rotary_dim, where) if kind == "longrope" else (),
        **numbers,
    )


def _number(first: Mapping[str, Any], second: Mapping[str, Any], name: str, where: str) -> float | None:
    value = first.get(name)
    value = second.get(name) if value is None else value
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise JobFileError(f"{where}: {name} is {value!r}; expected a number above 0")
    return float(value)


def _length(value: Any, default: int, where: str) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1:
        raise JobFileError(f"{where}: original_max_position_embeddings is {value!r}; expected a whole number above 0")
    return int(value)


def _factors(settings: Mapping[str, Any], name: str, rotary_dim: int, where: str) -> tuple[float, ...]:
    value = settings[name]
    if not isinstance(value, list | tuple) or len(value) != rotary_dim // 2:
        size = len(value) if isinstance(value, list | tuple) else repr(value)
        raise JobFileError(
            f"{where}.{name} holds {size} numbers; expected {rotary_dim // 2}, half the rotary dimension"
        )
    return tuple(float(number) for number in value)
