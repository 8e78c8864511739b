"""The environment variables that batchgen reads."""

from pathlib import Path

import pytest

from batchgen import env


def test_the_cache_folder_is_the_first_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_folder() == Path("/home/ann/.cache/batchgen")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert env.cache_folder() == Path("/home/ann/.cache/batchgen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert env.cache_folder() == Path("/var/cache/batchgen")
    monkeypatch.setenv("BATCHGEN_CACHE", "~/scratch")
    assert env.cache_folder() == Path("/home/ann/scratch")


def test_a_variable_for_a_job_file_may_be_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "")
    monkeypatch.delenv("NONE", raising=False)
    assert env.job_variable("WORD") == ""
    assert env.job_variable("NONE") is None
