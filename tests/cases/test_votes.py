"""Votes among the samples of a row."""

from collections import Counter

import pytest

from batchgen.data.rows import OutputRow
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
