"""copy_slots: copy the keys and values of tokens from page to page, for sequences that share a part of a page."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, next_power_of_2, runs_kernels, tl

SLOTS = 16  # of a program


@jit(varying=("num_copies",))
def copy_slots_kernel(
    k_pages,
    v_pages,
    copies,
    num_copies,
    HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (blocks of slots, heads, 2): keys, then values."""
    pages = k_pages if tl.program_id(2) == 0 else v_pages
    head, dim = tl.program_id(1), tl.arange(0, BLOCK_D)
    number = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    source = tl.load(copies + number, mask=number < num_copies, other=0)
    target = tl.load(copies + num_copies + number, mask=number < num_copies, other=0)
    real = (source != target)[:, None] & (dim < DIM)[None, :]
    source = ((source // PAGE * HEADS + head) * PAGE + source % PAGE)[:, None] * DIM + dim[None, :]
    target = ((target // PAGE * HEADS + head) * PAGE + target % PAGE)[:, None] * DIM + dim[None, :]
    tl.store(pages + target, tl.load(pages + source, mask=real, other=0.0), mask=real)


def copy_slots(k_pages: Tensor, v_pages: Tensor, copies: Tensor) -> None:
    """Copy keys and values of slot copies[0, i] to slot copies[1, i], in one layer.

    copies is int64 [2, N] of slots (page * page_size + offset), pages are [pages, Hkv, page_size, D]. No slot may be
    both a source and a target; where the two are equal nothing happens, so that a list can be padded.
    """
    check("copies", copies, (2, None), (torch.int64,), device=k_pages.device, contiguous=True)
    _, heads, page_size, dim = k_pages.shape
    count = copies.shape[1]
    if runs_kernels(k_pages) and count:
        check("k_pages", k_pages, (None, heads, page_size, dim), FLOATS, contiguous=True)
        check("v_pages", v_pages, k_pages.shape, (k_pages.dtype,), device=k_pages.device, contiguous=True)
        constants = {"HEADS": heads, "PAGE": page_size, "DIM": dim}
        constants |= {"BLOCK_N": SLOTS, "BLOCK_D": next_power_of_2(dim)}
        copy_slots_kernel[-(-count // SLOTS), heads, 2](k_pages, v_pages, copies, count, **constants)
    else:
        (source, target), (source_at, target_at) = copies // page_size, copies % page_size
        for pages in (k_pages, v_pages):
            pages[target, :, target_at] = pages[source, :, source_at]
