"""Jobs whose answers follow a JSON schema, a regular expression or a grammar."""

import json
import re
import shutil
import signal

import pytest

FILM = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        "kind": {"enum": ["drama", "comedy"]},
        "seen": {"type": ["boolean", "null"]},
    },
    "required": ["title", "stars", "kind", "seen"],
    "additionalProperties": False,
}
ROWS = [{"prompt": f"film {number}"} for number in range(6)]


def run(job_folder, generate, rows=ROWS, **sections):
    job_folder.write("rows.jsonl", rows)
    job_folder.job["generate"] = {"max_tokens": 200} | generate
    return job_folder.run(limits={"failed_rows": "100%"}, **sections)


def test_answers_follow_a_schema_and_land_in_a_typed_column(job_folder):
    done = run(job_folder, {"json_schema": FILM, "temperature": 1.0})
    assert done.exit_code == 0, done.log
    assert done.column("status") == ["ok"] * 6
    assert set(done.column("finish_reason")) == {"stop"}
    for row in done.rows:
        assert row["parsed"] == json.loads(row["output"])
        assert list(row["parsed"]) == list(FILM["properties"])
        assert 1 <= row["parsed"]["stars"] <= 5
    assert len(set(done.column("output"))) > 1
    manifest = json.loads((job_folder.out / "manifest.json").read_text())
    assert manifest["spec"]["generate"]["json_schema"] == FILM


def test_a_cut_answer_is_no_valid_one(job_folder):
    done = run(job_folder, {"json_schema": FILM, "max_tokens": 20})
    assert done.column("status") == ["length"] * 6
    assert done.column("parsed") == [None] * 6
    assert set(done.column("output_tokens")) == {20}


def test_answers_match_an_expression_as_a_whole(job_folder):
    expression = r"(yes|no), [a-c]{2,5}\."
    done = run(job_folder, {"regex": expression, "temperature": 1.0})
    assert done.column("status") == ["ok"] * 6
    assert all(re.fullmatch(expression, output) for output in done.column("output"))
    assert "parsed" not in done.rows[0]


def test_answers_follow_a_grammar(job_folder):
    grammar = 'start: sum\nsum: number | number "+" sum\nnumber: /[0-9]/'
    done = run(job_folder, {"grammar": grammar, "temperature": 1.0, "max_tokens": 30})
    assert set(done.column("status")) <= {"ok", "length"}
    assert "ok" in done.column("status")
    assert all(re.fullmatch(r"\d(\+\d)*", row["output"]) for row in done.rows if row["status"] == "ok")


def test_schemas_and_grammars_come_from_files(job_folder):
    job_folder.write("film.json", json.dumps(FILM))
    inline = run(job_folder, {"json_schema": FILM}, output={"path": "inline"})
    named = run(job_folder, {"json_schema": "film.json"}, output={"path": "named"})
    assert named.exit_code == 0, named.log
    assert named.column("output") == inline.column("output")
    job_folder.write("sum.lark", 'start: "a" | "b"')
    done = run(job_folder, {"grammar": "sum.lark"}, output={"path": "grammar"})
    assert set(done.column("output")) <= {"a", "b"}


@pytest.mark.parametrize(
    ("generate", "words"),
    [
        ({"json_schema": {"type": "array", "items": {"type": "object", "minContains": 1}}},
         "generate.json_schema.items.minContains: batchgen can't enforce 'minContains'"),
        ({"json_schema": {"properties": {"a": {"type": "string", "pattern": "("}}}},
         "generate.json_schema.properties.a: regex parse error"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "json_schema: Unsatisfiable schema"),
        ({"json_schema": "none.json"}, "generate.json_schema: "),
        ({"json_schema": "rows.jsonl"}, "can't be read as JSON"),
        ({"regex": "a(?=b)"}, "generate.regex: "),
        ({"regex": "("}, "unclosed group"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "none.lark"}, "can't be read"),
        ({"regex": "a", "grammar": "start: /a/"}, "generate.grammar: and regex exclude one another"),
        ({"regex": "a", "choices": ["a", "b"]}, "generate.regex: is for generated answers"),
        ({"regex": "a", "stop": ["b"]}, "generate.stop: doesn't go with regex"),
        ({"regex": "a", "min_tokens": 2}, "generate.min_tokens: doesn't go with regex"),
        ({"regex": "a", "ignore_eos": True}, "generate.ignore_eos: doesn't go with regex"),
        ({"regex": "a", "stop_token_ids": [3]}, "generate.stop_token_ids: doesn't go with regex"),
    ],
)  # fmt: skip
def test_mistakes_are_told_before_the_model_loads(job_folder, no_model, generate, words):
    done = run(job_folder, generate)
    assert done.exit_code == 2
    assert words in done.log


def test_a_mistake_has_its_line(job_folder, no_model):
    job_folder.write("rows.jsonl", ROWS)
    path = job_folder.save(generate={"json_schema": FILM})
    text = "\n".join(
        [
            "version: 1",
            f"model: {job_folder.job['model']}",
            "input: {path: rows.jsonl}",
            'prompt: {text: "{{ prompt }}"}',
            "generate:",
            "  json_schema:",
            "    type: object",
            "    properties:",
            "      tags:",
            "        type: array",
            "        uniqueItems: true",
            "output: {path: out}",
        ]
    )
    path.write_text(text)
    from batchgen.errors import JobFileError
    from batchgen.validation import load_checked

    with pytest.raises(JobFileError, match=r"job.yaml:11: generate.json_schema.properties.tags.uniqueItems: "):
        load_checked(str(path))


def test_each_row_brings_its_own_schema(job_folder):
    digits = {"type": "integer", "minimum": 1, "maximum": 9}
    rows = [
        {"prompt": "a", "schema": digits},
        {"prompt": "a", "schema": json.dumps({"enum": ["left", "right"]})},
        {"prompt": "a", "schema": {"type": "array", "uniqueItems": True}},
        {"prompt": "a", "schema": None},
        {"prompt": "a", "schema": "film.json"},
    ]
    done = run(job_folder, {"json_schema": "{{ schema }}"}, rows)
    assert done.kinds() == [None, None, "bad_request", "bad_request", "bad_request"]
    assert done.rows[0]["output"] in set("123456789")
    assert done.column("parsed")[:2] == done.column("output")[:2]  # JSON text, since each has its own type
    assert json.loads(done.rows[1]["output"]) in ("left", "right")
    assert "generate.json_schema.uniqueItems" in done.rows[2]["error"]["message"]


def test_each_row_brings_its_own_expression(job_folder):
    rows = [{"prompt": "a", "shape": shape} for shape in ("[0-9]{3}", "12", "x|y", "(")]
    done = run(job_folder, {"regex": "{{ shape }}"}, rows)
    assert done.kinds() == [None, None, None, "bad_request"]
    assert all(re.fullmatch(row["shape"], found["output"]) for row, found in zip(rows[:3], done.rows, strict=False))


def test_openai_requests_bring_a_response_format(job_folder):
    def request(number, response_format):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 200, "temperature": 1}
        body |= {"response_format": response_format, "seed": number}
        return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}

    named = {"name": "film", "strict": True, "schema": FILM}
    formats = [
        {"type": "text"},
        {"type": "json_schema", "json_schema": named},
        {"type": "xml"},
        {"type": "json_object"},
    ]
    job_folder.write("rows.jsonl", [request(*pair) for pair in enumerate(formats)])
    del job_folder.job["prompt"]
    job_folder.job["generate"] = {}
    done = job_folder.run(input={"format": "openai"}, limits={"failed_rows": "100%"})
    assert done.kinds() == [None, None, "bad_request", None], done.log
    assert set(json.loads(done.rows[1]["output"])) == set(FILM["properties"])
    assert done.rows[3]["output"].startswith("{")
    done = job_folder.run(
        generate={"regex": "a+"}, input={"format": "openai"}, output={"path": "b"}, limits={"failed_rows": "100%"}
    )
    assert done.kinds() == [None, "bad_request", "bad_request", "bad_request"]


def test_a_number_too_large_for_its_column_is_invalid(job_folder):
    schema = {
        "type": "object",
        "properties": {"n": {"const": 10**30}},
        "required": ["n"],
        "additionalProperties": False,
    }
    done = run(job_folder, {"json_schema": schema}, ROWS[:1])
    assert done.rows[0]["output"] == '{"n": 1000000000000000000000000000000}'
    assert (done.rows[0]["status"], done.rows[0]["parsed"]) == ("invalid", None)
    assert "no integer of 64 bits" in done.rows[0]["error"]["message"]


def test_a_resumed_job_and_one_in_company_answer_alike(job_folder):
    generate = {"json_schema": FILM, "temperature": 1.0, "seed": 5, "n": 2}
    whole = run(job_folder, generate, output={"path": "whole"}).rows
    job_folder.job["engine"] |= {"max_batch_rows": 1, "prefix_caching": False}
    alone = run(job_folder, generate, output={"path": "alone"}).rows
    assert [row["output"] for row in alone] == [row["output"] for row in whole]


@pytest.mark.parametrize("output_format", ["jsonl", "openai"])
def test_lines_of_json_hold_the_value(job_folder, output_format):
    done = run(job_folder, {"json_schema": FILM}, ROWS[:2], output={"format": output_format})
    assert done.exit_code == 0, done.log
    lines = [
        json.loads(line) for part in sorted(job_folder.out.glob("part-*")) for line in part.read_text().splitlines()
    ]
    for line in lines:
        row = line if output_format == "jsonl" else line["batchgen"]["samples"][0]
        assert list(row["parsed"]) == list(FILM["properties"])


def test_another_order_of_properties_is_another_job(job_folder):
    run(job_folder, {"json_schema": FILM})
    turned = FILM | {"properties": dict(reversed(FILM["properties"].items()))}
    again = run(job_folder, {"json_schema": turned})
    assert again.exit_code == 2
    assert "generate.json_schema" in again.log


def test_another_attempt_follows_the_schema_too(job_folder):
    generate = {"json_schema": FILM, "max_tokens": 20, "retry": {"length": {"times": 1, "max_tokens": 200}}}
    done = run(job_folder, generate)
    assert done.column("status") == ["ok"] * 6
    assert done.column("attempts") == [2] * 6
    assert all(list(row["parsed"]) == list(FILM["properties"]) for row in done.rows)


def test_tokens_without_a_choice_are_reported(job_folder):
    done = run(job_folder, {"json_schema": FILM})
    report = json.loads((job_folder.out / "manifest.json").read_text())["report"]
    assert 0.4 * report["output_tokens"] < report["forced_tokens"] < report["output_tokens"]
    assert f"grammar {report['forced_tokens']:,} output tokens had no choice" in done.log
    drawn = run(job_folder, {"json_schema": FILM, "logprobs": 0}, output={"path": "drawn"})
    assert drawn.column("output") == done.column("output")
    assert [len(row["logprobs"]) for row in drawn.rows] == done.column("output_tokens")


def test_a_killed_job_ends_with_the_same_answers(job_folder, forks, tmp_path):
    generate = {"json_schema": FILM, "temperature": 1.0, "n": 2}
    options = {"output": {"part_rows": 2}, "engine": {"max_batch_rows": 3}, "checkpoint": {"every": "0.01s"}}
    whole = run(job_folder, generate, **options)
    command = ["run", str(job_folder.save()), "--set", f"output.path={tmp_path / 'killed'}"]
    log = tmp_path / "killed.log"
    assert forks.run(*command, log=log, at=("row", 6), signals=[signal.SIGKILL])["ended"] == -signal.SIGKILL
    assert forks.run(*command, log=log)["ended"] == 0
    job_folder.job["output"]["path"] = str(tmp_path / "killed")
    assert [row["parsed"] for row in job_folder.rows()] == whole.column("parsed")


def test_text_of_a_control_token_is_written_as_text(job_folder):
    words = ["<|im_end|>", "a<|im_start|>b"]
    done = run(job_folder, {"json_schema": {"enum": words}}, ROWS[:2])
    assert set(done.column("parsed")) <= set(words)
    assert done.column("output") == [json.dumps(value) for value in done.column("parsed")]


def test_a_tokenizer_that_no_grammar_can_use_is_told(job_folder, no_model, tmp_path):
    model = tmp_path / "words"
    shutil.copytree(job_folder.job["model"], model)
    words = {f"word{number}": number for number in range(259)}
    tokenizer = {"version": "1.0", "model": {"type": "WordLevel", "vocab": words, "unk_token": "word0"}}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    done = run(job_folder, {"regex": "a+"}, model=str(model))
    assert done.exit_code == 2
    assert "generate.regex: no grammar can be followed with the model's tokenizer" in done.log
