"""Start-up with real weight files: a geometry's random weights are written to a folder once, loaded twice, and timed.

python scripts/bench_startup.py --model llama-8b --layers 8 --folder /dev/shm/model
"""

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from batchgen.bench.run import make_bench
from batchgen.engine import Engine, EngineConfig, Request, SamplingParams
from batchgen.models.load import load_model

SHARD_BYTES = 4 * 2**30


def write_weights(model: str, layers: int | None, folder: Path) -> None:
    """Write config and safetensors shards."""
    folder.mkdir(parents=True, exist_ok=True)
    config = make_bench([], [], model=model).config()
    config |= {"num_hidden_layers": layers or config["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps(config))
    made = load_model(folder, device=torch.device("cuda"), dtype=torch.bfloat16, dummy=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    for name, tensor in made.checkpoint_tensors().items():
        if sum(t.nbytes for t in shards[-1].values()) > SHARD_BYTES:
            shards.append({})
        shards[-1][name if name.startswith("lm_head") else f"model.{name}"] = tensor.cpu()
    names = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file)
        names |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/batchgen-startup"))
    parser.add_argument("--write", action="store_true", help="write the files, and nothing else")
    args = parser.parse_args()
    if args.write or not (args.folder / "model.safetensors.index.json").exists():
        write_weights(args.model, args.layers, args.folder)
        torch.cuda.empty_cache()
    size = sum(file.stat().st_size for file in args.folder.glob("*.safetensors"))
    print(f"{size / 1e9:.1f} GB of weights in {args.folder}")
    for attempt in () if args.write else ("first", "second"):
        began = time.perf_counter()
        engine = Engine.load(args.folder, EngineConfig(device="cuda"))
        loaded = time.perf_counter() - began
        list(engine.generate([Request(0, [1000] * 64, SamplingParams(max_tokens=1, ignore_eos=True))]))
        total = time.perf_counter() - began  # importing torch, some 3 s, is not in it
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in engine.startup_seconds.items())
        print(f"{attempt}: first token after {total:.2f} s: load {loaded:.2f} ({parts}); {size / 1e9 / total:.2f} GB/s")
        del engine
        gc.unfreeze()
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
