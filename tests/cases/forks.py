"""Runs the command line in forks of one process that has torch loaded, and sends them signals at chosen events.

Reads one JSON object a line, `{"arguments", "log", "event", "count", "signals", "group"}` or `{"continue": pid}`, and
answers with `{"pid", "ended"}` or `{"pid", "stopped"}` as soon as the fork has ended or stopped.
"""

import json
import os
import signal
import sys
import threading
from typing import Any

import pyarrow.dataset  # noqa: F401
import torch  # noqa: F401

import batchgen.data.journal
import batchgen.engine.engine
import batchgen.runner
from batchgen.cli import main
from batchgen.data.output import OutputFolder

HANG = 0  # where a signal's number would be: the call never comes back
LONGEST_S = 120  # a run that hangs ends then
EVENTS: dict[str, tuple[Any, str]] = {
    "load": (batchgen.runner, "load_engine"),
    "step": (batchgen.engine.engine.Engine, "step"),
    "row": (OutputFolder, "add"),
    "fsync": (os, "fsync"),
    "replace": (os, "replace"),
    "append": (batchgen.data.journal.Journal, "append"),
}


def arrange(event: str, count: int, signals: list[int], group: bool) -> None:
    """Before event number `count`, send this process (or its group) these signals."""
    owner, name = EVENTS[event]
    function = getattr(owner, name)
    left = [count]

    def counted(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            for number in signals:
                if number == HANG:
                    threading.Event().wait()
                (os.killpg if group else os.kill)(os.getpid(), number)
        return function(*arguments, **options)

    setattr(owner, name, counted)


def fork(order: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    signal.alarm(LONGEST_S)
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "event" in order:
        arrange(order["event"], order["count"], order["signals"], order["group"])
    sys.argv = ["batchgen", *order["arguments"]]
    try:
        main()
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 0)


def serve() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        pid = order.get("continue") or fork(order)
        if "continue" in order:
            os.kill(pid, signal.SIGCONT)
        _, status = os.waitpid(pid, os.WUNTRACED)
        how = "stopped" if os.WIFSTOPPED(status) else "ended"
        code = os.WSTOPSIG(status) if os.WIFSTOPPED(status) else os.waitstatus_to_exitcode(status)
        sys.stdout.write(json.dumps({"pid": pid, how: code}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
