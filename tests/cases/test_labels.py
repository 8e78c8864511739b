"""C13 and what belongs to labels, end to end: probabilities against plain forward passes of transformers."""

import json
import math

import pytest
from click.testing import CliRunner

from batchgen.calibration import BATCH_ROWS, spread_rows
from batchgen.cli import commands

NUM_TOKENS = 259  # the embedding is padded to 264
TRICKY = ["A", "AB", "A B", "a.b", "(x)", 'say "hi"', "ü", "null", "日本", "🎬", "don't"]


def log_probability(model, ids, targets):
    """The log-probability of each target behind the prompt's ids, a forward pass for each."""
    import torch

    values = []
    for target in targets:
        with torch.no_grad():
            logprobs = model(torch.tensor([[*ids, *target]])).logits[0, :, :NUM_TOKENS].double().log_softmax(-1)
        values.append(math.fsum(float(logprobs[len(ids) - 1 + place, token]) for place, token in enumerate(target)))
    return values


@pytest.fixture(scope="module")
def reference(tiny_llama):
    """The tiny model and its tokenizer, as transformers has them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(tiny_llama)


def softmax(values):
    weights = [math.exp(value - max(values)) for value in values]
    return [weight / math.fsum(weights) for weight in weights]


def brute_force(reference, prompt, choices, *, ended):
    model, tokenizer = reference
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    end = [tokenizer.convert_tokens_to_ids("<|im_end|>")] if ended else []
    return log_probability(model, encode(prompt), [[*encode(choice), *end] for choice in choices])


def test_C13_probabilities_equal_brute_force(job_folder, reference):
    prompts = ["Label:", "Is it?", "ü\n", 'He said "']
    job_folder.write("rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    done = job_folder.run(generate={"choices": TRICKY, "choice_logprobs": True})
    assert done.exit_code == 0, done.log
    for prompt, row in zip(prompts, done.rows, strict=True):
        expected = brute_force(reference, prompt, TRICKY, ended=True)  # A begins AB
        assert list(row["label_logprobs"].values()) == pytest.approx(expected, abs=1e-4)
        assert list(row["label_probs"].values()) == pytest.approx(softmax(expected), abs=1e-4)
        assert math.fsum(row["label_probs"].values()) == pytest.approx(1, abs=1e-12)
        first, second = sorted(row["label_probs"].values(), reverse=True)[:2]
        assert row["margin"] == pytest.approx(first - second, abs=1e-12)
        assert row["output"] == row["label"] == TRICKY[expected.index(max(expected))]


def test_choices_that_share_tokens_equal_brute_force(job_folder, reference):
    """Behind prompts that share pages, longer and shorter than one, in chunks of a few tokens."""
    choices = [" the cat", " the car", " the", " a", " the cat sat", " ü", " über", ' "a"', ' "a" or "b"']
    prompts = ["x", "A prompt that is longer than a page of 16 tokens:", "A prompt that is longer than one:"]
    job_folder.write("rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    done = job_folder.run(generate={"choices": choices, "choice_logprobs": True}, engine={"max_batch_tokens": 11})
    assert done.exit_code == 0, done.log
    for prompt, row in zip(prompts, done.rows, strict=True):
        expected = brute_force(reference, prompt, choices, ended=True)
        assert list(row["label_logprobs"].values()) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("max_length", [2048, 300])
def test_a_thousand_choices_equal_brute_force(job_folder, reference, max_length):
    """In one trie of 1,100 nodes, and in several where `max_length` leaves less room."""
    choices = [f"{place} of {number}" for number in range(50) for place in "abcdefghijklmnopqrst"]
    job_folder.write("rows.jsonl", [{"prompt": f"{row}: "} for row in range(3)])
    done = job_folder.run(generate={"choices": choices, "choice_logprobs": True}, engine={"max_length": max_length})
    assert done.exit_code == 0, done.log
    some = range(0, 1000, 77)
    for row in done.rows:
        expected = brute_force(reference, f"{row['row']}: ", [choices[i] for i in some], ended=True)
        values = list(row["label_logprobs"].values())
        assert [values[i] for i in some] == pytest.approx(expected, abs=1e-4)
        assert math.fsum(row["label_probs"].values()) == pytest.approx(1, abs=1e-9)


def test_rows_bring_their_own_choices(job_folder, reference):
    rows = [
        {"prompt": "a ", "options": ["yes", "no"]},
        {"prompt": "b ", "options": json.dumps(["one", "two", "three"])},
        {"prompt": "c ", "options": ["only"]},
        *({"prompt": "d ", "options": bad} for bad in (None, [], ["x", "x"], ["x", ""], ["x", 1], "[", {"a": 1})),
        {"prompt": "e ", "options": ["a", "<|im_end|>"]},
    ]
    job_folder.write("rows.jsonl", rows)
    done = job_folder.run(generate={"choices": "options", "choice_logprobs": True}, limits={"failed_rows": "100%"})
    assert done.kinds() == [None, None, None, *["bad_request"] * 8]
    for row, choices in zip(done.rows, (["yes", "no"], ["one", "two", "three"], ["only"]), strict=False):
        expected = brute_force(reference, rows[row["row"]]["prompt"], choices, ended=False)
        assert [entry["label"] for entry in row["label_probs"]] == choices
        assert [entry["prob"] for entry in row["label_probs"]] == pytest.approx(softmax(expected), abs=1e-4)
        assert [entry["logprob"] for entry in row["label_logprobs"]] == pytest.approx(expected, abs=1e-4)
    assert done.rows[2]["margin"] == 1
    assert "'x' twice" in done.rows[5]["error"]["message"]
    assert done.rows[3]["label_probs"] is None


def test_a_column_of_choices_that_the_input_has_not_is_a_mistake(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(generate={"choices": "options"})
    assert done.exit_code == 2
    assert "generate.choices: the input has no column 'options'" in done.log


def test_own_choices_load_in_common_readers(job_folder):
    datasets = pytest.importorskip("datasets")
    job_folder.write("rows.jsonl", [{"prompt": "a", "options": ["x", "y"]}, {"prompt": "b", "options": ["z"]}])
    assert job_folder.run(generate={"choices": "options"}).exit_code == 0
    (part,) = map(str, job_folder.out.glob("part-*.parquet"))
    loaded = datasets.load_dataset("parquet", data_files=part, split="train", cache_dir=str(job_folder.folder / "c"))
    assert [entry["label"] for entry in loaded[0]["label_probs"]] == ["x", "y"]


@pytest.mark.parametrize("normalize", [False, True])
def test_calibration_takes_the_prior_off(job_folder, reference, normalize):
    choices, prompts = ["yes", "surely not"], [f"Row {row}" for row in range(5)]
    job_folder.write("rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    job_folder.job["generate"] = {"choices": choices, "length_normalize": normalize}

    def scores(prompt):
        sums = brute_force(reference, prompt, choices, ended=False)
        return [value / (len(choice) if normalize else 1) for value, choice in zip(sums, choices, strict=True)]

    for calibrate, inputs in {"content_free": ["N/A ", "[MASK] ", " "], "batch": [f"{p} " for p in prompts]}.items():
        done = job_folder.run(
            prompt={"text": "{{ prompt }} "}, generate={"calibrate": calibrate}, output={"path": calibrate}
        )
        assert done.exit_code == 0, done.log
        known = [softmax(scores(text)) for text in inputs]
        prior = [math.log(math.fsum(one) / len(one)) for one in zip(*known, strict=True)]
        for prompt, row in zip(prompts, done.rows, strict=True):
            corrected = [value - log for value, log in zip(scores(f"{prompt} "), prior, strict=True)]
            assert list(row["label_probs"].values()) == pytest.approx(softmax(corrected), abs=1e-4)


@pytest.mark.parametrize("num_rows", [0, 1, 255, 256, 257, 300, 9173, 10**9])
def test_calibration_looks_all_over_the_input(num_rows):
    runs = spread_rows(num_rows)
    rows = [row for run in runs for row in run]
    assert rows == sorted(set(rows))
    assert len(rows) == min(num_rows, BATCH_ROWS)
    assert all(0 <= row < num_rows for row in rows)
    assert num_rows <= BATCH_ROWS or rows[-1] >= num_rows * 31 // 32


def test_calibration_that_can_not_be_made_is_said_before_the_first_row(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a", "x": 1}])
    prompt = {"text": "{{ prompt }}{{ x + 1 }}"}
    done = job_folder.run(prompt=prompt, generate={"choices": ["a", "b"], "calibrate": "content_free"})
    assert done.exit_code == 2
    assert "there is no prompt with 'N/A' in every column" in done.log
    assert "calibrate: batch" in done.log


@pytest.mark.parametrize("caching", [True, False])
def test_scores_of_a_given_text_equal_brute_force(job_folder, reference, caching):
    stem = "The same beginning for each of the rows, longer than a page of the cache. "
    rows = [{"prompt": stem + f"Row {row}", "answer": answer} for row, answer in enumerate(["Yes!", "ü", "a b c", "x"])]
    job_folder.write("rows.jsonl", [*rows, {"prompt": "a", "answer": None}, {"prompt": "a", "answer": ""}])
    generate = {"score": "{{ answer }}", "logprobs": 0}
    done = job_folder.run(generate=generate, engine={"prefix_caching": caching}, limits={"failed_rows": "100%"})
    assert done.rows, done.log
    assert done.kinds() == [None] * 4 + ["null_prompt", "bad_request"]
    for given, row in zip(rows, done.rows, strict=False):
        (expected,) = brute_force(reference, given["prompt"], [given["answer"]], ended=False)
        num_tokens = len(given["answer"].encode())
        assert (row["output"], row["finish_reason"]) == (given["answer"], "score")
        assert row["score"] == pytest.approx(expected, abs=1e-4)
        assert row["score_mean"] == pytest.approx(expected / num_tokens, abs=1e-4)
        assert math.fsum(token["logprob"] for token in row["logprobs"]) == pytest.approx(row["score"], abs=1e-4)
        assert len(row["logprobs"]) == num_tokens


def test_preview_shows_the_tokens_of_choices_and_scores(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a "}])
    shown = job_folder.preview(generate={"choices": ["no", "n"]}).stdout
    assert "choices:\n'no' = 'n' 77, 'o' 78, '<|im_end|>' 258\n'n' = 'n' 77, '<|im_end|>' 258\n" in shown
    job_folder.job["generate"] = {"score": "ok"}
    assert "answer:\nok\nscore: -" in job_folder.preview().stdout


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"choices": ["a", "b"], "score": "x"}, "keep one of the two"),
        ({"score": "x", "logprobs": 2}, "logprobs: 0"),
        ({"score": "x", "n": 2, "temperature": 1}, "one answer each"),
        ({"calibrate": "batch"}, "belongs to choices"),
        ({"choices": "options", "calibrate": "batch"}, "the same choices on all rows"),
        ({"length_normalize": True}, "belongs to choices"),
        ({"choice_logprobs": True}, "belongs to choices"),
    ],
)
def test_fields_that_do_not_go_together(job_folder, fields, words):
    job_folder.write("rows.jsonl", [{"prompt": "a", "options": ["x"]}])
    done = job_folder.run(generate=fields)
    assert done.exit_code == 2
    assert words in done.log


def test_lists_in_columns_verify(job_folder):
    """Rows' own choices, log-probabilities and a carried list: Parquet names what is in a list in its own way."""
    job_folder.write("rows.jsonl", [{"prompt": "a", "options": ["x", "y"]}, {"prompt": "b", "options": ["z"]}])
    for generate in ({"choices": "options", "choice_logprobs": True}, {"logprobs": 1, "max_tokens": 2}):
        job_folder.job |= {"generate": generate, "output": {"path": "-".join(generate), "columns": ["options"]}}
        assert job_folder.run().exit_code == 0
        done = CliRunner().invoke(commands, ["verify", str(job_folder.out)])
        assert done.exit_code == 0, done.stderr
