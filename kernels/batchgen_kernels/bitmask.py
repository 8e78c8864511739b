"""apply_bitmask: forbid tokens by a packed bitmask, the format that grammar libraries fill."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import numpy as np
import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, runs_kernels, tl

BLOCK = 4096


def unpack(mask: Tensor, vocab_size: int) -> Tensor:
    """Bool [S, vocab_size] of the int32 words [S, ceil(vocab_size / 32)]; token t is bit t % 32 of word t // 32."""
    bits = mask.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=mask.device)
    return (bits & 1).bool().flatten(1)[:, :vocab_size]


def reference(logits: Tensor, mask: Tensor) -> Tensor:
    """The definition."""
    return logits.masked_fill(~unpack(mask, logits.shape[1]), -torch.inf)


@jit()
def load_bits(mask, row, token, inside, VOCAB: tl.constexpr):
    """Whether the bit of each token is set in a row of the mask."""
    words = tl.load(mask + row * ((VOCAB + 31) // 32) + token // 32, mask=inside, other=0)
    return (words >> (token % 32)) & 1 != 0


@jit()
def apply_bitmask_kernel(logits, mask, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    allowed = load_bits(mask, row, token, inside, VOCAB)
    values = tl.load(logits + row * VOCAB + token, mask=inside, other=0.0)
    tl.store(out + row * VOCAB + token, tl.where(allowed, values, float("-inf")), mask=inside)


def _launch(logits: Tensor, mask: Tensor) -> Tensor:
    check("logits", logits, (None, None), FLOATS, contiguous=True)
    rows, vocab = logits.shape
    check("mask", mask, (rows, -(-vocab // 32)), (torch.int32,), device=logits.device, contiguous=True)
    out = torch.empty_like(logits)
    if rows:
        apply_bitmask_kernel[rows, -(-vocab // BLOCK)](logits, mask, out, VOCAB=vocab, BLOCK=BLOCK, num_warps=8)
    return out


def apply_bitmask_cpu(logits: Tensor, mask: Tensor) -> Tensor:
    """The bits as bytes, by NumPy: a third of the time that shifts in 32-bit integers take."""
    words = mask.contiguous().numpy().view(np.uint8)
    bits = np.unpackbits(words, axis=1, count=logits.shape[1], bitorder="little")
    return torch.where(torch.from_numpy(bits).view(torch.bool), logits, -torch.inf)


def apply_bitmask(logits: Tensor, mask: Tensor) -> Tensor:
    """logits[S, V] with -inf where the token's bit in mask (int32 [S, ceil(V / 32)]) is 0."""
    return _launch(logits, mask) if runs_kernels(logits) else apply_bitmask_cpu(logits, mask)
