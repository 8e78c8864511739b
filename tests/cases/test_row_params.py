"""Fields of `generate` as templates over the row's columns."""

import json

import pytest

from batchgen.job.schema import job_schema


def run(job_folder, rows, generate, **sections):
    job_folder.write("rows.jsonl", rows)
    job_folder.job["generate"] = {"ignore_eos": True, "skip_special_tokens": False} | generate
    return job_folder.run(limits={"failed_rows": "100%"}, **sections)


def test_each_row_has_its_own_budget(job_folder):
    rows = [{"prompt": "a", "budget": budget} for budget in (1, 5, "7", 5)]
    done = run(job_folder, rows, {"max_tokens": "{{ budget }}"})
    assert done.exit_code == 0, done.log
    assert done.column("output_tokens") == [1, 5, 7, 5]
    assert done.column("cached_tokens")[3] == done.column("prompt_tokens")[3]  # the same as row 1
    (part,) = job_folder.out.glob("manifest.json")
    manifest = json.loads(part.read_text())
    assert manifest["spec"]["generate"]["templates"] == {"max_tokens": "{{ budget }}"}
    assert manifest["sources_of_values"]["max_tokens"] == "job file"


def test_a_template_may_compute(job_folder):
    rows = [{"prompt": "a", "long": long} for long in (True, False)]
    done = run(job_folder, rows, {"max_tokens": "{{ 6 if long else 2 }}", "min_tokens": "{{ extra | default(1) }}"})
    assert done.column("output_tokens") == [6, 2]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "greater than or equal to 1"),
        (-3, "greater than or equal to 1"),
        (2.5, "valid integer"),
        ("many", "valid integer"),
        (True, "valid integer"),
        ([1], "valid integer"),
        (None, "null in this row"),
    ],
)
def test_a_bad_value_is_that_rows_error(job_folder, value, words):
    done = run(
        job_folder, [{"prompt": "a", "budget": 3}, {"prompt": "a", "budget": value}], {"max_tokens": "{{ budget }}"}
    )
    assert done.kinds() == [None, "bad_request"]
    message = done.rows[1]["error"]["message"]
    assert message.startswith("generate.max_tokens: ")
    assert words in message


def test_fields_that_do_not_go_together_are_that_rows_error(job_folder):
    done = run(job_folder, [{"prompt": "a", "few": 2}], {"max_tokens": 4, "min_tokens": "{{ few * 3 }}"})
    assert done.kinds() == ["bad_request"]
    assert "6 is more than max_tokens (4)" in done.rows[0]["error"]["message"]


def test_text_stays_text(job_folder):
    plain = run(job_folder, [{"prompt": "a"}], {"max_tokens": 8}, output={"path": "plain"}).rows[0]["output"]
    stop = plain[3]
    done = run(
        job_folder, [{"prompt": "a", "end": stop}], {"max_tokens": 8, "stop": "{{ end }}"}, output={"path": "out"}
    )
    assert done.column("output") == [plain[: plain.index(stop)]]


def test_a_rows_seed_is_its_own(job_folder):
    rows = [{"prompt": "a", "s": seed} for seed in (1, 2, 1)]
    done = run(job_folder, rows, {"max_tokens": 12, "temperature": "{{ 1.5 }}", "seed": "{{ s }}"})
    first, second, third = done.column("output")
    assert first == third != second


def test_mistakes_are_told_before_the_first_row(job_folder):
    done = run(job_folder, [{"prompt": "a"}], {"max_tokens": "{{ budgte }}"})
    assert done.exit_code == 2
    assert "generate.max_tokens" in done.log
    assert "the input has no column 'budgte'" in done.log
    assert "line 1" in run(job_folder, [{"prompt": "a"}], {"top_p": "{{ x"}).log
    assert run(job_folder, [{"prompt": "a", "k": 2}], {"n": "{{ k }}"}).exit_code == 2


def test_the_schema_takes_templates(job_folder):
    fields = json.loads(job_schema())["$defs"]["Generate"]["properties"]
    template = {"type": "string", "pattern": "[{][{%]"}
    assert template in fields["max_tokens"]["anyOf"]
    assert template in fields["stop"]["anyOf"]
    assert template not in fields["n"].get("anyOf", [])
