"""vLLM on the standard workloads, in a process of its own: `python -m batchgen.bench.vllm_peer OPTIONS_JSON`.

Prints one JSON line when it has started, and one per workload. vLLM gets random weights, no tokenizer (for `choices`
one made on the spot) and no detokenizing, at its own defaults unless `engine` in the options says otherwise. `planned`
hands it the prompts in the order in which our engine gets them: shared prefixes meet, and long answers begin early.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from batchgen.bench.choices import NAME as CHOICES
from batchgen.bench.choices import label_of, label_texts, write_tokenizer
from batchgen.bench.peer import MARK
from batchgen.bench.planned import in_file_order, planned
from batchgen.bench.schema import NAME as SCHEMA
from batchgen.bench.schema import SCHEMA as JSON_SCHEMA
from batchgen.bench.schema import schema_prompts, write_json_tokenizer
from batchgen.bench.workloads import WORKLOADS


def main(options: dict[str, Any]) -> None:
    """Time each workload named in `options` and print its result."""
    import torch
    from vllm import LLM, SamplingParams, __version__  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(options["config"]))
        has_choices = CHOICES in options["workloads"]
        if has_choices:
            write_tokenizer(Path(folder), options["config"])
        began = time.perf_counter()
        settings: dict[str, Any] = {"skip_tokenizer_init": not has_choices}
        if SCHEMA in options["workloads"]:
            write_json_tokenizer(Path(folder), options["config"])
            settings = {"skip_tokenizer_init": False, "structured_outputs_config": {"disable_any_whitespace": True}}
        llm = LLM(**{"model": folder, "load_format": "dummy", **settings, **options["engine"]})
        startup = time.perf_counter() - began
        _generate(llm, SamplingParams, [([2000 + i] * 64, 16) for i in range(64)], ignore_eos=True)
        _say({"startup_s": startup})
        for name in options["workloads"]:
            source = schema_prompts if name == SCHEMA else WORKLOADS[name]
            rows = (planned if options["planned"] else in_file_order)(source(options["scale"]))
            work = [(row.tokens.tolist(), row.outputs) for row in rows]
            fields = _schema_fields() if name == SCHEMA else {"ignore_eos": True}
            llm.reset_prefix_cache()
            began = time.perf_counter()
            if name == CHOICES:
                outputs = _choose(llm, SamplingParams, work)
            else:
                outputs = _generate(llm, SamplingParams, work, **fields)
            seconds = time.perf_counter() - began
            result = {
                "version": __version__,
                "hardware": torch.cuda.get_device_name(),
                "precision": str(llm.llm_engine.model_config.dtype).removeprefix("torch."),
                "workload": name,
                "rows": len(work),
                "seconds": seconds,
                "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
                "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
                "startup_s": startup,
            }
            _say(result)


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK}{json.dumps(message)}\n")
    sys.stdout.flush()


def _schema_fields() -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams  # type: ignore[import-not-found]

    return {"structured_outputs": StructuredOutputsParams(json=JSON_SCHEMA)}


def _generate(llm: Any, params: Any, work: list[tuple[list[int], int]], **fields: Any) -> Any:
    prompts = [{"prompt_token_ids": tokens} for tokens, _ in work]
    each = [params(temperature=0, max_tokens=out, detokenize=False, **fields) for _, out in work]
    return llm.generate(prompts, each, use_tqdm=False)


def _choose(llm: Any, params: Any, work: list[tuple[list[int], int]]) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    prompts = [{"prompt_token_ids": tokens} for tokens, _ in work]
    one = StructuredOutputsParams(choice=label_texts())
    outputs = llm.generate(
        prompts, params(temperature=0, max_tokens=8, structured_outputs=one, detokenize=False), use_tqdm=False
    )
    wrong = [output.outputs[0].token_ids for output in outputs if label_of(output.outputs[0].token_ids) is None]
    if wrong:
        raise RuntimeError(f"{len(wrong)} answers are no labels, the first of them {wrong[0]}")
    return outputs


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
