"""The kernels in Triton's interpreter, which a process has to be started with."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, of the test extra")
def test_kernels_in_the_interpreter():
    tests = Path(__file__).with_name("test_kernels.py")
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= 45
    assert "skipped" not in result.stdout


def test_without_triton_the_ops_work_on_the_cpu():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, batchgen_kernels as ops\n"
        "from batchgen_kernels import activation\n"
        "assert ops.act_mul(torch.ones(2, 4), 'silu').shape == (2, 2)\n"
        "try: activation._launch(torch.ones(2, 4), 'silu')\n"
        "except ModuleNotFoundError as error: print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "needs Triton for tensors on a GPU: pip install 'triton>=3.6'" in result.stdout
