"""The promise: whatever is killed and whenever, the same command ends with the same rows."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_D01_thirty_kills_lose_double_and_change_no_row() -> None:
    command = [sys.executable, "-P", str(ROOT / "scripts" / "chaos"), "--kills", "30"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.stdout.splitlines()[-1] == "kills: 30  rows lost: 0  rows doubled: 0  rows changed: 0", done.stdout
    assert done.returncode == 0, done.stdout
