"""Signals stop a job between two steps, and end it where it stands when that takes too long."""

import os
import signal
import subprocess
import sys
import time

import pytest

from batchgen.errors import Stopped
from batchgen.interrupt import StopRequest

HANGS = """
import os, signal, sys, time
from batchgen.interrupt import StopRequest

with StopRequest(grace=0.2) as stop, stop.ends_in_time():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)  # a step, or an upload to a store that does not answer
"""


def test_D11_a_job_that_does_not_stop_in_time_ends_where_it_stands() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 75
    assert done.stderr.startswith("batchgen: not done 0.2 s after SIGTERM, so it ends now. Run the same command again")
    assert len(done.stderr.splitlines()) == 1


def test_D11_a_job_that_stops_in_time_leaves_no_timer_behind() -> None:
    def run() -> None:
        stop = StopRequest(grace=0.05)
        with stop.ends_in_time(), stop:
            os.kill(os.getpid(), signal.SIGTERM)
            stop.check()

    with pytest.raises(Stopped, match="stopped by SIGTERM; finished rows are kept"):
        run()
    time.sleep(0.2)  # longer than the grace time: this process lives
