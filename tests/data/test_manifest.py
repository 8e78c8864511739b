"""manifest.json and its schema say the same."""

import json
from importlib.resources import files

import jsonschema
import pytest

from batchgen.data.manifest import InputRecord, Manifest, SourceRecord, TemplateRecord, manifest_schema, parse_manifest
from batchgen.data.parts import PartInfo

MANIFEST = Manifest(
    batchgen_version="0.1.0",
    spec={"version": 1, "model": "m"},
    fingerprint={"generate.seed": "7"},
    inputs=(InputRecord(path="a.jsonl", num_rows=3, bytes=99, fingerprint="a0"),),
    model=SourceRecord(name="m", fingerprint="f0"),
    tokenizer=SourceRecord(name="m", fingerprint="f1"),
    chat_template=TemplateRecord(text="{{ messages }}", fingerprint="t0"),
    sources_of_values={"seed": "job file"},
    num_rows=3,
    n=2,
    part_rows=2,
)


def make_part(number: int, rows_by_status: dict[str, int]) -> PartInfo:
    return PartInfo(
        name=f"part-{number}",
        batchgen_version="0.1.0",
        job_id=MANIFEST.job_id,
        start=2 * number,
        stop=2 * number + 2,
        n=2,
        rows_by_status=rows_by_status,
        prompt_tokens=10,
        cached_tokens=4,
        output_tokens=6,
        data_bytes=100,
        xxhash="00",
    )


def test_the_schema_file_is_the_generated_one() -> None:
    text = files("batchgen.schemas").joinpath("manifest.schema.json").read_text(encoding="utf-8")
    assert text == manifest_schema(), "write manifest_schema() to schemas/manifest.schema.json"


def test_manifests_fit_the_schema_and_come_back_equal() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(manifest_schema()))
    parts = (make_part(0, {"ok": 3, "error": 1}), make_part(1, {"length": 2}))
    for manifest in (MANIFEST, MANIFEST.finish(parts, {"seconds": {"load": 1.5}})):
        validator.validate(json.loads(manifest.to_json()))
        assert parse_manifest(manifest.to_json(), "out/manifest.json") == manifest
    with pytest.raises(jsonschema.ValidationError):
        validator.validate({**json.loads(MANIFEST.to_json()), "state": "half"})


def test_a_finished_manifest_sums_up_its_parts() -> None:
    finished = MANIFEST.finish((make_part(0, {"ok": 3, "error": 1}), make_part(1, {"ok": 1, "length": 1})), {})
    assert finished.state == "finished"
    assert finished.finished is not None
    assert finished.rows_by_status == {"ok": 4, "error": 1, "length": 1}
    assert (finished.prompt_tokens, finished.cached_tokens, finished.output_tokens) == (20, 8, 12)
    assert finished.reopen() == MANIFEST.model_copy(update={"parts": finished.parts})


def test_an_empty_input_has_one_part() -> None:
    assert [MANIFEST.model_copy(update={"num_rows": rows}).layout.num_parts for rows in (0, 1, 2, 3, 4)] == [
        1,
        1,
        1,
        2,
        2,
    ]
