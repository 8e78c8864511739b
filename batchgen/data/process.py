"""Which process is which: on this machine, after a reboot, and when ids come again."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def host_id() -> str:
    """This machine, boot and process namespace: where process ids mean the same."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(parts)


def start_of(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; None where /proc does not say, 0 for a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_running(pid: int, process_start: int | None) -> bool:
    """Whether the process that began at `process_start` runs: another one may have got its id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return start_of(pid) in (process_start, None)
