"""What loads when: the command line without torch, the kernels without triton, the public names lazily."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "triton", "transformers", "datasets")


def loaded_after(code: str) -> set[str]:
    """Top-level modules that a fresh Python has loaded after running the code."""
    code += "\nimport sys; print('\\n' + ' '.join({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import batchgen",
        "import batchgen; batchgen.__version__",
        "import batchgen.errors, batchgen.env, batchgen.job.spec, batchgen.job.load",
        "import batchgen.cli",
    ],
)
def test_loads_nothing_heavy(code: str) -> None:
    assert not loaded_after(code).intersection(HEAVY)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["validate", "jobs/label-tickets.yaml"],
        ["validate", "jobs/extract-orders.yaml"],
        ["schema"],
    ],
)
def test_command_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"import sys; sys.argv = ['batchgen', *{arguments}]\nfrom batchgen.cli import main\n"
    code += "try: main()\nexcept SystemExit as end: assert not end.code, end.code"
    done = subprocess.run(
        [sys.executable, "-P", "-X", "importtime", "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not imported.intersection(HEAVY)


def test_data_and_prompts_load_no_torch() -> None:
    code = "import pkgutil, importlib, batchgen.data, batchgen.prompts, batchgen.observe\n"
    code += "for package in (batchgen.data, batchgen.prompts, batchgen.observe):\n"
    code += "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
    code += "        importlib.import_module(module.name)"
    assert "torch" not in loaded_after(code)


def test_kernels_need_no_triton() -> None:
    """The CPU build of torch comes without triton."""
    code = "import sys; sys.modules['triton'] = None\nimport batchgen_kernels\n"
    code += "import torch; y, _ = batchgen_kernels.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6); assert y.sum() > 0"
    assert "torch" in loaded_after(code)


def test_public_names_exist() -> None:
    import batchgen

    assert [name for name in batchgen.__all__ if not hasattr(batchgen, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = batchgen.nothing
