"""Products whose result for a row does not depend on how many other rows there are.

Libraries choose by the number of rows how a product is summed up, and with it the last bits of the result. Most numbers
of rows give a row the same bits. Which ones is found out once for each shape of weight; only those are used then.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from batchgen.errors import EngineError
from batchgen.models.linear import Linear

BLOCK_ROWS = (16, 64, 128, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)
"""Numbers of rows to choose from. Decode steps have some of them; a prefill step is cut into blocks of the largest."""


def make_batch_invariant(linears: Iterable[Linear], sizes: Sequence[int] = BLOCK_ROWS) -> None:
    """Let each of these layers multiply blocks of those sizes alone that give a row the bits of the largest one.

    Raises EngineError where it matters to the largest one where in it a row stands.
    """
    found: dict[tuple[int, int, bool], Sequence[int]] = {}
    for linear in linears:
        assert linear.weight is not None
        outputs, inputs = linear.weight.shape
        kind = outputs, inputs, linear.bias is None
        if kind not in found:
            generator = torch.Generator(linear.weight.device).manual_seed(0)
            shape = sizes[-1], inputs
            x = torch.randn(shape, generator=generator, dtype=linear.weight.dtype, device=linear.weight.device)
            found[kind] = agreeing_sizes(linear, x, sizes)
        linear.fix_sizes(found[kind])


@torch.inference_mode()
def agreeing_sizes(linear: Linear, x: Tensor, sizes: Sequence[int]) -> Sequence[int]:
    """Those of `sizes` (ascending) that give each of the first rows of `x` the bits that the largest gives it."""
    linear.fix_sizes(sizes[-1:])
    whole = linear(x)
    agreeing = []
    for size in sizes:
        linear.fix_sizes((size,))
        moved = linear(x[:size].roll(size // 3, 0)).roll(-(size // 3), 0)
        if torch.equal(linear(x[:size]), whole[:size]) and torch.equal(moved, whole[:size]):
            agreeing.append(size)
    if sizes[-1] not in agreeing:
        outputs, inputs = whole.shape[1], x.shape[1]
        raise EngineError(
            f"batch_invariant: a product of {inputs} by {outputs} depends on where in a batch a row stands on this "
            "machine: leave it out, or take dtype: float32"
        )
    return agreeing
