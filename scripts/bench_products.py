"""Matrix products of a model by number of rows: milliseconds, TFLOP/s, and which sizes give a row the same bits.

Decode graphs are captured for sizes that this table finds fast (`batchgen/engine/cuda_graphs.py`).

python scripts/bench_products.py --model llama-8b --rows 64,128,256,512,1024
"""

import argparse

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone knows
from torch import Tensor
from triton.testing import do_bench

from batchgen.bench.run import make_bench
from batchgen.models.config import from_config

DEFAULT_ROWS = [1, 2, 4, 8, 16, 32, 48, *range(64, 1025, 32)]
LARGE_ROWS = [2048, 4096, 8192, 16384]


def layer_shapes(model: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each product of a layer, and of the head."""
    config = from_config(make_bench([], [], model=model).config(), "config.json")
    return {
        "qkv": (config.q_size + 2 * config.kv_size, config.hidden_size),
        "o": (config.hidden_size, config.q_size),
        "gate_up": (2 * config.intermediate_size, config.hidden_size),
        "down": (config.hidden_size, config.intermediate_size),
        "head": (config.vocab_size, config.hidden_size),
    }


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def milliseconds(weights: list[Tensor], rows: int) -> float:
    """The median time of a product, over weights that are not in the cache."""
    x = random(rows, weights[0].shape[1])

    def run() -> None:
        for weight in weights:
            F.linear(x, weight)

    return float(do_bench(run, warmup=4, rep=12, return_mode="median")) / len(weights)


def kinds(weight: Tensor, sizes: list[int], bias: Tensor | None) -> dict[int, str]:
    """For each size the number of its kind: sizes of a kind give every row the same bits.

    A star: it makes a difference where among the rows of a batch a row stands.
    """
    x = random(max(sizes), weight.shape[1])
    known: list[Tensor] = []
    found = {}
    for size in sorted(sizes, reverse=True):
        result = F.linear(x[:size], weight, bias)
        moved = F.linear(x[:size].roll(size // 3, 0), weight, bias).roll(-(size // 3), 0)
        number = next((i for i, larger in enumerate(known) if torch.equal(larger[:size], result)), len(known))
        if number == len(known):
            known.append(result)
        found[size] = f"{number}{'' if torch.equal(result, moved) else '*'}"
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--rows", type=lambda text: [int(part) for part in text.split(",")], default=DEFAULT_ROWS)
    parser.add_argument("--no-split-k", action="store_true", help="keep cuBLAS from cutting the sums")
    parser.add_argument("--bits", action="store_true", help="print which sizes give the same bits, and no times")
    args = parser.parse_args()
    if args.no_split_k:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)  # type: ignore[assignment]
    shapes = layer_shapes(args.model)
    if args.bits:
        for name, (outputs, inputs) in shapes.items():
            weight = random(outputs, inputs)
            for bias in (None, random(outputs)):
                found = kinds(weight, args.rows + ([] if name == "head" else LARGE_ROWS), bias)
                print(f"{name}{'' if bias is None else ' + bias'}: " + " ".join(f"{m}:{k}" for m, k in found.items()))
        return
    weights = {name: [random(*shape) for _ in range(1 if name == "head" else 4)] for name, shape in shapes.items()}
    print("rows  " + "  ".join(f"{name:>14}" for name in shapes) + "   sum of a layer: us, TFLOP/s")
    for rows in args.rows:
        times = {name: milliseconds(weights[name], rows) for name in shapes}
        rates = {name: 2 * rows * shapes[name][0] * shapes[name][1] / times[name] / 1e9 for name in shapes}
        layer = [name for name in shapes if name != "head"]
        total = sum(times[name] for name in layer)
        work = sum(2 * rows * shapes[name][0] * shapes[name][1] for name in layer)
        cells = "  ".join(f"{times[name] * 1000:7.1f} {rates[name]:5.0f} " for name in shapes)
        print(f"{rows:5} {cells}  {total * 1000:8.1f} {work / total / 1e9:6.0f}", flush=True)


if __name__ == "__main__":
    main()
