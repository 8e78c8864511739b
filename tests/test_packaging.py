"""The wheel holds the whole house, and works without the developers' packages."""

import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built offline from a clean copy (setuptools reuses what an earlier build left behind)."""
    folder = tmp_path_factory.mktemp("wheel")
    left_behind = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("batchgen", "kernels", "schemas"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=left_behind)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / "source")], check=True, capture_output=True)
    return next(folder.glob("*.whl"))


def test_every_module_and_schema_is_in_the_wheel(wheel: Path) -> None:
    ours = {f"batchgen/{path.relative_to(ROOT / 'batchgen')}" for path in ROOT.glob("batchgen/**/*.py")}
    ours |= {f"batchgen/schemas/{path.name}" for path in ROOT.glob("schemas/*") if path.suffix in (".py", ".json")}
    ours |= {str(path.relative_to(ROOT / "kernels")) for path in ROOT.glob("kernels/**/*.py")}
    ours |= {"batchgen/py.typed", "batchgen_kernels/py.typed"}
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == ours


def test_licence_is_in_the_wheel(wheel: Path) -> None:
    licences = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("licenses/LICENSE")]
    assert len(licences) == 1


def test_wheel_runs_without_the_developers_packages(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, which sees the packages that batchgen depends on and none of the developers'."""
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False, symlinks=True)
    packages = next(environment.glob("lib/*/site-packages"))
    outer = next(path for path in sys.path if path.endswith("site-packages") and (Path(path) / "click").exists())
    for path in Path(outer).iterdir():
        if not is_developers(path):
            (packages / path.name).symlink_to(path)
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    program = str(environment / "bin" / "batchgen")
    jobs = sorted(str(path) for path in (ROOT / "jobs").glob("*.yaml"))
    for arguments in (["--help"], ["--version"], ["validate", *jobs]):
        done = subprocess.run([program, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def is_developers(path: Path) -> bool:
    """Whether something in site-packages is batchgen itself (installed editable) or belongs to its extras."""
    extras = SETTINGS["project"]["optional-dependencies"]
    names = {
        entry.split(">")[0].split("[")[0].lower().replace("-", "_") for extra in extras.values() for entry in extra
    }
    names |= {"batchgen", "_pytest", "xdist", "importlinter", "__editable__", "__editable___batchgen"}
    stem = path.name.lower().split("-")[0].split(".")[0]
    return stem in names or path.name.startswith("__editable__")


def test_torch_is_a_range_in_the_metadata_and_exact_in_the_constraints() -> None:
    torch = [entry for entry in SETTINGS["project"]["dependencies"] if entry.startswith("torch")]
    assert torch == ["torch>=2.11,<3"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert sum(pin.startswith("torch==") for pin in pins) == 1


def test_every_dependency_has_a_pin() -> None:
    project = SETTINGS["project"]
    entries = project["dependencies"] + [e for extra in project["optional-dependencies"].values() for e in extra]
    wanted = {entry.split(">")[0].split("[")[0].lower() for entry in entries} - {"batchgen"}
    pins = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    assert wanted - pins == set()
