"""penalize: repetition, presence and frequency penalties."""

import torch
from torch import Tensor

from batchgen_kernels.bitmask import unpack


def reference(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Repetition first (of prompt and output: positive logits divided, others multiplied), then the other two."""
    seen = unpack(prompt_mask, logits.shape[1]) | (output_counts > 0)
    factor = torch.where(seen, repetition.unsqueeze(1), 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency.unsqueeze(1) * output_counts - presence.unsqueeze(1) * (output_counts > 0)


def penalize(
    logits: Tensor, prompt_mask: Tensor, output_counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Penalised float32 logits [S, V]; rows with penalties (1, 0, 0) come back as they are.

    prompt_mask is a bitmask of the prompt's tokens (int32 [S, ceil(V / 32)]), output_counts how often each token was
    generated (int32 or int16 [S, V]); the penalties are float32 [S].
    """
    rows = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero().squeeze(1)
    result = logits.float().clone()
    if rows.numel():
        args = (result, prompt_mask, output_counts, repetition, presence, frequency)
        result[rows] = reference(*(arg[rows] for arg in args))
    return result
