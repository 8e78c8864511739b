"""Checkpoints: where weights are read from, and how they get into a model."""

import json
import logging
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from batchgen.errors import EngineError
from batchgen.models.decoder import Model

_log = logging.getLogger(__name__)
_PREFIX = "model."


class Checkpoint(Protocol):
    """Named weights, read one at a time. Names are those of transformers."""

    where: str

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        ...

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        ...


class SafetensorsCheckpoint:
    """The safetensors files of a model folder, memory-mapped. Raises EngineError for missing or damaged files."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise EngineError(f"{path} can't be read: {error}; copy or download it again") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def names(self) -> list[str]:
        """Return the names of all tensors in all files."""
        return list(self._files)

    def read(self, name: str) -> Tensor:
        """Return a view of the file; copy it before use."""
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise EngineError(f"{index} can't be read: {error!r}; copy or download it again") from error
        if missing := [name for name in names if not (folder / name).exists()]:
            raise EngineError(
                f"{folder}: {', '.join(missing)} is missing, but {index.name} names it; copy the whole model"
            )
        return [folder / name for name in names]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    found = sorted(path.name for path in folder.glob("*.bin")) + sorted(path.name for path in folder.glob("*.pt"))
    has = f"only {', '.join(found[:3])}, which batchgen does not read" if found else "no weights"
    raise EngineError(
        f"{folder} holds {has}; it needs model.safetensors, or model.safetensors.index.json and its files"
    )


def load_weights(model: Model, checkpoint: Checkpoint) -> None:
    """Copy a checkpoint into a model. Raises EngineError naming unknown, missing or misshapen tensors."""
    names = {name.removeprefix(_PREFIX): name for name in checkpoint.names()}
    if model.config.tie_embeddings and "lm_head.weight" in names:
        _decide_tie(model, checkpoint, names)
    targets = model.checkpoint_tensors()
    for name in [name for name in names if name.endswith("rotary_emb.inv_freq")]:  # old checkpoints kept this buffer
        del names[name]
    known = names.keys()
    _compare(checkpoint.where, targets.keys() - known, "is missing")
    _compare(checkpoint.where, known - targets.keys(), f"is not part of a {model.config.architecture} with this config")
    for name, target in targets.items():
        tensor = checkpoint.read(names[name])
        if tensor.shape != target.shape:
            raise EngineError(
                f"{checkpoint.where}: tensor {names[name]} has shape {list(tensor.shape)}, "
                f"but the config asks for {list(target.shape)}"
            )
        if not tensor.is_floating_point() or tensor.element_size() == 1:
            raise EngineError(
                f"{checkpoint.where}: tensor {names[name]} is {tensor.dtype}; expected float32, float16 or bfloat16"
            )
        target.copy_(tensor)


def _decide_tie(model: Model, checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """A head beside tie_word_embeddings: true. When it differs from the embedding it is used, as transformers does."""
    if "embed_tokens.weight" not in names:
        names["embed_tokens.weight"] = names.pop("lm_head.weight")
        return
    head, embed = checkpoint.read(names["lm_head.weight"]), checkpoint.read(names["embed_tokens.weight"])
    if torch.equal(head, embed):
        del names["lm_head.weight"]
        return
    _log.warning(
        "%s: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight; "
        "the head is used as it is. Set tie_word_embeddings to false in config.json to silence this.",
        checkpoint.where,
    )
    model.untie()


def _compare(where: str, names: set[str], trouble: str) -> None:
    if names:
        first = sorted(names)[:4]
        more = f" (and {len(names) - len(first)} more)" if len(names) > len(first) else ""
        raise EngineError(f"{where}: tensor {', '.join(first)}{more} {trouble}")


def fill_random(model: Model, seed: int = 0) -> None:
    """Give a model random weights that keep activations finite: for benchmarks, where only shapes matter."""
    generator = torch.Generator(model.device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
