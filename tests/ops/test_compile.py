"""Every kernel, as its launcher would launch it for an 8B and a 0.5B model, compiled for an H200 without one.

What makes a memory-bound kernel slow shows in its machine code: spilled registers, and loads of less than 16 bytes.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from batchgen_kernels import (
    activation,
    attention_gpu,
    attention_work,
    bitmask,
    filter_gpu,
    logprobs,
    norm,
    pages,
    penalties,
    rope,
    sample,
)
from batchgen_kernels._triton import INTERPRETED

if find_spec("triton") is None or INTERPRETED:
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BF16, F32, I32, I64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
TYPES = {BF16: "*bf16", F32: "*fp32", I32: "*i32", I64: "*i64", torch.int16: "*i16"}


class Code(NamedTuple):
    """What the compiler says of a kernel."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    wide_copies: int  # cp.async of 16 bytes
    wide_loads: int  # ld.global.v4.b32: 16 bytes
    exponents: dict[str, int]  # of 2, by the instruction that computes them


class Recorder:
    """Stands in for a kernel and keeps the arguments of its last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def record(*args: Any, **constants: Any) -> None:
            self.args, self.constants = args, constants

        return record

    def compile(self) -> Code:
        names = [parameter.name for parameter in self.kernel.params]
        values = dict(zip(names, self.args, strict=False))
        values |= {name: value for name, value in self.constants.items() if name in names}
        options = {name: value for name, value in self.constants.items() if name not in names}
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = values[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name], constants[i,] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], attributes[i,] = TYPES[value.dtype], [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        source = ASTSource(self.kernel, signature=signature, constexprs=constants, attrs=attributes)
        return read(triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options))


def read(compiled: Any) -> Code:
    ptx = compiled.asm["ptx"]
    ptxas = Path(triton.__file__).with_name("backends") / "nvidia/bin/ptxas"
    command = [str(ptxas), "-v", "--gpu-name=sm_90a", "-", "-o", "/dev/null"]
    said = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    return Code(
        registers=int(re.search(r"Used (\d+) registers", said)[1]),
        spilled_bytes=sum(map(int, re.findall(r"(\d+) bytes spill", said))),
        shared_bytes=compiled.metadata.shared,
        wgmma=ptx.count("wgmma.mma_async"),
        mma=ptx.count("mma.sync"),
        wide_copies=len(re.findall(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx)),
        wide_loads=len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx)),
        exponents=_exponents(ptx),
    )


def _exponents(ptx: str) -> dict[str, int]:
    instructions, found = {}, Counter[str]()
    for line in ptx.splitlines():
        if match := re.match(r"\s*ex2\.approx\S*\s+%\w+,\s*(%\w+)", line):
            found[instructions.get(match[1], "none")] += 1
        elif match := re.match(r"\s*(\w+)\S*\s+(%\w+),", line):
            instructions[match[2]] = match[1]
    return dict(found)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Code]:
    """Run a launcher with its kernel recorded, and compile what it would have launched."""

    def run(module: Any, name: str, launch: Callable[[], object]) -> Code:
        with monkeypatch.context() as patch:
            recorders = {other: Recorder(kernel) for other, kernel in vars(module).items() if other.endswith("_kernel")}
            for other, recorder in recorders.items():
                patch.setattr(module, other, recorder)
            launch()
        return recorders[name].compile()

    return run


SHAPES = {"8B": (32, 8, 128), "0.5B": (14, 2, 64)}


@pytest.mark.parametrize("features", [(None, None, None), (100, 30.0, torch.zeros(32))], ids=["plain", "all features"])
@pytest.mark.parametrize("model", SHAPES)
def test_decode_attention(compiled, make_step, model, features):
    if features[2] is not None:
        features = (*features[:2], torch.zeros(SHAPES[model][0]))
    step = make_step([1, 1], [3000, 70], SHAPES[model], 64, BF16)
    launch = lambda: attention_gpu.gpu_attention(*step, 0.1, *features)  # noqa: E731
    code = compiled(attention_gpu, "decode_kernel", launch)
    assert code.spilled_bytes == 0
    assert code.registers <= 128
    assert code.shared_bytes <= 75_000  # three programs of an 8B on a multiprocessor
    assert code.mma > 0
    assert code.wide_copies >= 24  # pages on their way, and the first ones
    assert code.wide_loads >= 2  # parts of a row


@pytest.mark.parametrize("dim", [24, 80, 96, 256])
def test_decode_attention_of_other_heads(compiled, make_step, dim):
    step = make_step([1, 1], [3000, 70], (8, 2, dim), 64, BF16)
    code = compiled(attention_gpu, "decode_kernel", lambda: attention_gpu.gpu_attention(*step, 0.1, None, None, None))
    assert code.spilled_bytes == 0
    assert code.mma > 0


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("model", SHAPES)
def test_shared_attention(compiled, make_step, model, softcap):
    heads, two = SHAPES[model], np.array([0, 1], np.int32)
    q, k, v, meta = make_step([1, 1], [3000, 2000], heads, 64, BF16, shared_pages=16)
    runs = attention_work.SharedRuns(two, np.array([2], np.int32), np.array([1024], np.int32))
    work = attention_work.decode_work(meta.kv_lens.numpy(), runs, *heads[:2]).to_device(heads[1], q.device)
    launch = lambda: attention_gpu.gpu_attention(q, k, v, meta._replace(work=work), 0.1, None, softcap, None)  # noqa: E731
    code = compiled(attention_gpu, "shared_kernel", launch)
    assert code.spilled_bytes == 0
    assert code.registers <= 224
    assert code.wgmma > 0
    assert code.mma == 0
    assert code.wide_copies >= 24


@pytest.mark.parametrize("model", SHAPES)
def test_prefill_attention(compiled, make_step, model):
    step = make_step([200, 70], [3000, 70], SHAPES[model], 64, BF16)
    code = compiled(attention_gpu, "prefill_kernel", lambda: attention_gpu.gpu_attention(*step, 0.1, None, None, None))
    assert code.spilled_bytes == 0
    assert code.registers <= 255
    assert code.wgmma > 0
    assert code.mma == 0
    assert code.wide_copies >= 16


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("model", SHAPES)
def test_a_masked_tile_is_computed_as_any_other(compiled, make_step, with_tree, model, trees):
    """Which of a row's tiles are masked depends on how its prompt is cut; in bfloat16 its bits must not."""
    q, k, v, meta = make_step([200, 70], [3000, 70], SHAPES[model], 64, BF16)
    step = q, k, v, with_tree(meta, [30, 20]) if trees else meta
    code = compiled(attention_gpu, "prefill_kernel", lambda: attention_gpu.gpu_attention(*step, 0.1, None, None, None))
    # One of each row of each tile is the rescaling of what came before; the others are of its keys.
    assert code.exponents["fma"] % 2 == 0
    assert code.exponents["sub"] * 8 <= code.exponents["fma"]


def test_prefill_attention_in_trees(compiled, make_step, with_tree):
    q, k, v, meta = make_step([200, 70], [3000, 70], SHAPES["8B"], 64, BF16)
    step = q, k, v, with_tree(meta, [30, 20])
    code = compiled(attention_gpu, "prefill_kernel", lambda: attention_gpu.gpu_attention(*step, 0.1, None, None, None))
    assert code.spilled_bytes == 0
    assert code.wgmma > 0
    assert code.mma == 0


def test_norm_and_activation(compiled):
    x, weight = torch.zeros(4, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    code = compiled(norm, "rms_norm_kernel", lambda: norm._launch(x, weight, 1e-6, x, "cast_then_scale"))
    assert (code.spilled_bytes, code.wide_loads) == (0, 6)  # three tensors, two loads a thread each
    assert code.registers <= 64
    code = compiled(activation, "act_mul_kernel", lambda: activation._launch(torch.zeros(4, 28672, dtype=BF16), "silu"))
    assert code.spilled_bytes == 0
    assert code.wide_loads >= 2
    assert code.registers <= 64


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
def test_qkv_rope_store(compiled, normed):
    qkv, places, kv = (
        torch.zeros(4, 48 * 128, dtype=BF16),
        torch.zeros(4, dtype=I64),
        torch.zeros(4, 8, 64, 128, dtype=BF16),
    )
    weights = (torch.zeros(128, dtype=BF16),) * 2 if normed else (None, None)
    args = (qkv, torch.zeros(10, 2, 64), places, places, kv, kv, (32, 8, 128), weights, 1e-6, "cast_then_scale")
    code = compiled(rope, "qkv_rope_store_kernel", lambda: rope._launch(*args))
    assert code.spilled_bytes == 0
    assert code.registers <= 64
    assert code.wide_loads >= 4


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_sampling(compiled, dtype):
    logits, ones, ids = torch.zeros(2, 131_072, dtype=dtype), torch.ones(2), torch.zeros(2, dtype=I64)
    words, counts = torch.zeros(2, 4096, dtype=I32), torch.zeros(2, 131_072, dtype=torch.int16)
    top_k = torch.zeros(2, dtype=I32)
    filtered = lambda: filter_gpu.gpu_filtered_sample(logits, ones, top_k, ones, ones, ids, ids)  # noqa: E731
    launches = (
        (sample, "sample_block_kernel", lambda: sample._launch(logits, ones, ids, ids), 2, 128),
        (filter_gpu, "group_kernel", filtered, 2, 64),
        (filter_gpu, "threshold_kernel", filtered, 0, 128),
        (filter_gpu, "draw_kernel", filtered, 0, 128),
        (filter_gpu, "cut_kernel", lambda: filter_gpu.gpu_filter(logits, ones, top_k, ones, ones), 2, 64),
        (penalties, "penalize_kernel", lambda: penalties._launch(logits, words, counts, ones, ones, ones), 2, 128),
        (bitmask, "apply_bitmask_kernel", lambda: bitmask._launch(logits, words), 2, 64),
    )
    for module, name, launch, wide_loads, registers in launches:
        code = compiled(module, name, launch)
        assert code.spilled_bytes == 0, name
        assert code.wide_loads >= wide_loads, name
        assert code.registers <= registers, name


def test_logsumexp_and_pages(compiled, monkeypatch):
    monkeypatch.setattr(logprobs, "runs_kernels", lambda tensor: True)
    code = compiled(logprobs, "logsumexp_kernel", lambda: logprobs.logsumexp(torch.zeros(2, 131_072, dtype=BF16)))
    assert (code.spilled_bytes, code.wide_loads) == (0, 2)
    monkeypatch.setattr(pages, "runs_kernels", lambda tensor: True)
    kv, slots = torch.zeros(4, 8, 64, 128, dtype=BF16), torch.zeros(2, 32, dtype=I64)
    code = compiled(pages, "copy_slots_kernel", lambda: pages.copy_slots(kv, kv, slots))
    assert (code.spilled_bytes, code.wide_loads >= 2) == (0, True)
