"""copy_pages: copy KV pages in every layer, for a sequence that forks inside a page."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen_kernels._check import check
from batchgen_kernels._triton import jit, runs_kernels, tl

BLOCK = 2048


@jit()
def copy_pages_kernel(k_pages, v_pages, src, dst, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (copies, blocks of a page, 2): keys, then values, of one layer."""
    pages = k_pages if tl.program_id(2) == 0 else v_pages
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(src + tl.program_id(0)), tl.load(dst + tl.program_id(0))
    values = tl.load(pages + source * SIZE + offset, mask=offset < SIZE)
    tl.store(pages + target * SIZE + offset, values, mask=offset < SIZE)


def copy_pages(k_pages: Sequence[Tensor], v_pages: Sequence[Tensor], src: Tensor, dst: Tensor) -> None:
    """Copy page src[i] onto page dst[i] in all layers. src and dst are int64 [N]; no page may be in both."""
    check("src", src, (None,), (torch.int64,))
    check("dst", dst, src.shape, (torch.int64,), device=src.device)
    for k, v in zip(k_pages, v_pages, strict=True):
        if runs_kernels(k) and len(src):
            check("k_pages", k, (None, None, None, None), device=src.device, contiguous=True)
            check("v_pages", v, k.shape, (k.dtype,), device=src.device, contiguous=True)
            size = k[0].numel()
            copy_pages_kernel[len(src), -(-size // BLOCK), 2](k, v, src, dst, SIZE=size, BLOCK=BLOCK)
        else:
            for pages in (k, v):
                pages.index_copy_(0, dst, pages.index_select(0, src))
