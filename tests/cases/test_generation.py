"""Generation trouble, end to end, with models whose text is known: one token a byte, each with one that follows it."""

import itertools
import json
import math

import pytest
from tokenizers import Tokenizer

EOS, VOCAB = 258, 264


@pytest.fixture(autouse=True, params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, job_folder):
    """Every job here runs on the CPU and on a GPU."""
    job_folder.save(engine={"device": request.param})
    return request.param


@pytest.fixture
def ids(tiny_llama):
    """The token ids of a text."""
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.fixture
def model(job_folder, scripted_model, ids):
    """Makes the job's model one that goes on with each of these texts from byte to byte, and then ends.

    `second` are texts whose bytes the model likes nearly as well after the first ones, and after those in `ends` the
    end of sequence.
    """

    def make(*texts, second=(), ends="", eos=(EOS,), **options):
        step, other = ({a: b for text in some for a, b in itertools.pairwise(ids(text))} for some in (texts, second))
        other |= dict.fromkeys(ids(ends), EOS)
        folder = scripted_model(step, other, vocab_size=VOCAB, eos=eos, tokenizer=True, **options)
        job_folder.save(model=str(folder))
        return folder

    return make


@pytest.fixture
def answers(job_folder):
    """Runs a job over these prompts, each time into a folder of its own; gives its output rows."""
    numbers = itertools.count()

    def go(*prompts, engine=None, **generate):
        job_folder.write("rows.jsonl", [{"prompt": prompt} for prompt in prompts])
        job_folder.job["generate"] = generate
        output = {"path": f"out-{next(numbers)}"}
        done = job_folder.run(engine=engine or {}, output=output)
        assert done.exit_code in (0, 10), done.log
        assert len(done.rows) == len(prompts) * generate.get("n", 1)
        return done.rows

    return go


def texts(rows):
    return [row["output"] for row in rows]


@pytest.mark.parametrize(
    ("stop", "options", "expected"),
    [
        ("END", {}, ("Hey ", "ok", "stop")),
        ("END", {"include_stop": True}, ("Hey END", "ok", "stop")),
        ("END", {"max_tokens": 6}, ("Hey EN", "length", "length")),
        ("NDx!", {}, ("Hey ENDx", "ok", "eos")),
        (["ENDx", "END"], {}, ("Hey ", "ok", "stop")),
        (["ey", "Hey"], {}, ("", "ok", "stop")),
        (">H", {}, ("Hey ENDx", "ok", "eos")),
        ([*(f"no {i}" for i in range(99)), "D"], {}, ("Hey EN", "ok", "stop")),
    ],
)
def test_C01_stop_strings(model, answers, stop, options, expected):
    model(">Hey ENDx")
    (row,) = answers(">", **{"stop": stop, "max_tokens": 20} | options)
    assert (row["output"], row["status"], row["finish_reason"]) == expected


def test_C01_text_and_logprobs_end_together(model, answers):
    model(">Hey ENDx")
    (row,) = answers(">", stop="END", logprobs=2, max_tokens=20)
    assert "".join(entry["token"] for entry in row["logprobs"]) == row["output"] == "Hey "
    assert all(len(entry["top"]) == 2 and -1e-3 < entry["logprob"] <= 0 for entry in row["logprobs"])


@pytest.mark.parametrize(
    ("generate", "field"),
    [
        ({"stop": ["a", ""]}, "generate.stop.1"),  # C01
        ({"max_tokens": 0}, "generate.max_tokens"),  # C03
        ({"repetition_penalty": 0}, "generate.repetition_penalty"),  # C06
        ({"min_tokens": 5, "max_tokens": 4}, "generate.min_tokens"),  # C07
        ({"temperature": -1}, "generate.temperature"),  # C09
        ({"temperature": "0.7"}, "generate.temperature"),
        ({"temperature": math.nan}, "generate.temperature"),
        ({"top_p": 0}, "generate.top_p"),
        ({"top_p": 1.5}, "generate.top_p"),
        ({"top_k": -2}, "generate.top_k"),
        ({"n": 4}, "generate.n"),
        ({"choices": ["a", ""]}, "generate.choices"),  # C13
        ({"choices": ["a", "b", "a"]}, "generate.choices"),
    ],
)
def test_C01_C03_C06_C07_C09_C13_mistakes_are_found_before_the_model(job_folder, no_model, generate, field):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(generate=generate)
    assert (done.exit_code, done.files) == (2, [])
    assert field in done.log


@pytest.mark.parametrize(("max_tokens", "text", "status"), [(2, "", "length"), (4, "😀", "length"), (5, "😀", "ok")])
def test_C02_characters_of_several_tokens(model, answers, max_tokens, text, status):
    model(">😀")
    (row,) = answers(">", max_tokens=max_tokens)
    assert (row["output"], row["status"], row["output_tokens"]) == (text, status, min(max_tokens, 4))


def test_C02_spaces_and_broken_bytes_stay(model, answers, ids, scripted_model, job_folder):
    model("> a,", "#n't", "%ा")
    assert texts(answers(">", "#", "%", max_tokens=9)) == [" a,", "n't", "ा"]
    head, lone = ids("😀")[0], ids("x")[0]
    job_folder.save(
        model=str(scripted_model({ids("!")[0]: head, head: lone}, vocab_size=VOCAB, eos=(EOS,), tokenizer=True))
    )
    assert texts(answers("!", max_tokens=9)) == ["\ufffdx"]


def test_C02_special_tokens_in_an_answer(model, answers, ids, scripted_model, job_folder):
    step = {ids("!")[0]: ids("<|im_start|>")[0], ids("<|im_start|>")[0]: ids("x")[0]}
    job_folder.save(model=str(scripted_model(step, vocab_size=VOCAB, eos=(EOS,), tokenizer=True)))
    assert texts(answers("!", max_tokens=9)) == ["x"]
    assert texts(answers("!", max_tokens=9, skip_special_tokens=False)) == ["<|im_start|>x"]


@pytest.mark.parametrize("max_tokens", [1, 2, None])
def test_C03_prompts_at_and_over_the_limit(model, answers, max_tokens):
    model()
    prompts = ["a" * length for length in (1, 62, 63, 64, 65, 640)]
    rows = answers(*prompts, max_tokens=max_tokens, ignore_eos=True, engine={"max_length": 64})
    room = 64 if max_tokens is None else max_tokens
    assert [row["output_tokens"] for row in rows] == [min(room, 63), min(room, 2), 1, 0, 0, 0]
    assert [row["status"] for row in rows] == ["length"] * 3 + ["error"] * 3
    for row, length in zip(rows[3:], (64, 65, 640), strict=True):
        assert row["error"]["kind"] == "prompt_too_long"
        assert f"{length} tokens; max_length is 64" in row["error"]["message"]


def test_C06_penalties_cold_and_warm(model, answers):
    prompt = "A" * 200 + "BA"  # long enough for whole pages of it to be in the cache
    model("AB", second=["AC"])
    one_by_one = {"max_batch_rows": 1}
    assert texts(answers(prompt, prompt, max_tokens=1, engine=one_by_one)) == ["B", "B"]
    cold, warm = answers(prompt, prompt, max_tokens=1, repetition_penalty=1.3, engine=one_by_one)
    assert (cold["output"], warm["output"]) == ("C", "C")
    assert cold["cached_tokens"] == 0 < warm["cached_tokens"]
    assert texts(answers(prompt, max_tokens=1, frequency_penalty=2, presence_penalty=2)) == ["B"]


def test_C07_every_eos_ends_a_row(model, answers, ids):
    a, b = ids("AB")
    folder = model("1xA", "2yB", "3zC", eos=(a, b))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": a}
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": "C"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = answers("1", "2", "3", max_tokens=5)
    assert [(row["output"], row["finish_reason"]) for row in rows] == [("x", "eos"), ("y", "eos"), ("z", "eos")]
    assert texts(answers("1", "2", "3", max_tokens=2, ignore_eos=True)) == ["xA", "yB", "zC"]
    (stopped,) = answers("1", max_tokens=5, stop_token_ids=ids("x"))
    assert (stopped["output"], stopped["finish_reason"]) == ("", "stop")


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, ("x", 2, "stop")), (3, ("xyz", 3, "eos")), (4, ("xyzx", 5, "stop")), (5, ("xyzx", 5, "stop"))],
)
def test_C07_min_tokens(model, answers, min_tokens, expected):
    model(">xyz", second=["zx"])
    (row,) = answers(">", max_tokens=12, min_tokens=min_tokens, stop="y")
    assert (row["output"], row["output_tokens"], row["finish_reason"]) == expected


@pytest.mark.parametrize(
    "generate",
    [
        {"temperature": 1e-9},
        {"temperature": 0.01},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 1e-9},
        {"temperature": 1, "min_p": 1},
        {"temperature": 0, "top_k": -1, "top_p": 1},
        {"temperature": 0, "top_k": VOCAB + 1},
    ],
)
def test_C09_settings_that_leave_one_token(model, answers, generate):
    model(">abcdef", c=0.5)
    assert texts(answers(">", max_tokens=9, **generate)) == ["abcdef"]


def test_C09_sampled_rows_differ_by_row_and_seed_alone(model, answers):
    model(c=0.01)
    prompts = [">"] * 3
    hot = {"max_tokens": 8, "temperature": 1, "ignore_eos": True, "skip_special_tokens": False}
    first = texts(answers(*prompts, **hot, n=2))
    assert len(set(first)) == 6
    assert texts(answers(*prompts, **hot, n=2, engine={"max_batch_rows": 1})) == first
    assert not set(texts(answers(*prompts, **hot, n=2, seed=1))) & set(first)


def test_C11_greedy_text_does_not_depend_on_the_batch(job_folder, answers):
    stem = "The same beginning for many rows, long enough to fill a page of the cache. "
    prompts = [stem * (row % 3) + f"Row number {row}" for row in range(24)]
    engines = [{"max_batch_rows": rows} for rows in (1, 7, 64)]
    engines += [{"max_batch_rows": 64, "prefix_caching": False}, {"max_batch_tokens": 33}, {"page_size": 16}]
    # Hardly more pages than the longest row needs: rows wait for one another.
    engines.append({"page_size": 16, "kv_memory": "150KiB", "max_batch_tokens": 1024})
    found = [texts(answers(*prompts, max_tokens=6, ignore_eos=True, engine=engine)) for engine in engines]
    assert all(one == found[0] for one in found)
    assert len(set(found[0])) > 5


CHOICES = ["A", "AB", "A B", "a.b", "(x)", 'say "hi"', "ü", "null", " lead"]


@pytest.mark.parametrize("wanted", CHOICES)
def test_C13_each_choice_can_win(model, answers, wanted):
    model(">" + wanted, ends='"l', c=1, c2=0.9)
    (row,) = answers(">", choices=CHOICES)
    assert (row["output"], row["label"], row["status"], row["finish_reason"]) == (wanted, wanted, "ok", "choice")
    assert list(row["label_probs"]) == CHOICES
    assert math.fsum(row["label_probs"].values()) == pytest.approx(1, abs=1e-12)
    assert max(row["label_probs"], key=row["label_probs"].get) == wanted


def test_E06_padded_ids_are_never_drawn(model, answers, ids, scripted_model, job_folder):
    step = {ids(">")[0]: 262}  # the embedding is padded from 259 tokens to 264
    folder = scripted_model(step, {ids(">")[0]: ids("x")[0]}, vocab_size=VOCAB, eos=(EOS,), tokenizer=True)
    job_folder.save(model=str(folder))
    assert texts(answers(">", max_tokens=3)) == ["x"]
    assert {len(row["output"]) for row in answers(*">" * 20, max_tokens=1, temperature=9, ignore_eos=True)} <= {0, 1}


def test_E06_a_token_beyond_the_embedding_is_that_rows_error(scripted_model, job_folder):
    folder = scripted_model({}, vocab_size=256, eos=(0,), tokenizer=True)  # <|im_end|> is token 258
    job_folder.write("rows.jsonl", [{"prompt": "a"}, {"prompt": "a<|im_end|>"}, {"prompt": "b"}])
    prompt = {"text": "{{ prompt }}", "special_tokens": "parse"}
    done = job_folder.run(model=str(folder), prompt=prompt)
    assert done.kinds() == [None, "bad_token", None]
    assert "258" in done.rows[1]["error"]["message"]
    assert "the tokenizer has 259 tokens, but the model's embedding 256 rows" in done.log
