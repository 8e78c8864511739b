"""The workload of choices: scored by our engine, drawn under a grammar by a peer that gets a tokenizer for it."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from batchgen.bench.choices import LABELS, label_of, label_texts, text_of, write_tokenizer
from batchgen.bench.run import make_bench, run_bench
from batchgen.errors import EngineError
from tests.bench.conftest import TINY

EOS = 99_999
FAKE_VLLM = """
from types import SimpleNamespace
import torch
from tokenizers import Tokenizer

torch.cuda.get_device_name = lambda: "an abacus"
__version__ = "0.0"


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    def __init__(self, **options):
        assert not options["skip_tokenizer_init"]
        self.tokenizer = Tokenizer.from_file(options["model"] + "/tokenizer.json")
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))

    def reset_prefix_cache(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        ids = [0] * 16
        if not isinstance(params, list):
            text = params.structured_outputs.choice[ANSWER]
            ids = [self.tokenizer.token_to_id(text[i : i + 4]) for i in range(0, len(text), 4)] + [99_999]
        answers = [SimpleNamespace(token_ids=ids) for _ in prompts]
        return [SimpleNamespace(outputs=[answer], num_cached_tokens=0) for answer in answers]
"""


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY | {"eos_token_id": EOS}))
    return str(path)


def fake_vllm(folder: Path, answer: str) -> str:
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(FAKE_VLLM.replace("ANSWER", answer))
    (package / "sampling_params.py").write_text(
        "from types import SimpleNamespace\nclass StructuredOutputsParams(SimpleNamespace): pass\n"
    )
    return str(folder)


def test_both_engines_label_the_same_rows(tiny: str, tmp_path: Path) -> None:
    peer = {"peer": "vllm", "peer_path": fake_vllm(tmp_path, "5")}
    own, other = run_bench(make_bench(("choices",), ("dtype=float32",), model=tiny, scale=0.001, **peer))
    assert (own.engine, other.engine) == ("batchgen", "vllm")
    assert own.workload == other.workload == "choices x0.001"
    assert own.rows == other.rows == 4
    assert own.out_tok_s == pytest.approx(own.rows_s, rel=0.01)


def test_an_answer_of_the_peer_that_is_no_label_ends_the_bench(tiny: str, tmp_path: Path) -> None:
    peer = {"peer": "vllm", "peer_path": fake_vllm(tmp_path, "5][::-1")}
    with pytest.raises(EngineError, match="exit code 1"):
        list(run_bench(make_bench(("choices",), ("dtype=float32",), model=tiny, scale=0.001, **peer)))


def test_the_tokenizer_has_one_text_for_each_token(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, TINY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == TINY["vocab_size"]
    assert tokenizer.token_to_id("<eos>") == TINY["eos_token_id"]
    assert {len(text_of(token)) for token in range(0, 150_000, 777)} == {4}
    for ids, text in zip(LABELS, label_texts(), strict=True):
        assert tokenizer.decode(ids) == text
    assert len({text_of(token) for token in range(152_000)}) == 152_000


def test_labels_are_of_one_to_three_tokens_and_none_begins_another() -> None:
    assert {len(ids) for ids in LABELS} == {1, 2, 3}
    assert [label_of([*ids, 99_999]) for ids in LABELS] == list(range(8))
    assert label_of([5003, 6003]) is None
