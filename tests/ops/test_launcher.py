"""A kernel that was compiled once is launched without Triton's search for it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen_kernels._triton import _Launcher


class FakeKernel:
    """Counts what Triton would be asked; its compiled kernels note what they are launched with."""

    def __init__(self, names: list[str], constants: list[str]) -> None:
        self.__name__ = "fake"
        self.params = [SimpleNamespace(name=name, is_constexpr=name in constants) for name in names]
        self.searches = 0
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        self.searches += 1
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, args))


def test_the_second_launch_needs_no_search() -> None:
    kernel = FakeKernel(["x", "count", "scale", "WIDTH"], ["WIDTH"])
    launch = _Launcher(kernel, ["count"])
    x = torch.zeros(8)
    launch(x, 3, 0.5, grid=(4,), warmup=False, WIDTH=16, num_warps=2)
    launch(x, 80, 0.7, grid=(5, 2), warmup=False, WIDTH=16, num_warps=2)
    assert kernel.searches == 1
    assert kernel.launches == [((5, 2, 1), (x, 80, 0.7, 16))]


@pytest.mark.parametrize(
    ("count", "x", "options"),
    [
        (16, torch.zeros(8), {"WIDTH": 16}),
        (1, torch.zeros(8), {"WIDTH": 16}),
        (2**40, torch.zeros(8), {"WIDTH": 16}),
        (3, torch.zeros(9)[1:], {"WIDTH": 16}),
        (3, torch.zeros(8, dtype=torch.float64), {"WIDTH": 16}),
        (3, torch.zeros(8), {"WIDTH": 32}),
        (3, torch.zeros(8), {"WIDTH": 16, "num_warps": 8}),
    ],
)
def test_what_is_compiled_apart_is_searched_apart(count: int, x: torch.Tensor, options: dict[str, int]) -> None:
    kernel = FakeKernel(["x", "count", "WIDTH"], ["WIDTH"])
    launch = _Launcher(kernel, [])
    launch(torch.zeros(8), 3, grid=(1,), warmup=False, WIDTH=16)
    launch(x, count, grid=(1,), warmup=False, **options)
    assert kernel.searches == 2
    launch(x, count, grid=(1,), warmup=False, **options)
    assert kernel.searches == 2


def test_constants_in_between_are_refused() -> None:
    with pytest.raises(TypeError, match="constants come after"):
        _Launcher(FakeKernel(["WIDTH", "x"], ["WIDTH"]), [])
