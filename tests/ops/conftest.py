"""Inputs of the ops, and the tolerances of their results."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from batchgen_kernels import AttentionMetadata, TokenTree
from batchgen_kernels._triton import INTERPRETED

# Norm of the error over the norm of the float64 result, by dtype.
TOLERANCES = {
    "attention": {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2},
    "fused": {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3},
    "logits": {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6},
}

# The kernels need a GPU or the interpreter: test_interpreter.py runs these files in a process of their own.
KERNELS_RUN = INTERPRETED or torch.cuda.is_available()
collect_ignore = [] if KERNELS_RUN else ["test_kernels.py"]

Step = tuple[Tensor, Tensor, Tensor, AttentionMetadata]


@pytest.fixture
def close() -> Callable[[str, Tensor, Tensor], None]:
    """Assert that a result is as near to the float64 one as the table asks for its dtype."""

    def check(kind: str, result: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
        error = (result.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm()
        assert error <= TOLERANCES[kind][dtype or result.dtype]

    return check


@pytest.fixture
def with_tree() -> Callable[..., AttentionMetadata]:
    """Give the last tokens of each sequence, so many of them, the shape of a random tree in preorder."""

    def put(meta: AttentionMetadata, sizes: Sequence[int]) -> AttentionMetadata:
        generator = torch.Generator().manual_seed(sum(sizes))
        until = torch.full((len(sizes), max(sizes) + 1), 2**31 - 1, dtype=torch.int32)
        start = meta.kv_lens.cpu() - torch.tensor(sizes, dtype=torch.int32)
        for i, size in enumerate(sizes):
            parents: list[int] = []
            for node in range(size):
                path = [*parents, -1]  # of the node before, and the root
                parents = path[int(torch.randint(len(path), (1,), generator=generator)) :][:-1]
                for ancestor in (node, *parents):
                    until[i, ancestor] = start[i] + node + 1
                parents = [node, *parents]
        device = meta.kv_lens.device
        return meta._replace(tree=TokenTree(start.to(device), until.to(device)))

    return put


@pytest.fixture
def make_step() -> Callable[..., Step]:
    """Random queries and pages of a step; what lies behind a sequence's end, and page 0, is NaN."""

    def make(
        query_lens: Sequence[int],
        kv_lens: Sequence[int],
        heads: tuple[int, int, int] = (6, 2, 32),
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        shared_pages: int = 0,
        device: str = "cpu",
    ) -> Step:
        num_q, num_kv, dim = heads
        generator = torch.Generator().manual_seed(len(kv_lens) + sum(kv_lens))
        counts = [-(-length // page_size) for length in kv_lens]
        ids = (torch.randperm(sum(counts), generator=generator) + 1).int()
        table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
        shape = (sum(counts) + 1, num_kv, page_size, dim)
        k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
        k[0], v[0] = torch.nan, torch.nan
        for i, run in enumerate(ids.split(counts)):
            table[i, : len(run)] = run
            shared = min(shared_pages, (kv_lens[i] - query_lens[i]) // page_size)
            table[i, :shared] = table[0, :shared]
            if kv_lens[i] % page_size:
                k[run[-1], :, kv_lens[i] % page_size :] = torch.nan
                v[run[-1], :, kv_lens[i] % page_size :] = torch.nan
        q = torch.randn(sum(query_lens), num_q, dim, generator=generator).to(dtype)
        starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
        lengths = torch.tensor(kv_lens, dtype=torch.int32)
        q, k, v, table, starts, lengths = (x.to(device) for x in (q, k, v, table, starts, lengths))
        return q, k, v, AttentionMetadata(table, starts, lengths, max(query_lens), max(kv_lens))

    return make
