"""What a step's draws that follow a grammar ask of the host: token masks before them, and a look at them behind.

Masks are made while the device computes the step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.engine.batch import Batch
from batchgen.engine.request import Constraint, Matcher
from batchgen.engine.sequence import Ints, Sequence

_NO_CHOICE_MADE = -1
"""All bits set: the mask of a draw that nobody will take."""


def tokens_known(batch: Batch) -> bool:
    """Whether the host has seen all tokens before the draws that need masks."""
    return all(seq.finished or len(seq.outputs) >= index for seq, index in _constrained(batch))


def refused(batch: Batch, tokens: Ints) -> set[int]:
    """Take the drawn tokens int64 [S] through the grammars. Numbers of the draws that these do not allow.

    A draw that was overtaken, and an end of sequence, is no token of an answer.
    """
    taken = [
        (number, seq)
        for number, (seq, index) in zip(batch.constrained.tolist(), _constrained(batch), strict=True)
        if not seq.finished and len(seq.outputs) == index and tokens[number] not in seq.stop_ids
    ]
    constraint = taken[0][1].request.constraint if taken else None
    if constraint is None:
        return set()
    allowed = constraint.accept_tokens([(seq.matcher, int(tokens[number])) for number, seq in taken if seq.matcher])
    return {number for (number, _), is_allowed in zip(taken, allowed, strict=True) if not is_allowed}


def token_masks(batch: Batch, num_tokens: int, device: torch.device) -> Tensor:
    """int32 [C, ceil(num_tokens / 32)] on the device, one row for each of `batch.constrained`, in their order.

    A draw that was overtaken, since its answer has ended or has been lengthened by forced tokens, may draw anything.
    """
    shape = (len(batch.constrained), -(-num_tokens // 32))
    # A buffer of its own: the copy to the device may be waiting when the next masks are made.
    masks = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    array = masks.numpy()
    wanted: list[tuple[Matcher, int]] = []
    constraint: Constraint | None = None
    for number, (seq, index) in enumerate(_constrained(batch)):
        if seq.finished or len(seq.outputs) != index or seq.matcher is None:
            array[number] = _NO_CHOICE_MADE
        else:
            wanted.append((seq.matcher, number))
            constraint = seq.request.constraint
    if constraint is not None:
        constraint.fill_masks(wanted, array)
    return masks.to(device, non_blocking=True)


def _constrained(batch: Batch) -> Iterator[tuple[Sequence, int]]:
    """The sequence of each draw that follows a grammar, with the number of tokens before it."""
    for number in batch.constrained.tolist():
        yield batch.draws[number], int(batch.draw_index[number])
