"""Weights out of a GGUF file, and the cache of converted ones."""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from batchgen.env import cache_folder
from batchgen.errors import EngineError
from batchgen.models.gguf import GGUFFile, content_fingerprint
from batchgen.models.weights import Checkpoint, SafetensorsCheckpoint

_log = logging.getLogger(__name__)
_FORMAT = 1  # of the cache; raise it when a conversion changes
_SHARD_BYTES = 1 << 30
_GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NO_WEIGHTS = ("rope_freqs.weight",)


class GGUFCheckpoint:
    """The tensors of a GGUF file under the names of transformers, dequantized and in its order of rotary values."""

    def __init__(self, path: Path) -> None:
        self.where = str(path)
        self._file = GGUFFile(path)
        self._names = {_name(name): name for name in self._file.tensors if name not in _NO_WEIGHTS}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def num_values(self, name: str) -> int:
        """Numbers in a tensor."""
        return self._file.tensors[self._names[name]].num_values

    def read(self, name: str) -> Tensor:
        """Return one tensor in float32."""
        source = self._names[name]
        tensor = torch.from_numpy(self._file.read(source))
        if self._file.architecture == "llama" and ".attn_q." in source:
            return _half_split(tensor, self._file.setting("attention.head_count"))
        if self._file.architecture == "llama" and ".attn_k." in source:
            return _half_split(tensor, self._file.setting("attention.head_count_kv"))
        return tensor


def _name(name: str) -> str:
    """Translate a tensor's name; one that is not known stays, and the loader complains about it."""
    stem, _, suffix = name.rpartition(".")
    if stem in _GLOBAL:
        return f"{_GLOBAL[stem]}.{suffix}"
    _, _, rest = stem.partition("blk.")
    layer, _, part = rest.partition(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{suffix}" if part in _LAYER else name


def _half_split(tensor: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's order of a head's rows, in which the two values of a rotation lie side by side."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def open_gguf(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Return the weights of a GGUF file, from the cache of converted ones when they are there, else after converting.

    The cache is keyed by the file's content. When it can't be written, the weights come from the file itself.
    """
    name = f"{content_fingerprint(path)}-{str(dtype).removeprefix('torch.')}-{_FORMAT}"
    folder = cache_folder() / "gguf" / name
    if folder.is_dir():
        try:
            return SafetensorsCheckpoint(folder)
        except EngineError as error:  # a power cut, or somebody cleaned up
            _log.warning("%s: converting %s again", error, path)
            shutil.rmtree(folder, ignore_errors=True)
    source = GGUFCheckpoint(path)
    try:
        _convert(source, folder, dtype)
    except (OSError, SafetensorError) as error:
        _log.warning("%s: the converted weights can't be cached in %s: %s", path, folder.parent, error)
        return source
    return SafetensorsCheckpoint(folder)


def _convert(source: GGUFCheckpoint, folder: Path, dtype: torch.dtype) -> None:
    """Write a folder of safetensors files; it has its name only when it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        weight_map: dict[str, str] = {}
        for number, names in enumerate(_shards(source, dtype)):
            file = f"model-{number:05d}.safetensors"
            tensors = {name: source.read(name).to(dtype).contiguous() for name in names}
            save_file(tensors, part / file, {"format": "pt"})
            weight_map |= dict.fromkeys(names, file)
        (part / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        os.rename(part, folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster, with the same weights
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _shards(source: GGUFCheckpoint, dtype: torch.dtype) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in source.names():
        names.append(name)
        size += source.num_values(name) * dtype.itemsize
        if size >= _SHARD_BYTES:
            yield names
            names, size = [], 0
    if names:
        yield names
