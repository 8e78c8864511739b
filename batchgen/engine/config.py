"""What an engine is asked to be (EngineConfig), and what that comes to for one model on one machine (Limits)."""

import os
from dataclasses import dataclass
from typing import Literal, NamedTuple

from batchgen.errors import EngineError

LEAST_COPIED = 4
"""Tokens that two prompts share inside a page and that are worth a copy. Fewer are computed again."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs. None leaves the choice to model and machine. In float32 nothing here changes an answer."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    max_length: int | None = None
    """Longest prompt plus answer, in tokens."""
    page_size: int | None = None
    """Tokens per page of KV cache, shared without a copy. 64 on a GPU (a tile of attention), 16 on a CPU."""
    kv_bytes: int | None = None
    """Size of the KV cache."""
    max_batch_rows: int | None = None
    """Most sequences that run at once. A decode step computes one token of each."""
    max_batch_tokens: int | None = None
    """Most prompt tokens that one prefill step computes."""
    prefix_caching: bool = True
    threads: int | None = None
    """CPU threads of torch."""
    lag: Literal[0, 1, 2] | None = None
    """How many steps are launched before the oldest one's tokens are read."""
    max_waiting: int = 1024
    """Most requests that `Engine.generate` pulls ahead of those that run."""
    output_reserve: float | None = None
    """Share of `max_tokens` for which pages are set aside at admission; None learns from finished answers."""
    refill_share: float | None = None
    """Share of rows and pages that must be free before running answers wait for new prompts: a sixteenth on a GPU, an
    eighth on a CPU."""
    cuda_graphs: bool = True
    """On a GPU: run decode steps as CUDA graphs."""
    batch_invariant: bool = False
    """On a GPU: an answer has the same bits whatever runs beside it, in bfloat16 too. Answers that follow a grammar are
    excepted."""
    poison_freed_pages: bool = False
    """For tests: fill pages that hold nothing with NaN, so that whoever reads one is found out."""


class KVShape(NamedTuple):
    """What a model keeps per token."""

    max_positions: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes that an engine runs with."""

    max_length: int
    page_size: int
    num_pages: int
    max_rows: int
    max_tokens: int
    lag: int
    refill_share: float

    @classmethod
    def resolve(cls, config: EngineConfig, shape: KVShape, *, on_gpu: bool, free_gpu_bytes: int = 0) -> "Limits":
        """Fill in what `config` leaves open. Raises EngineError when nothing could run."""
        max_length = config.max_length or shape.max_positions
        if max_length > shape.max_positions:
            raise EngineError(
                f"max_length {max_length} is more than the model's {shape.max_positions} positions: lower it"
            )
        if max_length < 2:
            raise EngineError(f"max_length {max_length} leaves no room for a prompt and an answer: give 2 or more")
        max_rows = config.max_batch_rows or (512 if on_gpu else 64)
        page_size = config.page_size or (64 if on_gpu else 16)
        page_bytes = page_size * shape.bytes_per_token
        most_pages = max_rows * num_pages(max_length, page_size) + 1
        kv_bytes = config.kv_bytes or (free_gpu_bytes if on_gpu else physical_memory() // 4)
        pages = min(kv_bytes // page_bytes, most_pages)
        if pages < 2:
            raise EngineError(
                f"a KV cache of {kv_bytes:,} bytes holds no page of {page_size} tokens "
                f"({page_bytes:,} bytes; one more page is kept for padding): give the engine more KV memory"
            )
        return cls(
            max_length=max_length,
            page_size=page_size,
            num_pages=pages,
            max_rows=max_rows,
            max_tokens=config.max_batch_tokens or (16384 if on_gpu else 1024),
            lag=(2 if on_gpu else 0) if config.lag is None else config.lag,
            refill_share=(1 / 16 if on_gpu else 1 / 8) if config.refill_share is None else config.refill_share,
        )


def num_pages(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def physical_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
