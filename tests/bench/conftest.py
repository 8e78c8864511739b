"""A tiny geometry, and a package that answers as vLLM would."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100_000,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return str(path)


FAKE_VLLM = """
import sys
import time
from types import SimpleNamespace
import torch

torch.cuda.get_device_name = lambda: "an abacus"
__version__ = "0.0"


class SamplingParams(SimpleNamespace):
    pass


sampling_params = sys.modules["vllm.sampling_params"] = SimpleNamespace(StructuredOutputsParams=SimpleNamespace)


class LLM:
    def __init__(self, **options):
        time.sleep(NAP)
        self.has_tokenizer = not options.get("skip_tokenizer_init")
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        print("vLLM says a lot")

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        assert self.has_tokenizer or not hasattr(params[0], "structured_outputs")
        answers = [SimpleNamespace(token_ids=[0] * p.max_tokens) for p in params]
        return [SimpleNamespace(outputs=[answer], num_cached_tokens=0) for answer in answers]
"""


@pytest.fixture
def fake_vllm(tmp_path: Path) -> Callable[[float], str]:
    """Makes a package of that name whose engine takes so many seconds to start."""

    def make(nap: float = 0) -> str:
        (tmp_path / "vllm.py").write_text(FAKE_VLLM.replace("NAP", str(nap)))
        return str(tmp_path)

    return make
