"""Time every op on a GPU.

    PYTHONPATH=.:kernels python3 scripts/bench_kernels.py [decode] [shared] [prefill] [sample] [fused] [sweep]

Without words: all but the sweep. Times are medians over replays of a CUDA graph.
"""

import itertools
import sys
import time
from collections.abc import Callable

import torch
import triton
from kernel_inputs import BF16, listed, rope_inputs, sampling_params, shared_step, step, zipf
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import batchgen_kernels as ops
from batchgen_kernels import attention_gpu, attention_work, filter_gpu, logprobs

SHAPES = {"32/8 heads, D 128": (32, 8, 128), "14/2 heads, D 64": (14, 2, 64)}


def milliseconds(run: Callable[[], object]) -> float:
    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median"))


def attention_ms(inputs: tuple[Tensor, Tensor, Tensor, ops.AttentionMetadata]) -> float:
    return milliseconds(lambda: ops.paged_attention(*inputs, scale=0.1))


def bench_decode() -> None:
    print("\n| decode, batch 256 | context | ms | GB/s |\n|---|---|---|---|")
    for name, heads in SHAPES.items():
        lengths = torch.randn(900).mul(1.1).add(4.8).exp().clamp(4, 2048).long().add(60).tolist()
        cases = {"1,024": [1024] * 256, "4,096": [4096] * 256, "uneven, 900 rows": lengths, "64 of these": lengths[:64]}
        for case, lens in cases.items():
            q, k, v, meta = step([1] * len(lens), lens, heads)
            ms = attention_ms((q, k, v, listed(meta, heads)))
            rate = 2 * sum(lens) * heads[1] * heads[2] * 2 / ms / 1e6
            print(f"| {name} | {case} | {ms:.3f} | {rate:.0f} |", flush=True)


def bench_shared() -> None:
    """Rows in groups that share a prefix, with 100 keys of their own: each for itself, and together."""
    prefixes = (128, 256, 512, 1024, 2048, 4096, 16384)
    for name, heads in SHAPES.items():
        print(f"\n| {name}: rows a group, of 512 | {' | '.join(map(str, prefixes))} |\n|---{'|---' * len(prefixes)}|")
        for rows in (2, 4, 8, 16, 32, 128, 512, 1024):
            cells = []
            for prefix in prefixes:
                count = max(1, 512 // rows)
                groups, own = [(rows, prefix)] * count, [100] * (rows * count)
                q, k, v, meta = shared_step(groups, own, heads)
                apart, together = (attention_ms((q, k, v, m)) for m in (listed(meta, heads), meta))
                cells.append(f"{apart * 1e3:.0f}, {together * 1e3:.0f}")
            print(f"| {rows} | {' | '.join(cells)} |", flush=True)


def sweep() -> None:
    """Settings of the attention kernels, best first."""
    for name, heads in SHAPES.items():
        found = []
        for split, stages in itertools.product((512, 1024, 2048), (3, 5)):
            attention_work.SPLIT_KEYS, attention_gpu.DEEP_STAGES = split, stages
            steps = [(*s[:3], listed(s[3], heads)) for s in (step([1] * 256, [n] * 256, heads) for n in (1024, 4096))]
            rates = [2 * 256 * s[3].max_kv_len * heads[1] * heads[2] * 2 / attention_ms(s) / 1e6 for s in steps]
            found.append((min(rates), [round(rate) for rate in rates], split, stages))
        for _, rates, *setting in sorted(found, reverse=True):
            print(f"  decode {name}: split, stages {setting}: {rates} GB/s", flush=True)
    long = step([4096] * 4, [4096] * 4, (32, 8, 128))
    for setting in ((64, 4, 3), (64, 4, 5), (128, 8, 3), (128, 8, 5)):
        attention_gpu.PREFILL_ROWS, attention_gpu.WARPS, attention_gpu.DEEP_STAGES = setting
        rate = 2 * 4 * 32 * 128 * 4096**2 / 1e9 / attention_ms(long)
        print(f"  prefill 4 x 4096: rows, warps, stages {setting}: {rate:.0f} TFLOP/s", flush=True)


def bench_prefill() -> None:
    print("\n| prefill, 32/8 heads, D 128 | Triton TFLOP/s | cuDNN TFLOP/s |\n|---|---|---|")
    for batch, length in ((32, 512), (16, 1024), (4, 4096)):
        work = 2 * batch * 32 * 128 * length**2 / 1e9
        ours = attention_ms(step([length] * batch, [length] * batch, (32, 8, 128)))
        a, b, c = (torch.randn(batch, h, length, 128, device="cuda", dtype=BF16) for h in (32, 8, 8))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            theirs = milliseconds(
                lambda a=a, b=b, c=c: scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)
            )
        print(f"| {batch} x {length} | {work / ours:.0f} | {work / theirs:.0f} |", flush=True)
    work = 4 * 16 * 32 * 128 * 512 * (4096 - 256) / 1e9
    chunks = attention_ms(step([512] * 16, [4096] * 16, (32, 8, 128)))
    print(f"| 16 chunks of 512 after 3,584 | {work / chunks:.0f} | |")


def bench_sample() -> None:
    rows, vocab = 512, 131072
    p = sampling_params(rows)
    heat, off, ones = p["temperature"], torch.zeros_like(p["top_k"]), torch.ones_like(p["top_p"])
    seeds, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda")
    print(f"\n| sampler, {rows} x {vocab}, ms | bf16 | fp32 |\n|---|---|---|")
    for kind, logits in (("zipf", zipf(rows, vocab)), ("normal(0, 3)", torch.randn(rows, vocab, device="cuda") * 3)):
        cases: dict[str, Callable[[Tensor], object]] = {
            "greedy": lambda x: ops.gumbel_sample(x, heat * 0, seeds, positions),
            "temperature": lambda x: ops.gumbel_sample(x, heat, seeds, positions),
            "top-k 50, top-p 0.9": lambda x: ops.filtered_sample(
                x, heat, p["top_k"], p["top_p"], p["min_p"], seeds, positions
            ),
            "top-p 0.9": lambda x: ops.filtered_sample(x, heat, off, p["top_p"], p["min_p"], seeds, positions),
            "thresholds alone, k and p": lambda x: filter_gpu.find_cut(x, heat, p["top_k"], p["top_p"], p["min_p"]),
            "filter_logits, k and p": lambda x: ops.filter_logits(x, heat, p["top_k"], p["top_p"], p["min_p"]),
            "logprobs of 5": lambda x: ops.token_logprobs(x, seeds, 5),
            "logsumexp": logprobs.logsumexp,
        }
        for name, run in cases.items():
            inputs = (logits.to(BF16), logits)
            times = [milliseconds(lambda run=run, x=x: run(x)) for x in inputs]
            print(f"| {kind}: {name} | {times[0]:.3f} | {times[1]:.3f} |", flush=True)
    counts, mask = (
        torch.zeros(rows, vocab, device="cuda", dtype=torch.int16),
        torch.zeros(rows, vocab // 32, device="cuda", dtype=torch.int32),
    )
    penalised = milliseconds(lambda: ops.penalize(logits, mask, counts, ones + 0.1, ones, ones))
    masked = milliseconds(lambda: ops.apply_bitmask(logits, mask))
    print(f"| penalize | | {penalised:.3f} |\n| apply_bitmask | | {masked:.3f} |")


def bench_fused() -> None:
    print("\n| fused, 8B shapes | tokens | us | GB/s |\n|---|---|---|---|")
    for tokens in (256, 8192):
        x, residual = torch.randn(2, tokens, 4096, device="cuda", dtype=BF16)
        gate_up, weight = (
            torch.randn(tokens, 28672, device="cuda", dtype=BF16),
            torch.ones(4096, device="cuda", dtype=BF16),
        )
        args, kwargs, pages = rope_inputs(tokens, (32, 8, 128), 64, False)
        runs: dict[str, tuple[Callable[[], object], int]] = {
            "add + rms_norm": (lambda x=x, r=residual, w=weight: ops.rms_norm(x, w, 1e-6, residual=r), 4 * 4096 * 2),
            "act_mul": (lambda g=gate_up: ops.act_mul(g, "silu"), 3 * 14336 * 2),
            "qkv_rope_store": (
                lambda a=args, p=pages, kw=kwargs: ops.qkv_rope_store(*a, *p, **kw),
                (6144 * 2 + 2048) * 2 + 512,
            ),
        }
        for name, (run, size) in runs.items():
            ms = milliseconds(run)
            print(f"| {name} | {tokens} | {ms * 1e3:.1f} | {tokens * size / ms / 1e6:.0f} |", flush=True)


def main() -> None:
    torch.manual_seed(int(time.time()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    parts = {
        "decode": bench_decode,
        "shared": bench_shared,
        "prefill": bench_prefill,
        "sample": bench_sample,
        "fused": bench_fused,
    }
    for word in sys.argv[1:] or parts:
        (parts | {"sweep": sweep})[word]()


if __name__ == "__main__":
    main()
