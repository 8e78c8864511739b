"""Relative paths start at the job file; URLs and hub ids are left alone."""

from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.job.load import load_job
from batchgen.job.spec import Job

LoadText = Callable[..., Job]


def test_local_paths_start_at_the_job_file(tmp_path: Path, base: str) -> None:
    (tmp_path / "jobs").mkdir()
    file = tmp_path / "jobs" / "job.yaml"
    text = base.replace("rows.jsonl", "[rows.jsonl, '../more/*.jsonl']").replace("owner/model", "./model.gguf")
    file.write_text(text.replace("text: Once", "user: Once\n  chat_template: chat.jinja") + "tokenizer: ~/tokenizer\n")
    job = load_job(file)
    assert job.folder == tmp_path / "jobs"
    assert job.input.path == [f"{tmp_path}/jobs/rows.jsonl", f"{tmp_path}/jobs/../more/*.jsonl"]
    assert job.model == f"{tmp_path}/jobs/model.gguf"
    assert job.prompt.chat_template == f"{tmp_path}/jobs/chat.jinja"
    assert job.output.path == f"{tmp_path}/jobs/out"
    assert job.tokenizer == str(Path("~/tokenizer").expanduser())


@pytest.mark.parametrize("url", ["s3://bucket/a b/*.parquet", "gs://x/y", "https://x.org/y.jsonl", "memory://x"])
def test_urls_stay_as_they_are(load_text: LoadText, base: str, url: str) -> None:
    job = load_text(base.replace("rows.jsonl", url).replace("path: out", f"path: {url}"), f"model={url}")
    assert job.input.path == job.output.path == job.model == url


@pytest.mark.parametrize("name", ["owner/model", "gpt2", "owner/model.v2"])
def test_hub_ids_stay_as_they_are(load_text: LoadText, base: str, name: str) -> None:
    assert load_text(base, f"model={name}").model == name


@pytest.mark.parametrize("name", ["./owner/model", "/models/m", "a/b/c", "model.gguf", "models/"])
def test_what_is_written_like_a_path_is_one(load_text: LoadText, base: str, tmp_path: Path, name: str) -> None:
    assert load_text(base, f"model={name}").model == str(tmp_path / name)


def test_a_folder_that_is_there_comes_before_a_hub_id(load_text: LoadText, base: str, tmp_path: Path) -> None:
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert load_text(base).model == str(tmp_path / "owner" / "model")


def test_a_dataset_is_a_hub_id_too(load_text: LoadText, base: str, tmp_path: Path) -> None:
    text = base.replace("rows.jsonl", "owner/reviews\n  format: datasets")
    assert load_text(text).input.path == "owner/reviews"
    (tmp_path / "owner" / "reviews").mkdir(parents=True)
    assert load_text(text).input.path == str(tmp_path / "owner" / "reviews")


def test_where_names_the_line_of_a_field(load_text: LoadText, base: str) -> None:
    job = load_text(base, "generate.top_k=2")
    assert job.where("prompt.text") == "job.yaml:6: prompt.text"
    assert job.where("generate.top_k") == "--set: generate.top_k"
    assert job.where("output.columns") == "job.yaml:7: output.columns"
