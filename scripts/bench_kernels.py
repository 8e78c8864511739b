"""Check every op on a GPU against a reference of higher precision, and time it.

    PYTHONPATH=.:kernels python3 scripts/bench_kernels.py [check] [decode] [prefill] [sample] [fused] [sweep]

Without words: check decode prefill sample fused. Times are medians over replays of a CUDA graph.
"""

import itertools
import sys
import time
from collections.abc import Callable

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import batchgen_kernels as ops
from batchgen_kernels import (
    activation,
    attention,
    attention_gpu,
    bitmask,
    filter,
    filter_gpu,
    logprobs,
    norm,
    penalties,
    rope,
    sample,
)

BF16 = torch.bfloat16
SHAPES = {"32/8 heads, D 128": (32, 8, 128), "14/2 heads, D 64": (14, 2, 64)}
failures: list[str] = []


def milliseconds(run: Callable[[], object]) -> float:
    run()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(run, rep=40, return_mode="median"))


def expect(name: str, result: Tensor, wanted: Tensor, limit: float) -> None:
    error = ((result.double() - wanted.double()).norm() / wanted.double().norm()).item()
    good = error <= limit
    print(f"  {'ok  ' if good else 'BAD '} {name}: {error:.1e} (limit {limit:.0e})", flush=True)
    if not good:
        failures.append(name)


def equal(name: str, result: Tensor, wanted: Tensor) -> None:
    good = torch.equal(result, wanted)
    print(f"  {'ok  ' if good else 'BAD '} {name}: {'equal' if good else 'differs'}", flush=True)
    if not good:
        failures.append(name)


def step(
    query_lens: list[int],
    kv_lens: list[int],
    heads: tuple[int, int, int],
    page_size: int = 64,
    dtype: torch.dtype = BF16,
) -> tuple[Tensor, Tensor, Tensor, ops.AttentionMetadata]:
    """Random queries and pages; what lies behind a sequence's end is NaN."""
    num_q, num_kv, dim = heads
    counts = [-(-length // page_size) for length in kv_lens]
    ids = torch.randperm(sum(counts)).int() + 1
    table = torch.zeros(len(kv_lens), max(counts), dtype=torch.int32)
    shape = (sum(counts) + 1, num_kv, page_size, dim)
    k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    for i, (run, length) in enumerate(zip(ids.split(counts), kv_lens, strict=True)):
        table[i, : len(run)] = run
        if length % page_size:
            k[run[-1], :, length % page_size :] = torch.nan
            v[run[-1], :, length % page_size :] = torch.nan
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    meta = ops.AttentionMetadata(table.cuda(), starts.cuda(), lengths.cuda(), max(query_lens), max(kv_lens))
    return torch.randn(sum(query_lens), num_q, dim, device="cuda", dtype=dtype), k, v, meta


def check_attention() -> None:
    shapes = ((32, 8, 128), (14, 2, 64), (9, 3, 64), (8, 8, 96), (16, 1, 256), (6, 2, 80))
    for (num_q, num_kv, dim), page_size in (((32, 8, 128), 16), *((shape, 64) for shape in shapes)):
        for name, query_lens, kv_lens in (
            ("decode", [1] * 7, [1, 63, 64, 65, 513, 2000, 4096]),
            ("mixed", [1, 200, 65, 1, 300], [700, 200, 1000, 1, 301]),
        ):
            q, k, v, meta = step(query_lens, kv_lens, (num_q, num_kv, dim), page_size)
            for window, softcap, sinks in ((None, None, None), (100, 20.0, torch.randn(num_q, device="cuda"))):
                scale = dim**-0.5
                result = ops.paged_attention(q, k, v, meta, scale=scale, window=window, softcap=softcap, sinks=sinks)
                wide = (x.double().nan_to_num() for x in (q, k, v))
                wanted = attention.reference(*wide, meta, scale, window, softcap, sinks)
                variant = f"{name} {num_q}/{num_kv} D{dim} page {page_size}" + (
                    " window softcap sinks" if window else ""
                )
                expect(variant, result, wanted, 1e-2)
    q, k, v, meta = step([1] * 9, [700] * 9, (32, 8, 128))
    together = ops.paged_attention(q, k, v, meta, scale=0.1)
    one = ops.AttentionMetadata(meta.block_table[4:5, :11], meta.query_start[:2], meta.kv_lens[4:5], 1, 700)
    equal("decode alone and in company", ops.paged_attention(q[4:5], k, v, one, scale=0.1), together[4:5])


def check_fused() -> None:
    for tokens, width in ((3, 576), (257, 896), (33, 4096)):
        x, residual = torch.randn(2, tokens, width, device="cuda", dtype=BF16)
        weight = torch.randn(width, device="cuda", dtype=BF16)
        for order in norm.NORM_ORDERS:
            y, total = ops.rms_norm(x, weight, 1e-6, residual=residual, order=order)
            expect(
                f"rms_norm {width} {order}",
                y,
                norm.normalize((x + residual).double().float(), weight.float(), 1e-6, order),
                5e-3,
            )
            equal(f"rms_norm {width} residual", total, x + residual)
        gate_up = torch.randn(tokens, 2 * width, device="cuda", dtype=BF16)
        for act in ("silu", "gelu_tanh"):
            expect(
                f"act_mul {width} {act}", ops.act_mul(gate_up, act), activation.reference(gate_up.double(), act), 5e-3
            )
    for (num_q, num_kv, dim), half, normed in (
        ((32, 8, 128), 64, True),
        ((14, 2, 64), 32, False),
        ((8, 8, 96), 36, True),
    ):
        args, kwargs, pages = rope_inputs(131, (num_q, num_kv, dim), half, normed)
        result = ops.qkv_rope_store(*args, *pages, **kwargs)
        copies = tuple(torch.zeros_like(page) for page in pages)
        norms = (kwargs["q_norm"], kwargs["k_norm"])
        wanted = rope.reference(*args, *copies, (num_q, num_kv, dim), norms, 1e-6, "cast_then_scale")
        for name, a, b in zip(
            ("q", "k", "v", "k_pages", "v_pages"), (*result, *pages), (*wanted, *copies), strict=True
        ):
            expect(f"qkv_rope_store D{dim} {name}", a, b, 5e-3)
    k = torch.randn(6, 2, 64, 64, device="cuda", dtype=BF16)
    v, before = k.clone(), k.clone()
    ops.copy_pages([k], [v], torch.tensor([0, 3], device="cuda"), torch.tensor([4, 1], device="cuda"))
    equal("copy_pages", torch.stack((k, v)), torch.stack((before[[0, 3, 2, 3, 0, 5]],) * 2))


def rope_inputs(tokens: int, heads: tuple[int, int, int], half: int, normed: bool) -> tuple:
    num_q, num_kv, dim = heads
    qkv = torch.randn(tokens, (num_q + 2 * num_kv) * dim, device="cuda", dtype=BF16)
    angles = torch.rand(5000, half, device="cuda") * 6
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1)
    num_pages = -(-tokens // 64) + 1
    args = (
        qkv,
        cos_sin,
        torch.randint(5000, (tokens,), device="cuda"),
        torch.randperm(num_pages * 64, device="cuda")[:tokens],
    )
    pages = tuple(torch.zeros(num_pages, num_kv, 64, dim, device="cuda", dtype=BF16) for _ in range(2))
    weight = torch.randn(dim, device="cuda", dtype=BF16) if normed else None
    kwargs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": dim, "q_norm": weight, "k_norm": weight}
    return args, kwargs, pages


def zipf(rows: int, vocab: int, exponent: float = 1.5) -> Tensor:
    """Logits like a language model's: probabilities by a power law of the rank, over shuffled ids, with noise."""
    ranks = torch.rand(rows, vocab, device="cuda").argsort(-1) + 1.0
    return -exponent * ranks.log() + torch.randn(rows, vocab, device="cuda") * 0.5


def sampling_params(rows: int) -> dict[str, Tensor]:
    full = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.0}
    params = {name: torch.full((rows,), value, device="cuda") for name, value in full.items()}
    return params | {"top_k": torch.full((rows,), 50, device="cuda", dtype=torch.int32)}


def check_filter(name: str, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> None:
    """Kept tokens equal those of a float64 sort, but for tokens at the very border of top-p."""
    kept = ops.filter_logits(logits, temperature, top_k, top_p, min_p) > -torch.inf
    less, wanted, more = (
        filter.reference(
            logits.double(),
            temperature.double().unsqueeze(1),
            top_k.unsqueeze(1),
            top_p.double().unsqueeze(1) + slack,
            min_p.double().unsqueeze(1),
        )
        > -torch.inf
        for slack in (-2e-5, 0.0, 2e-5)
    )
    off = int(((kept & ~more) | (less & ~kept)).sum())
    print(f"  {'BAD ' if off else 'ok  '} filter {name}: {int((kept != wanted).sum())} at the border, {off} off it")
    if off:
        failures.append(f"filter {name}")


def check_sampling() -> None:
    rows, vocab = 64, 151936
    for kind, logits in (("zipf", zipf(rows, vocab)), ("normal", torch.randn(rows, vocab, device="cuda") * 3)):
        for dtype in (torch.float32, BF16):
            x, p = logits.to(dtype), sampling_params(rows)
            heat, off = p["temperature"], torch.zeros_like(p["top_k"])
            check_filter(f"{kind} {dtype} k", x, heat, p["top_k"], torch.ones_like(heat), p["min_p"])
            check_filter(f"{kind} {dtype} k=700 p", x, heat, off + 700, p["top_p"], p["min_p"])
            check_filter(f"{kind} {dtype} k=5000 p", x, heat, off + 5000, p["top_p"], p["min_p"])
            check_filter(f"{kind} {dtype} k p", x, heat, p["top_k"], p["top_p"], p["min_p"])
            check_filter(f"{kind} {dtype} p", x, heat, off, p["top_p"], p["min_p"])
            check_filter(f"{kind} {dtype} min_p", x, heat, off, torch.ones_like(heat), p["min_p"] + 0.02)
        seeds, positions = torch.randint(-(2**62), 2**62, (rows,), device="cuda"), torch.arange(rows, device="cuda")
        heats = torch.where(positions % 3 == 0, 0.0, 0.9)
        wanted = sample.reference(logits.cpu(), heats.cpu(), seeds.cpu(), positions.cpu())
        equal(f"gumbel_sample {kind} = CPU", ops.gumbel_sample(logits, heats, seeds, positions).cpu(), wanted)
        args = (p["temperature"], p["top_k"], p["top_p"], p["min_p"])
        alone = ops.gumbel_sample(ops.filter_logits(logits, *args), p["temperature"], seeds, positions)
        equal(f"filtered_sample {kind}", ops.filtered_sample(logits, *args, seeds, positions), alone)
        masked = logits.masked_fill(torch.rand_like(logits) < 0.9999, -torch.inf)
        check_filter(f"{kind} few finite", masked, heats + 0.1, p["top_k"], p["top_p"], p["min_p"])
        mask = torch.randint(-(2**31), 2**31 - 1, (rows, vocab // 32), device="cuda", dtype=torch.int32)
        equal("apply_bitmask", ops.apply_bitmask(logits, mask), bitmask.reference(logits, mask))
        counts = torch.randint(0, 3, (rows, vocab), device="cuda", dtype=torch.int16)
        factors = (heats + 0.5, heats, heats)
        expect(
            "penalize",
            ops.penalize(logits, mask, counts, *factors),
            penalties.reference(logits.double(), mask, counts, *factors),
            1e-6,
        )
        ids = torch.randint(vocab, (rows,), device="cuda")
        result, oracle = ops.token_logprobs(logits, ids, 5), logprobs.reference(logits.double(), ids, 5)
        expect(
            "token_logprobs",
            torch.cat((result.chosen, result.top_logprobs.flatten())),
            torch.cat((oracle.chosen, oracle.top_logprobs.flatten())),
            1e-6,
        )
        equal("token_logprobs ids", result.top_ids, oracle.top_ids)


def bench_decode() -> None:
    print("\n| decode, batch 256 | context | ms | GB/s |\n|---|---|---|---|")
    for name, heads in SHAPES.items():
        for context in (1024, 4096):
            inputs = step([1] * 256, [context] * 256, heads)
            ms = attention_ms(inputs)
            rate = 2 * 256 * context * heads[1] * heads[2] * 2 / ms / 1e6
            print(f"| {name} | {context} | {ms:.3f} | {rate:.0f} |", flush=True)


def sweep() -> None:
    """Settings of the attention kernels, best first."""
    for name, heads in SHAPES.items():
        found = []
        steps = [step([1] * 256, [context] * 256, heads) for context in (1024, 4096)]
        for split, warps, stages in itertools.product((512, 1024, 2048), (1, 2), (3, 5)):
            attention_gpu.SPLIT_KEYS, attention_gpu.DECODE_WARPS, attention_gpu.DECODE_STAGES = split, warps, stages
            rates = [2 * 256 * s[3].max_kv_len * heads[1] * heads[2] * 2 / attention_ms(s) / 1e6 for s in steps]
            found.append((min(rates), [round(rate) for rate in rates], split, warps, stages))
        for _, rates, *setting in sorted(found, reverse=True):
            print(f"  decode {name}: split, warps, stages {setting}: {rates} GB/s", flush=True)
    long = step([4096] * 4, [4096] * 4, (32, 8, 128))
    for setting in ((64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 8, 3)):
        attention_gpu.PREFILL_ROWS, attention_gpu.PREFILL_WARPS, attention_gpu.PREFILL_STAGES = setting
        rate = 2 * 4 * 32 * 128 * 4096**2 / 1e9 / attention_ms(long)
        print(f"  prefill 4 x 4096: rows, warps, stages {setting}: {rate:.0f} TFLOP/s", flush=True)


def attention_ms(inputs: tuple[Tensor, Tensor, Tensor, ops.AttentionMetadata]) -> float:
    return milliseconds(lambda: ops.paged_attention(*inputs, scale=0.1))


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
    words = sys.argv[1:] or ["check", "decode", "prefill", "sample", "fused"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    parts = {
        "decode": bench_decode,
        "prefill": bench_prefill,
        "sample": bench_sample,
        "fused": bench_fused,
        "sweep": sweep,
    }
    for word in words:
        began = time.perf_counter()
        for run in (check_attention, check_fused, check_sampling) if word == "check" else (parts[word],):
            run()
        print(f"[{word}: {time.perf_counter() - began:.0f} s]", flush=True)
    if failures:
        sys.exit(f"{len(failures)} checks failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
