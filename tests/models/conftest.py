"""Tiny random models saved by transformers, and a way to run ours over whole prompts in any chunks and pages."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from batchgen.models.decoder import Model
from batchgen.models.load import load_model
from batchgen_kernels import AttentionMetadata

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "max_position_embeddings": 256,
}


class Runner:
    """Runs prompts through a model step by step; every step takes the next chunk of every prompt."""

    def __init__(self, model: Model, page_size: int = 4) -> None:
        self.model = model
        self.page_size = page_size

    def logits(self, prompts: Sequence[Sequence[int]], chunks: Sequence[int] = (10**6,)) -> list[torch.Tensor]:
        """Logits of every token of every prompt. Prompt i starts with chunk size i of `chunks`, and so on in turn."""
        self._take_pages(prompts)
        done = [0] * len(prompts)
        parts: list[list[torch.Tensor]] = [[] for _ in prompts]
        turn = 0
        while any(n < len(prompt) for n, prompt in zip(done, prompts, strict=True)):
            active = [i for i, prompt in enumerate(prompts) if done[i] < len(prompt)]
            ends = {i: min(len(prompts[i]), done[i] + chunks[(turn + i) % len(chunks)]) for i in active}
            hidden = self._step(prompts, {i: (done[i], ends[i]) for i in active}, None)
            sizes = [ends[i] - done[i] for i in active]
            for i, part in zip(active, hidden.split(sizes), strict=True):
                parts[i].append(self.model.logits(part))
                done[i] = ends[i]
            turn += 1
        return [torch.cat(part) for part in parts]

    def logits_of_rows(self, prompts: Sequence[Sequence[int]], rows: Sequence[int]) -> torch.Tensor:
        """Logits of the listed tokens of the flat batch of whole prompts."""
        self._take_pages(prompts)
        spans = {i: (0, len(prompt)) for i, prompt in enumerate(prompts)}
        return self.model.logits(
            self._step(prompts, spans, torch.tensor(rows, dtype=torch.int64, device=self.model.device))
        )

    def _take_pages(self, prompts: Sequence[Sequence[int]]) -> None:
        config, size = self.model.config, self.page_size
        counts = [-(-len(prompt) // size) for prompt in prompts]
        ids = list(range(1, sum(counts) + 1))
        random.Random(0).shuffle(ids)
        self._tables = [[ids.pop() for _ in range(count)] for count in counts]
        shape = (sum(counts) + 1, config.num_kv_heads, size, config.head_dim)
        with torch.device(self.model.device):
            self._kv = [
                (torch.full(shape, 1e3, dtype=self.model.dtype), torch.full(shape, 1e3, dtype=self.model.dtype))
                for _ in range(config.num_layers)
            ]

    def _step(
        self, prompts: Sequence[Sequence[int]], spans: dict[int, tuple[int, int]], rows: torch.Tensor | None
    ) -> torch.Tensor:
        tokens, positions, slots, starts = [], [], [], [0]
        for i, (start, end) in spans.items():
            tokens += list(prompts[i][start:end])
            positions += range(start, end)
            slots += [
                self._tables[i][p // self.page_size] * self.page_size + p % self.page_size for p in range(start, end)
            ]
            starts.append(len(tokens))
        width = max(len(self._tables[i]) for i in spans)
        table = [(self._tables[i] + [0] * width)[:width] for i in spans]
        meta = AttentionMetadata(
            block_table=self._int32(table),
            query_start=self._int32(starts),
            kv_lens=self._int32([end for _, end in spans.values()]),
            max_query_len=max(end - start for start, end in spans.values()),
            max_kv_len=max(end for _, end in spans.values()),
        )
        flat = (torch.tensor(values, device=self.model.device) for values in (tokens, positions, slots))
        with torch.inference_mode():
            return self.model(*flat, self._kv, meta, rows)

    def _int32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.model.device)


@pytest.fixture
def runner() -> type[Runner]:
    return Runner


@pytest.fixture
def load() -> Callable[..., Model]:
    def load_float32(path: Path, device: str = "cpu", **options: Any) -> Model:
        return load_model(path, device=torch.device(device), dtype=torch.float32, **options)

    return load_float32


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[transformers.PreTrainedModel, Path]]:
    """Make a tiny random model of a transformers class and save it; returns it in float32, and its folder."""

    def make(architecture: str, seed: int = 0, **config: Any) -> tuple[transformers.PreTrainedModel, Path]:
        cls = getattr(transformers, architecture)
        torch.manual_seed(seed)
        model = cls(cls.config_class(**{**SHAPE, **config}, attn_implementation="eager")).float().eval()
        with torch.no_grad():  # larger than the usual 0.02, so that every part of the model shows in the logits
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.15)
        folder = tmp_path / f"{architecture}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.fixture
def reference() -> Callable[..., torch.Tensor]:
    def logits(model: transformers.PreTrainedModel, prompt: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([list(prompt)]), use_cache=False).logits[0]

    return logits


def write_gguf(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quantized: dict[str, Any] | None = None,
) -> Path:
    """Write a GGUF file with the package of the format's authors; `quantized` tensors are packed first."""
    import gguf  # GPU machines may lack it

    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        if kind := (quantized or {}).get(name):
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def make_gguf(tmp_path: Path) -> Callable[..., Path]:
    def make(*arguments: Any, **options: Any) -> Path:
        return write_gguf(tmp_path / "tiny.gguf", *arguments, **options)

    return make


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen"
