"""The environment variables that batchgen reads."""

import os
import subprocess
import sys
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


@pytest.mark.parametrize(("given", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_that_wait_sleep_before_torch_is_loaded(given: str | None, seen: str) -> None:
    code = (
        "import os, sys; sys.modules['torch'] = None\n"
        "try: from batchgen import Engine\n"
        "except ImportError: print(os.environ['OMP_WAIT_POLICY'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if given is not None:
        environment["OMP_WAIT_POLICY"] = given
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [seen]
