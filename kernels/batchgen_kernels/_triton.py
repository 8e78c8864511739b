"""Triton where it is installed, stand-ins where it isn't: the ops' CPU paths and every import work without it."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors: in fp32 and fp16 only, it takes bfloat16 for integers."""


class Kernel(Protocol):
    """A compiled kernel: `kernel[grid](*args, **constants)` launches it."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class _Absent:
    """Stands for a Triton module or function that isn't there: it can be named in a signature, but not be run."""

    def __getattr__(self, name: str) -> "_Absent":
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        raise ModuleNotFoundError("this op needs Triton for tensors on a GPU: pip install 'triton>=3.6'")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError("this op needs Triton for tensors on a GPU: pip install 'triton>=3.6'")


HAS_TRITON = importlib.util.find_spec("triton") is not None
if HAS_TRITON:
    import triton

tl: Any = importlib.import_module("triton.language") if HAS_TRITON else _Absent()


def jit(*, varying: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Compile with Triton. `varying` names integers that change from step to step and must not cause recompilation."""

    def wrap(function: Callable[..., Any]) -> Kernel:
        if not HAS_TRITON:
            return _Absent()
        kernel: Any = triton.jit(do_not_specialize=list(varying))(function)
        if not INTERPRETED:
            kernel.run = _Launcher(kernel, varying)
        return kernel  # type: ignore[no-any-return]

    return wrap


class _Launcher:
    """Remembers what was compiled for which arguments: Triton's own search takes longer than many a kernel.

    Arguments differ in what Triton compiles for: dtypes, 16-byte alignment, divisibility of integers, constants.
    """

    def __init__(self, kernel: Any, varying: Sequence[str]) -> None:
        names = [param.name for param in kernel.params if not param.is_constexpr]
        self._constants = [param.name for param in kernel.params if param.is_constexpr]
        self._varies = [name in varying for name in names]
        self._search = kernel.run
        self._found: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
        if [param.name for param in kernel.params] != names + self._constants:
            raise TypeError(f"{kernel.__name__}: constants come after all other parameters")

    def __call__(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        if warmup:
            return self._search(*args, grid=grid, warmup=True, **options)
        key = (args[0].get_device(), *map(_kind, args, self._varies), *options.items())
        found = self._found.get(key)
        if found is None:
            compiled = self._search(*args, grid=grid, warmup=False, **options)
            self._found[key] = compiled, tuple(options[name] for name in self._constants)
            return compiled
        compiled, constants = found
        compiled[(*grid, 1, 1)[:3]](*args, *constants)
        return compiled


def _kind(value: Any, varies: bool) -> Any:
    """What a kernel's compilation knows of an argument."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, int):
        wide = value.bit_length() > 31
        return wide if varies else (wide, value == 1, value % 16 == 0)
    return type(value)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def runs_kernels(tensor: Tensor) -> bool:
    """Whether an op on this tensor is a Triton kernel: on a GPU, or anywhere in the interpreter."""
    return INTERPRETED or tensor.device.type == "cuda"


IN_INTERPRETER: Any = tl.constexpr(INTERPRETED) if HAS_TRITON else INTERPRETED


@jit()
def fast_log2(x):
    """log2 in one instruction, to 2^-22; Triton's own is a polynomial of two dozen."""
    if IN_INTERPRETER:
        result = tl.log2(x)
    else:
        result = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)
    return result
