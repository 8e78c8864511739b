"""The workload that answers under a JSON schema."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from batchgen.bench.run import make_bench, run_bench
from batchgen.bench.schema import tokenizer_json
from batchgen.errors import JobFileError


def test_the_schema_workload_runs_with_its_grammar_and_without(tiny: str) -> None:
    bench = make_bench(("schema",), ("dtype=float32", "max_batch_rows=4"), model=tiny, scale=0.003)
    constrained, free = run_bench(bench)
    assert (constrained.workload, free.workload) == ("schema x0.003", "schema, free x0.003")
    assert constrained.rows == free.rows == 3
    assert constrained.out_tok_s * constrained.seconds == pytest.approx(free.out_tok_s * free.seconds, rel=0.05)
    assert constrained.forced_tokens is not None
    assert constrained.forced_tokens > 3 * 30  # names, quotes and brackets
    assert constrained.mask_ms_per_step is not None
    assert free.forced_tokens is None


def test_the_schema_workload_has_the_vocabulary_of_the_model() -> None:
    config = {"vocab_size": 20_000, "eos_token_id": [7, 9]}
    tokenizer = Tokenizer.from_str(tokenizer_json(config))
    assert tokenizer.get_vocab_size() == 20_000
    assert tokenizer.token_to_id("<|eos|>") == 7
    assert len(tokenizer.encode('"category": "').ids) < 8
    with pytest.raises(JobFileError, match="no eos_token_id"):
        tokenizer_json({"vocab_size": 20_000})


def test_a_peer_answers_under_the_same_schema(tiny: str, fake_vllm: Callable[..., str]) -> None:
    bench = make_bench(("schema",), (), model=tiny, scale=0.001, peer="vllm", peer_path=fake_vllm())
    (result,) = [result for result in run_bench(bench) if result.engine == "vllm"]
    assert (result.workload, result.rows) == ("schema x0.001", 1)


def test_a_peer_has_one_tokenizer(tiny: str, fake_vllm: Callable[..., str]) -> None:
    bench = make_bench(("choices", "schema"), (), model=tiny, scale=0.001, peer="vllm", peer_path=fake_vllm())
    with pytest.raises(JobFileError, match="in two calls"):
        next(run_bench(bench))
