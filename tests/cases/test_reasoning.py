"""The thinking part of an answer: a column of its own, with a budget, which stop strings do not look into."""

import json
import re
from itertools import pairwise

import pytest

EOS = 258
BRACKETS = {"start": "[(", "end": ")]"}


def chain(text, **more):
    """Each character leads to the next, the last to the end of sequence."""
    return dict(pairwise(text)) | {text[-1]: ""} | more


@pytest.fixture
def thinks(job_folder, scripted_model, byte_id):
    """A job whose model goes on by a script."""

    def make(step, prompt="a", **generate):
        ids = {byte_id(one): byte_id(other) if other else EOS for one, other in step.items()}
        folder = scripted_model(ids, vocab_size=264, eos=(EOS,), tokenizer=True)
        job_folder.write("rows.jsonl", [{"prompt": prompt}])
        job_folder.job |= {"model": str(folder), "generate": {"max_tokens": 20, "reasoning": BRACKETS} | generate}
        return job_folder

    return make


def only_row(job, **sections):
    done = job.run(**sections)
    (row,) = done.rows
    return row


def test_thinking_goes_to_its_own_column(thinks):
    row = only_row(thinks(chain("a[(xy\tz)] AB")))
    assert (row["reasoning"], row["output"], row["status"]) == ("xy\tz", "AB", "ok")
    assert (row["reasoning_tokens"], row["output_tokens"]) == (8, 11)


def test_a_preview_shows_both_parts(thinks):
    shown = thinks(chain("a[(xyz)]AB")).preview().stdout
    assert "(thinking) xyz\n" in shown
    assert "AB\n" in shown


def test_the_prompt_may_open_it(thinks):
    row = only_row(thinks(chain("(xyz)]AB"), prompt="a[("))
    assert (row["reasoning"], row["output"]) == ("xyz", "AB")


def test_an_answer_without_thinking_is_all_answer(thinks):
    row = only_row(thinks(chain("aB[C)]")))
    assert (row["reasoning"], row["output"], row["reasoning_tokens"]) == (None, "B[C)]", 0)


def test_stop_strings_look_at_the_answer_alone(thinks):
    job = thinks(chain("a[(xyBz)]A", A="C", C="D", D="D"))
    row = only_row(job, generate={"stop": ["B", "D"]})
    assert (row["reasoning"], row["output"], row["finish_reason"]) == ("xyBz", "AC", "stop")


def test_a_spent_budget_ends_the_thinking_and_the_answer_goes_on(thinks):
    job = thinks(chain("a[(x)]AB", x="x"), logprobs=0)
    row = only_row(job, generate={"reasoning": BRACKETS | {"max_tokens": 7}})
    assert (row["reasoning"], row["output"], row["status"], row["finish_reason"]) == ("xxxxx", "AB", "ok", "eos")
    assert (row["reasoning_tokens"], row["output_tokens"], row["prompt_tokens"]) == (7, 9, 1)
    assert [entry["token"] for entry in row["logprobs"]] == ["A", "B"]


def test_max_tokens_count_both_parts(thinks):
    job = thinks(chain("a[(x)]A", x="x", A="A"))
    row = only_row(job, generate={"reasoning": BRACKETS | {"max_tokens": 7}, "max_tokens": 10})
    assert (row["reasoning"], row["output"], row["status"]) == ("xxxxx", "AAA", "length")
    assert row["output_tokens"] == 10


def test_cut_thinking_is_length_without_an_answer(thinks):
    row = only_row(thinks(chain("a[(x)]AB", x="x")))
    assert (row["output"], row["status"], row["finish_reason"]) == (None, "length", "length")
    assert row["reasoning"] == "x" * 18


def test_thinking_that_just_ends_is_invalid(thinks):
    done = thinks(chain("a[(xy")).run()
    assert done.exit_code == 10
    assert done.kinds() == ["no_answer"]
    assert (done.rows[0]["reasoning"], done.rows[0]["output"]) == ("xy", None)


def test_no_room_behind_the_thinking_is_length(thinks):
    job = thinks(chain("a[(x)]AB", x="x"))
    row = only_row(job, generate={"reasoning": BRACKETS | {"max_tokens": 7}}, engine={"max_length": 9})
    assert (row["output"], row["status"], row["reasoning"]) == ("", "length", "xxxxx")


def test_the_budget_holds_for_each_sample(thinks):
    generate = {"reasoning": BRACKETS | {"max_tokens": 7}, "n": 3, "temperature": 0.01}
    done = thinks(chain("a[(x)]AB", x="x")).run(generate=generate)
    assert [(row["sample"], row["reasoning"], row["output"]) for row in done.rows] == [
        (sample, "xxxxx", "AB") for sample in range(3)
    ]


def test_the_models_own_markers_are_found(job_folder, scripted_model, no_model):
    folder = scripted_model({}, vocab_size=264, eos=(EOS,), tokenizer=True)
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(model=str(folder), generate={"reasoning": True})
    assert done.exit_code == 2
    assert "no marker of thinking known here (<think>" in done.log


def test_markers_of_the_chat_template(thinks):
    job = thinks(chain("a"), reasoning=True)
    folder = job.job["model"]
    with open(f"{folder}/tokenizer_config.json") as file:
        config = json.load(file)
    config["chat_template"] = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}<think>"
    with open(f"{folder}/tokenizer_config.json", "w") as file:
        json.dump(config, file)
    row = only_row(job, prompt={"user": "{{ prompt }}"})
    assert row["reasoning"] == "", "the prompt opens it, and > ends the script"


def test_a_budget_that_leaves_no_answer_is_a_mistake(thinks, no_model):
    done = thinks(chain("a")).run(generate={"reasoning": BRACKETS | {"max_tokens": 20}})
    assert done.exit_code == 2
    assert "counts thinking and answer together; raise max_tokens" in done.log


def test_the_answer_behind_the_thinking_follows_a_grammar(thinks):
    """The script would go on with A; the grammar asks for D or E."""
    job = thinks(chain("a[(xyz)]AB"), regex="(D|E){1,3}F")
    row = only_row(job)
    assert (row["reasoning"], row["status"], row["reasoning_tokens"]) == ("xyz", "ok", 7)
    assert re.fullmatch("[DE]+F", row["output"])
    assert row["output_tokens"] == 7 + len(row["output"])


def test_a_spent_budget_and_a_grammar(thinks):
    job = thinks(chain("a[(x)]AB", x="x"), regex="DEF")
    row = only_row(job, generate={"reasoning": BRACKETS | {"max_tokens": 7}})
    assert (row["reasoning"], row["output"], row["status"]) == ("xxxxx", "DEF", "ok")
    assert (row["reasoning_tokens"], row["output_tokens"]) == (7, 10)


@pytest.mark.parametrize("text", ["aQR", "a"])
def test_a_model_that_does_not_think_follows_the_grammar_at_once(thinks, text):
    row = only_row(thinks(chain(text), json_schema={"const": 7}))
    assert (row["reasoning"], row["output"], row["status"], row["parsed"]) == (None, "7", "ok", 7)
    assert row["output_tokens"] == 1


def test_thinking_up_to_max_tokens_leaves_no_answer_of_a_grammar(thinks):
    row = only_row(thinks(chain("a[(x)]AB", x="x"), regex="DEF", max_tokens=6))
    assert (row["output"], row["status"], row["reasoning"]) == (None, "length", "xxxx")
    job = thinks(chain("a[(xy)]AB"), regex="DEF", max_tokens=6)
    assert only_row(job, output={"path": "b"})["status"] == "length"


def test_each_attempt_thinks_anew(thinks):
    job = thinks(chain("a[(x)]AB", x="x"), regex="D*", max_tokens=9)
    row = only_row(job, generate={"reasoning": BRACKETS | {"max_tokens": 7}, "retry": {"length": 1}})
    assert row["reasoning"] == "xxxxx"
    assert row["attempts"] in (1, 2)
    assert set(row["output"]) <= {"D"}
