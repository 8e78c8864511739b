"""What a job file calls `model` becomes a folder or file on this machine, or one clear line."""

import io
import re
import threading

import fsspec
import pytest
from huggingface_hub import constants

from batchgen.errors import JobFileError
from batchgen.models.resolve import resolve_model


@pytest.fixture
def remote():
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/model/config.json": b"{}", "/bucket/model/sub/model.safetensors": b"weights"})
    yield files
    files.rm("/bucket", recursive=True)


def refusal(name, folder):
    with pytest.raises(JobFileError) as caught:
        resolve_model(name, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_and_files_are_found_from_the_given_folder(tmp_path):
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    (tmp_path / "x.gguf").touch()
    assert resolve_model("models/tiny", tmp_path) == tmp_path / "models" / "tiny"
    assert resolve_model(str(tmp_path / "models" / "tiny"), tmp_path / "elsewhere") == tmp_path / "models" / "tiny"
    assert resolve_model("x.gguf", tmp_path) == tmp_path / "x.gguf"


def test_paths_that_lead_nowhere_are_not_asked_of_the_hub(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "model-q4.gguf").touch()
    (tmp_path / "weights.bin").touch()
    assert "has no config.json; name the file itself" in refusal("empty", tmp_path)
    assert "model-q4.gguf" in refusal("empty", tmp_path)
    assert "is no .gguf file" in refusal("weights.bin", tmp_path)
    for name in ("./model", "/no/such/model", "a/b/c", "model.gguf", "~/no-such-model"):
        assert "does not exist" in refusal(name, tmp_path)


def test_a_hub_id_without_a_network_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    message = refusal("owner/model", tmp_path)
    assert all(part in message for part in ("owner/model", "can't be reached", str(tmp_path), "give its folder"))


def test_a_hub_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    """The look-up of a name may hang for minutes, whatever timeout is asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("batchgen.models.resolve._HUB_SECONDS", 0.05)
    done = threading.Event()

    def hang(*_, **__):
        done.wait(60)
        return io.BytesIO()

    monkeypatch.setattr("urllib.request.urlopen", hang)
    assert "can't be reached" in refusal("owner/model", tmp_path)
    done.set()


def test_a_hub_id_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (tmp_path / "models--owner--model" / "refs").mkdir()
    (tmp_path / "models--owner--model" / "refs" / "main").write_text("abc")
    assert resolve_model("owner/model", tmp_path) == snapshot


def test_a_remote_folder_is_copied_once_for_each_state(tmp_path, remote, own_cache, monkeypatch):
    first = resolve_model("memory://bucket/model/", tmp_path)
    assert own_cache in first.parents
    assert (first / "sub" / "model.safetensors").read_bytes() == b"weights"
    with monkeypatch.context() as patch:
        patch.setattr(type(remote), "get_file", lambda *_: pytest.fail("copied again"))
        assert resolve_model("memory://bucket/model", tmp_path) == first
    remote.pipe("/bucket/model/sub/model.safetensors", b"WEIGHTS")
    second = resolve_model("memory://bucket/model", tmp_path)
    assert (second / "sub" / "model.safetensors").read_bytes() == b"WEIGHTS"


def test_a_remote_gguf_file(tmp_path, remote, own_cache):
    remote.pipe("/bucket/tiny.gguf", b"GGUF")
    path = resolve_model("memory://bucket/tiny.gguf", tmp_path)
    assert path.name == "tiny.gguf"
    assert path.read_bytes() == b"GGUF"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://bucket/nothing", "no such folder or file"),
        ("memory://bucket/model/sub", "no config.json"),
        ("nonsense://bucket/model", "can't be read"),
    ],
)
def test_remote_places_without_a_model(url, said, tmp_path, remote, own_cache):
    assert re.search(f"{re.escape(url)}.*{said}", refusal(url, tmp_path))
