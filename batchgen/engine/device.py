"""Which device and number format to run on, and what fits there."""

import dataclasses

import numpy as np
import torch

from batchgen.engine.batch import Batch, Ids
from batchgen.engine.config import EngineConfig, KVShape, Limits, num_pages
from batchgen.engine.model_runner import LARGE_HIDDEN_SIZE, CausalModel, ModelRunner
from batchgen.engine.sequence import Ints
from batchgen.errors import EngineError

_SAMPLER_BYTES = 20
"""Per row and token of the vocabulary, when rows ask for penalties and filters: float32 copies and counts."""
_DRAFT_TOKENS = 512
"""Size of the KV cache while the memory of the largest steps is measured: a few pages of any size."""
_SPARE_BYTES = 2**30
"""For the memory of cuBLAS, of loaded kernels, and what lies between blocks."""


def choose_device(device: str) -> torch.device:
    """The device of `auto`, `cpu` or `cuda`. Raises EngineError when the GPU that is asked for is not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("engine.device is cuda, but torch finds no GPU here: use a machine with one, or device: cpu")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The number format of `auto`, `bfloat16` or `float32`: bfloat16 where the hardware multiplies it fast."""
    if dtype == "auto":
        fast = device.type == "cuda" or torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if fast else torch.float32
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype]


def resolve_limits(config: EngineConfig, model: CausalModel, num_tokens: int) -> Limits:
    """The sizes that the engine of a loaded model runs with. Raises EngineError when nothing fits."""
    shape = KVShape(min(model.max_length, model.config.max_positions), model.kv_bytes_per_token)
    if model.device.type != "cuda":
        return Limits.resolve(config, shape, on_gpu=False)
    if config.max_batch_rows is None:
        # Products of large matrices are at their full rate with 512 rows, those of small ones with more.
        rows = 512 if model.config.hidden_size >= LARGE_HIDDEN_SIZE else 1024
        config = dataclasses.replace(config, max_batch_rows=rows)
    if config.kv_bytes:
        return Limits.resolve(config, shape, on_gpu=True)
    few_pages = dataclasses.replace(config, kv_bytes=_DRAFT_TOKENS * shape.bytes_per_token)
    draft = Limits.resolve(few_pages, shape, on_gpu=True)
    return Limits.resolve(config, shape, on_gpu=True, free_gpu_bytes=_kv_room(model, draft, num_tokens))


def _kv_room(model: CausalModel, limits: Limits, num_tokens: int) -> int:
    """Bytes of GPU memory that the largest steps leave free: they are run once to find out.

    Raises EngineError when they leave nothing.
    """
    device = model.device
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    steps = f"prefill steps of {limits.max_tokens:,} tokens and decode steps of {limits.max_rows:,} rows"
    room = f"lower max_batch_tokens or max_batch_rows, or take a smaller model: {_gib(free)} of {_gib(total)} are free"
    try:
        # Their rows are all in one page. They are run apart from each other, and together, which takes other kernels.
        runs = [(_largest_prefill, False), (_largest_decode, False), (_largest_decode, True)]
        peaks = []
        for make, share in runs:
            runner = ModelRunner(model, limits, num_tokens, cuda_graphs=False, share_pages=share)
            peaks.append(_peak_bytes(runner, make(limits), device))
    except torch.OutOfMemoryError as error:
        raise EngineError(f"the GPU has no memory for {steps}; {room} beside the weights") from error
    del runner
    torch.cuda.empty_cache()
    # Less than before: now kernels are loaded, with memory for their stacks.
    free, _ = torch.cuda.mem_get_info(device)
    # Graphs have memory of their own.
    needed = 2 * max(peaks) + limits.max_rows * num_tokens * _SAMPLER_BYTES + _SPARE_BYTES
    if needed > free:
        raise EngineError(f"the GPU has no memory for a KV cache beside {steps}, which take {_gib(needed)}; {room}")
    return free - needed


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _peak_bytes(runner: ModelRunner, batch: Batch, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner.launch(batch)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _largest_prefill(limits: Limits) -> Batch:
    """Prompts of max_length up to max_tokens, and the logits of as many tokens as there are rows. All in page 0."""
    tokens = np.arange(limits.max_tokens)
    starts = np.append(tokens[:: limits.max_length], limits.max_tokens).astype(np.int32)
    return _page_0_batch(limits, tokens % limits.max_length, starts)._replace(
        token_ids=np.zeros(limits.max_tokens, np.int64), wanted=tokens[: limits.max_rows], first_draw=True
    )


def _largest_decode(limits: Limits) -> Batch:
    """One token of every row, each at the end of max_length."""
    return _page_0_batch(
        limits, np.full(limits.max_rows, limits.max_length - 1), np.arange(limits.max_rows + 1, dtype=np.int32)
    )


def _page_0_batch(limits: Limits, positions: Ints, query_start: Ids) -> Batch:
    """A batch that scores a token of every row, draws nothing, and reads and writes the padding page alone."""
    kv_lens = positions[query_start[1:] - 1].astype(np.int32) + 1
    nothing = np.empty(0, np.int64)
    return Batch(
        token_ids=None,
        rows=np.arange(len(kv_lens)) % limits.max_rows,
        positions=positions,
        slots=np.zeros(len(positions), np.int64),
        block_table=np.zeros((len(kv_lens), num_pages(int(kv_lens.max()), limits.page_size)), np.int32),
        query_start=query_start,
        kv_lens=kv_lens,
        max_query_len=int(np.diff(query_start).max()),
        max_kv_len=int(kv_lens.max()),
        tree=None,
        wanted=None,
        draws=[],
        draw_rows=nothing,
        draw_from=None,
        draw_index=nothing,
        constrained=nothing,
        scores=[],
        score_from=np.arange(min(limits.max_rows, len(positions))),
        score_ids=np.zeros(min(limits.max_rows, len(positions)), np.int64),
        copies=nothing.reshape(2, 0),
        first_draw=False,
        filled=[],
    )
