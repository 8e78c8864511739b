"""Runs batchgen in forks of one process that has everything loaded, each killed at a moment that it is told.

Reads one JSON object a line: `{"arguments", "log", "environment"}` with `{"event", "when"}` for the number of an event
and `before`, `half` or `after`, or `{"seconds"}`, and `{"signal"}`. Answers `{"ended", "events"}`.
"""

import io
import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pyarrow.dataset  # noqa: F401
import torch

import batchgen.engine.engine
import batchgen.runner
import batchgen.validation  # noqa: F401
from batchgen.cli import main
from batchgen.data.s3 import S3FileSystem

UPLOADS = {"put_object", "delete_object"}


class Fate:
    """Counts what the run does to the disk or the store, and kills it at one of these events."""

    def __init__(self, order: dict[str, Any], tally: str) -> None:
        self.event = order.get("event")
        self.when = order.get("when", "before")
        self.signal = order.get("signal", signal.SIGKILL)
        self.tally = tally
        self.count = 0
        self.guard = threading.Lock()

    def begin(self) -> bool:
        """Count one event; whether this is the one."""
        with self.guard:
            self.count += 1
            with open(self.tally, "w") as file:
                file.write(str(self.count))
            return self.count == self.event

    def strike(self) -> None:
        os.kill(os.getpid(), self.signal)

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function as an event: the kill comes before or after it."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            chosen = self.begin()
            if chosen and self.when != "after":
                self.strike()
            result = function(*arguments, **options)
            if chosen and self.when == "after":
                self.strike()
            return result

        return wrapped


class TornFile:
    """A file for writing, each write an event: the kill may come when half of it is on the disk."""

    def __init__(self, file: io.BufferedWriter, fate: Fate) -> None:
        self._file = file
        self._fate = fate

    def write(self, content: Any) -> int:
        chosen = self._fate.begin()
        if chosen and self._fate.when == "before":
            self._fate.strike()
        if chosen and self._fate.when == "half":
            self._file.write(bytes(content)[: len(content) // 2])
            self._file.flush()
            self._fate.strike()
            self._file.write(bytes(content)[len(content) // 2 :])
        else:
            self._file.write(content)
        if chosen and self._fate.when == "after":
            self._file.flush()
            self._fate.strike()
        return len(content)

    def __enter__(self) -> "TornFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def arrange(fate: Fate) -> None:
    """Make every write, sync, rename, removal and upload of this process an event."""
    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, fate.wrap(getattr(os, name)))
    open_path = Path.open

    def open_torn(self: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = open_path(self, mode, *arguments, **options)
        return TornFile(file, fate) if mode in ("xb", "wb", "ab") else file

    Path.open = open_torn  # type: ignore[method-assign,assignment]
    call = S3FileSystem._call_s3

    async def call_counted(self: S3FileSystem, method: str, *arguments: Any, **options: Any) -> Awaitable[Any]:
        chosen = method in UPLOADS and fate.begin()
        if chosen and fate.when == "before":
            fate.strike()
        answer = await call(self, method, *arguments, **options)
        if chosen:
            fate.strike()
        return answer  # type: ignore[no-any-return]

    S3FileSystem._call_s3 = call_counted  # type: ignore[method-assign]


def run(order: dict[str, Any], tally: str) -> int:
    """Become batchgen; the exit code."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fate = Fate(order, tally)
    arrange(fate)
    if "seconds" in order:
        timer = threading.Timer(order["seconds"], fate.strike)
        timer.daemon = True
        timer.start()
    sys.argv = ["batchgen", *order["arguments"]]
    try:
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def serve() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tally = os.path.join(folder, "events")
        for line in sys.stdin:
            with open(tally, "w") as file:
                file.write("0")
            pid = os.fork()
            if pid == 0:
                code = run(json.loads(line), tally)
                sys.stderr.flush()
                os._exit(code)
            _, status = os.waitpid(pid, 0)
            with open(tally) as file:
                answer = {"ended": os.waitstatus_to_exitcode(status), "events": int(file.read() or 0)}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
