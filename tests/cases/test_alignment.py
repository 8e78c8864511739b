"""Whatever the order in which answers come, each lies at its row; one too few or too many is never a success."""

import random
import string

import pytest
from tokenizers import Tokenizer

from batchgen.engine.engine import Engine

QUESTIONS, ANSWERS = string.ascii_lowercase, string.ascii_uppercase
EOS, VOCAB, NUM_ROWS, N = 258, 264, 200, 3
INTERNAL_ERROR = 70


@pytest.fixture
def job(job_folder, scripted_model, tiny_llama):
    """A batch file in three pieces: question k is answered by k's capital, as often as the row asks; some rows fail."""
    tokenizer = Tokenizer.from_file(str(tiny_llama / "tokenizer.json"))
    question, answer = (tokenizer.encode(text, add_special_tokens=False).ids for text in (QUESTIONS, ANSWERS))
    step = dict(zip(question, answer, strict=True)) | {token: token for token in answer}
    folder = scripted_model(step, vocab_size=VOCAB, eos=(EOS,), tokenizer=True)
    lines = [request(row) for row in range(NUM_ROWS)]
    for number in range(3):
        job_folder.write(f"rows/{number}.jsonl", lines[number * 70 : number * 70 + 70])
    sections = {"model": str(folder), "input": {"path": "rows", "format": "openai"}, "prompt": {}}
    job_folder.save(
        **sections,
        generate={"n": N, "temperature": 1},
        limits={"failed_rows": "100%"},
        output={"columns": ["custom_id"], "part_rows": 64},
        engine={"max_batch_rows": 16},
    )
    return job_folder


def is_bad(row):
    return row % 11 == 5


def length(row):
    return row * 7 % 13 + 1


def request(row):
    body = {"max_tokens": length(row), "prompt": None if is_bad(row) else f"question {QUESTIONS[row % 26]}"}
    return {"custom_id": f"id {row % 70}", "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def steps(monkeypatch):
    """Puts a function between the engine's steps and whoever takes their completions."""

    def between(change):
        step = Engine.step
        monkeypatch.setattr(Engine, "step", lambda self: change(step(self)))

    return between


def test_D08_each_answer_lies_at_its_row(job, steps, monkeypatch):
    order = random.Random(8)
    late = []

    def scramble(completions):
        """Some completions come back steps later, all of them in any order."""
        late.extend(completions)
        order.shuffle(late)
        keep = 0 if not completions else order.randrange(len(late) + 1)
        now, late[:] = late[keep:], late[:keep]
        return now

    steps(scramble)
    busy = Engine.busy
    monkeypatch.setattr(Engine, "busy", property(lambda self: busy.fget(self) or bool(late)))
    done = job.run()
    assert done.exit_code == 0, done.log
    assert [(row["row"], row["sample"]) for row in done.rows] == [(r, s) for r in range(NUM_ROWS) for s in range(N)]
    for row in done.rows:
        number = row["row"]
        assert row["custom_id"] == f"id {number % 70}"
        if is_bad(number):
            assert (row["status"], row["output"]) == ("error", None)
        else:
            assert row["output"] == ANSWERS[number % 26] * length(number)
    assert f"{len(done.rows):,}: " in done.log


@pytest.mark.parametrize("fault", ["dropped", "doubled"])
def test_D08_a_lost_or_doubled_answer_is_an_internal_error(job, steps, fault):
    changed = []

    def spoil(completions):
        victims = [c for c in completions if c.request_id == 100 and c.sample == 1]
        if changed or not victims:
            return completions
        changed.extend(victims)
        if fault == "dropped":
            return [c for c in completions if c not in victims]
        return [*completions, *victims]

    steps(spoil)
    done = job.run()
    assert done.exit_code == INTERNAL_ERROR
    assert "row 100" in done.log
    assert "This is a fault in batchgen itself" in done.log
    assert "speed" not in done.log
