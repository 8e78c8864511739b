"""Another engine on the same workloads, in a process of its own: its packages never meet ours."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

from batchgen.env import with_python_path
from batchgen.errors import EngineError

MARK = "BATCHGEN-PEER "
"""What begins the lines that are meant for us. Whatever else the peer prints goes to standard error."""


def peer_messages(peer: str, options: dict[str, Any], *, path: str | None, limit: float) -> Iterator[dict[str, Any]]:
    """What the peer has to say of each of the `workloads` in its options, as it comes. Then it is ended.

    `path` is put in front of the peer's PYTHONPATH. Raises EngineError when the peer ends early, and when it takes more
    than `limit` seconds to start or for a workload.
    """
    command = [sys.executable, "-m", f"batchgen.bench.{peer}_peer", json.dumps(options)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=with_python_path(path), start_new_session=True
    ) as process:
        assert process.stdout is not None
        lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            _next_message(lines, limit, process, peer)  # it has started
            for _ in options["workloads"]:
                yield _next_message(lines, limit, process, peer)
        finally:
            _end(process)


def check_importable(peer: str, path: str | None) -> None:
    """Raise EngineError unless a process with the peer's path finds its package."""
    look = f"import sys, importlib.util; sys.exit(importlib.util.find_spec({peer!r}) is None)"
    if subprocess.run([sys.executable, "-c", look], env=with_python_path(path), check=False).returncode:
        where = f" with {path} on its path" if path else "; --peer-path names a folder that holds it"
        raise EngineError(f"--peer {peer}: no package of that name can be imported here{where}")


def _read(stream: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    for line in stream:
        if line.startswith(MARK):
            lines.put(line)
        else:
            sys.stderr.write(line)
    lines.put("")


def _next_message(
    lines: "queue.SimpleQueue[str]", limit: float, process: "subprocess.Popen[str]", peer: str
) -> dict[str, Any]:
    try:
        line = lines.get(timeout=limit)
    except queue.Empty:
        raise EngineError(f"{peer} took more than {limit:g} s and was ended: --peer-limit gives it longer") from None
    if not line:
        raise EngineError(f"{peer} ended early, with exit code {process.wait()}: its messages are above")
    message: dict[str, Any] = json.loads(line.removeprefix(MARK))
    return message


def _end(process: "subprocess.Popen[str]") -> None:
    """End the peer and whatever it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        return
