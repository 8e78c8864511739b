"""Check every op on a GPU against a reference of higher precision, on random inputs that are new each time.

PYTHONPATH=.:kernels python3 scripts/check_kernels.py
"""

import sys
import time

import torch
import triton
from kernel_inputs import BF16, rope_inputs, sampling_params, shared_step, step, zipf
from torch import Tensor

import batchgen_kernels as ops
from batchgen_kernels import activation, attention, bitmask, filter, logprobs, norm, penalties, rope, sample

failures: list[str] = []


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
    for heads in ((32, 8, 128), (14, 2, 64)):
        for groups, rest in (([(3, 512), (40, 1024), (1, 64), (130, 320)], 9), ([(8, 4096)], 0)):
            own = torch.randint(1, 2500, (sum(rows for rows, _ in groups) + rest,)).tolist()
            q, k, v, meta = shared_step(groups, own, heads)
            wanted = attention.reference(*(x.double() for x in (q, k, v)), meta, 0.1)
            name = f"shared runs {groups} {heads}"
            results = [ops.paged_attention(q, k, v, meta, scale=0.1) for _ in range(5)]
            expect(name, results[0], wanted, 1e-2)
            equal(f"{name} again", torch.stack(results[1:]), torch.stack(results[:1] * 4))
    for name, query_lens, kv_lens in (
        ("decode", [1] * 4, [90, 700, 64, 2000]),
        ("mixed", [1, 200, 65], [700, 200, 990]),
    ):
        q, k, v, meta = step(query_lens, kv_lens, (32, 8, 128))
        tree_start = (meta.kv_lens - 30).clamp(min=0)
        ends = tree_start.unsqueeze(1) + torch.arange(30, device="cuda") // 3 * 3 + 3  # branches of three
        meta = meta._replace(tree=ops.TokenTree(tree_start, ends.int()))
        wanted = attention.reference(*(x.double().nan_to_num() for x in (q, k, v)), meta, 0.1)
        expect(f"{name} in trees", ops.paged_attention(q, k, v, meta, scale=0.1), wanted, 1e-2)
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
    source, target = torch.randperm(6 * 64, device="cuda")[:200].view(2, 100)
    ops.copy_slots(k, v, torch.stack((source, target)))
    before[target // 64, :, target % 64] = before[source // 64, :, source % 64]
    equal("copy_slots", torch.stack((k, v)), torch.stack((before, before)))


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


def main() -> None:
    torch.manual_seed(int(time.time()))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for check in (check_attention, check_fused, check_sampling):
        check()
    if failures:
        sys.exit(f"{len(failures)} checks failed: {', '.join(failures)}")


if __name__ == "__main__":
    main()
