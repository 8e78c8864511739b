"""Further attempts at answers that are invalid or cut, in the same run."""

import pytest

from batchgen.job.attempts import Retry
from batchgen.job.generate import Generate
from batchgen.retries import attempt_seed, next_attempt

COIN = {"invalid": {"times": 40, "temperature": 0.3}}


@pytest.fixture
def coin(job_folder, scripted_model, byte_id):
    """A job whose model says B, C now and then, or another letter seldom; B is what is expected."""
    a, b, c = map(byte_id, "ABC")
    folder = scripted_model({a: b}, {a: c}, vocab_size=264, eos=(258,), tokenizer=True, c=0.5, c2=0.45)
    job_folder.write("rows.jsonl", [{"prompt": f"{row} A"} for row in range(12)])
    job_folder.job |= {"model": str(folder), "generate": {"expect": "B", "max_tokens": 2, "temperature": 0.3}}
    return job_folder


def test_invalid_answers_are_asked_for_again(coin):
    once = coin.run(limits={"failed_rows": "100%"}, output={"path": "once"})
    failed = [row["status"] != "ok" for row in once.rows]
    assert any(failed)
    assert not all(failed)
    assert once.kinds().count("unexpected") == once.column("status").count("invalid") > 0
    done = coin.run(generate={"retry": COIN | {"length": 40}}, limits={"failed_rows": 0}, output={"path": "again"})
    assert done.exit_code == 0, done.log
    assert set(done.column("status")) == {"ok"}
    assert set(done.column("output")) == {"B"}
    assert [row["attempts"] > 1 for row in done.rows] == failed, "the first attempt is that of a job without retries"
    assert f"retries {sum(failed)} rows had more than one attempt" in done.log


def test_the_last_attempt_is_kept(coin):
    retry = {"invalid": {"times": 2, "temperature": 0.3}}
    done = coin.run(generate={"retry": retry, "expect": "Z"}, limits={"failed_rows": "100%"})
    for row in done.rows:
        assert row["status"] == "length" or (row["status"], row["attempts"]) == ("invalid", 3)


def test_attempts_have_noise_of_their_own_and_the_same_in_every_run(coin):
    generate = {"retry": COIN, "expect": "[^B]", "n": 3}
    whole = coin.run(generate=generate, output={"path": "whole"}, limits={"failed_rows": "100%"})
    assert len(set(whole.column("attempts"))) > 1
    alone = coin.run(
        generate=generate, engine={"max_batch_rows": 1}, output={"path": "one"}, limits={"failed_rows": "100%"}
    )
    keys = ("row", "sample", "output", "status", "attempts")
    assert [[row[key] for key in keys] for row in alone.rows] == [[row[key] for key in keys] for row in whole.rows]


def test_a_resumed_job_counts_attempts_as_one_that_ran_through(coin, monkeypatch):
    from batchgen.engine import Engine

    whole = coin.run(generate={"retry": COIN}, output={"path": "whole"}, limits={"failed_rows": "100%"})
    step, steps = Engine.step, []

    def dying(self):
        steps.append(self)
        if len(steps) > 6:
            raise RuntimeError("the device is gone")
        return step(self)

    settings = {"engine": {"max_batch_rows": 2}, "checkpoint": {"every": "1s"}}
    monkeypatch.setattr(Engine, "step", dying)
    assert coin.run(**settings, output={"path": "killed"}).exit_code == 70
    monkeypatch.undo()
    done = coin.run()
    assert done.exit_code == 0, done.log
    for row, wanted in zip(done.rows, whole.rows, strict=True):
        assert [row[key] for key in ("output", "attempts")] == [wanted[key] for key in ("output", "attempts")]


def test_cut_answers_get_more_room(job_folder, scripted_model, byte_id):
    letters = {byte_id("a") + place: byte_id("b") + place for place in range(25)}
    folder = scripted_model(letters, vocab_size=264, eos=(258,), tokenizer=True)
    job_folder.write("rows.jsonl", [{"prompt": prompt} for prompt in "axnu"])
    retry = {"length": {"times": 2, "max_tokens": "x2"}}
    done = job_folder.run(model=str(folder), generate={"max_tokens": 4, "retry": retry})
    assert done.exit_code == 0, done.log
    assert done.column("output") == ["bcdefghijklmnopq", "yz", "opqrstuvwxyz", "vwxyz"]
    assert done.column("status") == ["length", "ok", "ok", "ok"]
    assert done.column("attempts") == [3, 1, 3, 2]
    assert done.column("output_tokens") == [16, 2, 12, 5]
    job_folder.job["output"]["path"] = "in-a-small-context"
    done = job_folder.run(engine={"max_length": 7})
    assert done.column("attempts") == [2, 1, 2, 2], "the second attempt was as long as the context is"


def test_rows_that_were_never_asked_have_no_attempts(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a"}, {"prompt": None}])
    generate = {"retry": {"length": 1}, "max_tokens": 2, "ignore_eos": True}
    done = job_folder.run(generate=generate, limits={"failed_rows": 1})
    assert done.column("attempts") == [2, 0]


def test_equal_prompts_are_asked_each_where_attempts_differ(coin):
    coin.write("rows.jsonl", [{"prompt": "A"}] * 8)
    done = coin.run(generate={"retry": COIN, "temperature": 0, "expect": "[^B]"}, limits={"failed_rows": "100%"})
    assert len(set(done.column("attempts"))) > 1
    assert all(row["attempts"] > 1 for row in done.rows), "the likeliest answer is B"


@pytest.mark.parametrize(
    ("generate", "message"),
    [
        ({"retry": {"invalid": 1}}, "at temperature 0 the next attempt is the same"),
        ({"retry": {"length": 1}, "max_tokens": None}, "an answer is as long as it can be"),
        ({"retry": {"length": {"max_tokens": "2x"}}}, "'2x' is no multiple; write x2 or x1.5"),
        ({"retry": {"length": {"max_tokens": "x1"}}}, "'x1' is no multiple"),
        ({"retry": {"length": {"max_tokens": 4}}}, "4 tokens are no more than max_tokens (4)"),
        ({"retry": {"error": 1}}, "unknown field"),
        ({"retry": {"length": 1}, "choices": ["a", "b"]}, "choices and scores generate nothing"),
        ({"expect": "("}, "is no regular expression"),
    ],
)
def test_mistakes(job_folder, generate, message):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(generate=generate)
    assert done.exit_code == 2
    assert message in done.log


def test_attempts_by_status():
    first = Generate(
        max_tokens=10, temperature=0.5, retry=Retry.model_validate({"invalid": {"temperature": 1.0}, "length": 2})
    )
    wanted = {
        ("ok",): None,
        ("invalid",): (10, 1.0),
        ("length",): (20, 0.5),
        ("length", "length"): (40, 0.5),
        ("length", "invalid"): (20, 1.0),
        ("invalid", "invalid"): None,
        ("length", "length", "length"): None,
        ("error",): None,
    }
    for endings, numbers in wanted.items():
        found = next_attempt(first, endings)
        assert (found and (found.max_tokens, found.temperature)) == numbers
    assert next_attempt(first, ("length",), has_room=False) is None


def test_seeds_of_attempts_differ():
    seeds = {attempt_seed(seed, s, a, p) for seed in (0, 2**63 + 5) for s in range(9) for a in range(9) for p in (0, 1)}
    assert len(seeds) == 2 * 9 * 9 * 2
