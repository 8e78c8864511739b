"""Votes among the samples of a row."""

from collections import Counter

import pytest

from batchgen.data.rows import OutputRow
from batchgen.job.attempts import Vote
from batchgen.votes import voted


def samples(*answers, row=0):
    return [OutputRow(row, number, "ok" if text else "error", output=text) for number, text in enumerate(answers)]


@pytest.mark.parametrize(
    ("answers", "vote", "share"),
    [
        (["a", "b", "b"], "b", 2 / 3),
        (["b", "a"], "b", 0.5),  # as often as one another: the lower sample's
        (["a", None, " a\n", "b"], "a", 2 / 3),
        ([None, None], None, None),
    ],
)
def test_the_most_frequent_valid_answer_wins(answers, vote, share):
    found = voted(reversed(samples(*answers)))
    assert [row.output for row in found] == answers
    assert {(row.vote, row.vote_share) for row in found} == {(vote, share)}


def test_rows_do_not_mix():
    found = voted([*samples("a", "b", "b"), *samples("c", "c", "b", row=1)])
    assert [(row.row, row.vote) for row in found] == [(0, "b")] * 3 + [(1, "c")] * 3


def test_a_job_with_votes(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": f"row {row}"} for row in range(5)])
    job_folder.job["generate"] = {"n": 9, "temperature": 0.7, "max_tokens": 1, "ignore_eos": True, "stop": "\x00"}
    plain = job_folder.run(output={"path": "plain"})
    done = job_folder.run(generate={"vote": "majority", "min_tokens": 0}, output={"path": "voted"})
    assert done.exit_code == 0, done.log
    assert [(row["row"], row["sample"]) for row in done.rows] == [(row, n) for row in range(5) for n in range(9)]
    assert done.column("output") == plain.column("output")
    for row in range(5):
        of_row = [found for found in done.rows if found["row"] == row]
        valid = [found["output"].strip() for found in of_row if found["status"] == "ok"]
        expected = (None, None) if not valid else (Counter(valid).most_common(1)[0][0], None)
        assert {found["vote"] for found in of_row} == {expected[0]}
        assert len({found["vote_share"] for found in of_row}) == 1


def test_votes_in_a_job_are_those_of_its_texts(job_folder, scripted_model):
    """A model that says one letter and ends, with a second one nearly as likely."""
    folder = scripted_model({65: 66}, {65: 67}, vocab_size=264, eos=(258,), tokenizer=True, c=0.5, c2=0.45)
    job_folder.write("rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    job_folder.job["generate"] = {"n": 30, "temperature": 0.3, "max_tokens": 2, "vote": "majority"}
    done = job_folder.run(model=str(folder), limits={"failed_rows": "100%"})
    assert done.exit_code == 0, done.log
    for row in (0, 1):
        of_row = [found for found in done.rows if found["row"] == row]
        valid = [found["output"].strip() for found in of_row if found["status"] == "ok"]
        assert valid
        vote, count = Counter(valid).most_common(1)[0]
        assert {(found["vote"], found["vote_share"]) for found in of_row} == {(vote, count / len(valid))}


def test_a_vote_needs_samples(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(generate={"vote": "majority"})
    assert done.exit_code == 2
    assert "among several samples" in done.log


def test_a_field_of_parsed_answers_has_the_vote():
    rows = [
        OutputRow(0, number, status, output="{}", parsed=parsed)
        for number, (status, parsed) in enumerate(
            [
                ("ok", {"a": {"b": 2, "why": "x"}}),
                ("ok", {"a": {"b": 1, "why": "y"}}),
                ("length", {"a": {"b": 1}}),
                ("ok", {"a": None}),
                ("ok", {"a": {"b": 1, "why": "z"}}),
            ]
        )
    ]
    assert {(row.vote, row.vote_share) for row in voted(rows, Vote(field="parsed.a.b"))} == {("1", 2 / 3)}
    assert {(row.vote, row.vote_share) for row in voted(rows, Vote(field="parsed.a.why"))} == {("x", 1 / 3)}
    assert {row.vote for row in voted(rows, Vote(field="parsed.a.other"))} == {None}


SCHEMA = {
    "type": "object",
    "properties": {"label": {"enum": ["yes", "no"]}, "sure": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["label", "sure"],
    "additionalProperties": False,
}


def test_a_job_votes_by_a_field(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": f"row {row}"} for row in range(4)])
    job_folder.job["generate"] = {"n": 7, "temperature": 1.5, "json_schema": SCHEMA, "max_tokens": 60}
    done = job_folder.run(generate={"vote": {"field": "parsed.label"}})
    assert done.exit_code == 0, done.log
    for row in range(4):
        of_row = [found for found in done.rows if found["row"] == row]
        vote, count = Counter(found["parsed"]["label"] for found in of_row).most_common(1)[0]
        assert {(found["vote"], found["vote_share"]) for found in of_row} == {(vote, count / 7)}


@pytest.mark.parametrize(
    ("vote", "message"),
    [
        ({"field": "parsed.lable"}, "parsed has no field 'lable'; its fields are label, sure"),
        ({"field": "parsed.label.x"}, "parsed.label has no field 'x'; it has no fields of its own"),
        ({"field": "label"}, "generate.vote"),
        ("most", "generate.vote"),
    ],
)
def test_a_field_that_is_not_there_is_a_mistake(job_folder, vote, message):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    job_folder.job["generate"] = {"n": 3, "temperature": 1.0, "json_schema": SCHEMA}
    done = job_folder.run(generate={"vote": vote})
    assert done.exit_code == 2
    assert message in done.log


def test_a_field_needs_a_schema(job_folder):
    job_folder.write("rows.jsonl", [{"prompt": "a"}])
    done = job_folder.run(generate={"n": 3, "temperature": 1.0, "vote": {"field": "parsed.label"}})
    assert done.exit_code == 2
    assert "is a field of answers with a `json_schema`" in done.log
