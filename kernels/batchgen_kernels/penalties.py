"""penalize: repetition, presence and frequency penalties."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import torch
from torch import Tensor

from batchgen_kernels._check import FLOATS, check
from batchgen_kernels._triton import jit, runs_kernels, tl
from batchgen_kernels.bitmask import load_bits, unpack

BLOCK = 4096


def reference(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition first (of prompt and output: positive logits divided, others multiplied), then the other two."""
    seen = unpack(prompt_mask, logits.shape[1]) | (output_counts > 0)
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(1) * output_counts - presence.unsqueeze(1) * (output_counts > 0)


def _where_penalised(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """The reference, on the rows that have a penalty."""
    rows = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero().squeeze(1)
    result = logits.float().clone()
    if rows.numel():
        args = (result, prompt_mask, output_counts, repetition, presence, frequency)
        result[rows] = reference(*(arg[rows] for arg in args))
    return result


@jit()
def penalize_kernel(
    logits, prompt_mask, output_counts, repetition, presence, frequency, out, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows, blocks of the vocabulary)."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < VOCAB
    values = tl.load(logits + row * VOCAB + token, mask=inside, other=0.0).to(tl.float32)
    r, p, f = tl.load(repetition + row), tl.load(presence + row), tl.load(frequency + row)
    if (r != 1.0) | (p != 0.0) | (f != 0.0):
        count = tl.load(output_counts + row * VOCAB + token, mask=inside, other=0).to(tl.float32)
        factor = tl.where(load_bits(prompt_mask, row, token, inside, VOCAB) | (count > 0), r, 1.0)
        values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
        values = values - f * count - tl.where(count > 0, p, 0.0)
    tl.store(out + row * VOCAB + token, values, mask=inside)


def _launch(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    check("logits", logits, (None, None), FLOATS, contiguous=True)
    (rows, vocab), device = logits.shape, logits.device
    check("prompt_mask", prompt_mask, (rows, -(-vocab // 32)), (torch.int32,), device=device, contiguous=True)
    check("output_counts", output_counts, (rows, vocab), (torch.int16, torch.int32), device=device, contiguous=True)
    for name, value in (("repetition", repetition), ("presence", presence), ("frequency", frequency)):
        check(name, value, (rows,), (torch.float32,), device=device)
    out = torch.empty_like(logits, dtype=torch.float32)
    if rows:
        args = (logits, prompt_mask, output_counts, repetition, presence, frequency, out)
        penalize_kernel[rows, -(-vocab // BLOCK)](*args, VOCAB=vocab, BLOCK=BLOCK, num_warps=8)
    return out


def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised float32 logits [S, V]; rows with penalties (1, 0, 0) come back as they are.

    prompt_mask is a bitmask of the prompt's tokens (int32 [S, ceil(V / 32)]), output_counts how often each token was
    generated (int32 or int16 [S, V]); the penalties are float32 [S].
    """
    run = _launch if runs_kernels(logits) else _where_penalised
    return run(logits, prompt_mask, output_counts, repetition, presence, frequency)
