"""What the cases share."""

import pytest


@pytest.fixture
def no_model(monkeypatch):
    """A model that must not be loaded."""
    monkeypatch.setattr("batchgen.runner.load_engine", lambda inputs: pytest.fail("the model was loaded"))
