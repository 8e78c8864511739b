"""The JSON Schema of the job file: made from the models, committed, and of one mind with them."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from batchgen.errors import JobFileError
from batchgen.job.load import load_job
from batchgen.job.schema import job_schema, read_schema, schema_names

ROOT = Path(__file__).resolve().parent.parent.parent
JOBS = sorted(ROOT.glob("jobs/*.yaml"))


def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(json.loads(job_schema()))


def is_loadable(path: Path) -> bool:
    try:
        load_job(path)
    except JobFileError:
        return False
    return True


def test_the_committed_schema_is_the_models() -> None:
    """Run `python scripts/reference.py` after a change of the models."""
    assert read_schema("job") == job_schema()
    assert "job" in schema_names()


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json.loads(job_schema()))


def test_a_schema_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(JobFileError, match=r"no schema 'nope'; the schemas are .*job"):
        read_schema("nope")


def test_every_field_has_a_meaning_in_the_schema() -> None:
    schema = json.loads(job_schema())
    sections: list[dict[str, Any]] = [schema, *schema["$defs"].values()]
    fields = [(name, field) for section in sections for name, field in section["properties"].items()]
    assert len(fields) > 60
    assert not [name for name, field in fields if not field.get("description") and "$ref" not in field]


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_the_example_jobs_fit_the_schema(path: Path) -> None:
    validator().validate(yaml.safe_load(path.read_text()))
    assert is_loadable(path)


@pytest.mark.parametrize(
    ("good", "change"),
    [
        (True, {}),
        (True, {"prompt": {"user": "a", "system": "b", "assistant": "c", "tools": [{"type": "function"}]}}),
        (True, {"prompt": {"messages": "column"}, "input": {"path": ["a", "b"], "format": "csv", "limit": 3}}),
        (True, {"input": {"path": "a", "format": "openai"}, "prompt": {"special_tokens": "parse"}}),
        (True, {"generate": {"max_tokens": None, "stop": ["a"], "logit_bias": {"7": -1}, "logprobs": 20}}),
        (True, {"limits": {"overlong": {"truncate": {"field": "a"}}, "failed_rows": 5, "runtime": "6h"}}),
        (True, {"output": {"path": "o", "columns": "all", "compression": "none"}, "engine": {"max_length": 2}}),
        (False, {"version": 2}),
        (False, {"version": "1"}),
        (False, {"model": None}),
        (False, {"model": ""}),
        (False, {"nmae": "a"}),
        (False, {"input": {}}),
        (False, {"input": {"path": [], "limit": 0}}),
        (False, {"prompt": {"user": "a", "text": "b"}}),
        (False, {"prompt": {"messages": 5}}),
        (False, {"prompt": {}}),
        (False, {"prompt": {"system": "a"}}),
        (False, {"generate": {"temperature": "0.7"}}),
        (False, {"generate": {"temperature": -1}}),
        (False, {"generate": {"top_p": 0}}),
        (False, {"generate": {"n": True}}),
        (False, {"generate": {"choices": ["a"]}}),
        (False, {"generate": {"logit_bias": {"x": 1}}}),
        (False, {"limits": {"overlong": "cut"}}),
        (False, {"limits": {"overlong": {"truncate": {}}}}),
        (False, {"output": {"path": "o", "columns": "some"}}),
        (False, {"engine": {"device": "tpu"}}),
    ],
)
def test_schema_and_models_agree(tmp_path: Path, good: bool, change: dict[str, Any]) -> None:
    job = {
        "version": 1,
        "model": "m",
        "input": {"path": "a"},
        "prompt": {"text": "t"},
        "output": {"path": "o"},
    } | change
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    assert (validator().is_valid(job), is_loadable(path)) == (good, good)
