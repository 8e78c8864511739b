"""Job files of the tests: written to a folder that is the current one, so that messages name `job.yaml`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.errors import JobFileError
from batchgen.job.load import load_job
from batchgen.job.spec import Job

BASE = """\
version: 1
model: owner/model
input:
  path: rows.jsonl
prompt:
  text: Once
output:
  path: out
"""

LoadText = Callable[..., Job]
MistakesIn = Callable[..., list[str]]


@pytest.fixture
def base() -> str:
    """The shortest right job file; it has eight lines."""
    return BASE


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadText:
    """Load a job from text or bytes."""
    monkeypatch.chdir(tmp_path)

    def load(text: str | bytes = BASE, *settings: str) -> Job:
        Path("job.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
        return load_job("job.yaml", settings)

    return load


@pytest.fixture
def mistakes_in(load_text: LoadText) -> MistakesIn:
    """The messages for a job that can't be loaded, one for each mistake."""

    def mistakes(text: str | bytes = BASE, *settings: str) -> list[str]:
        with pytest.raises(JobFileError) as caught:
            load_text(text, *settings)
        assert caught.value.exit_code == 2
        lines = str(caught.value).splitlines()
        if len(lines) == 1:
            return lines
        assert lines[0] == f"{len(lines) - 1} mistakes in job.yaml"
        return lines[1:]

    return mistakes
