"""The lock of an output folder: one run at a time, and a dead run never keeps the next one out.

The lock is a file that names its holder. Locally every look at it and change of it happens under flock, so that of two
runs that start at once, or take over at once, exactly one wins. Elsewhere a claim is written and read back.
"""

import fcntl
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import fsspec

from batchgen.data.process import host_id, is_running, start_of
from batchgen.data.storage import errors_as, filesystem, is_local, join, redact
from batchgen.errors import BatchgenError, LockedError, StorageError

log = logging.getLogger(__name__)

LOCK_NAME = ".batchgen.lock"
HEARTBEAT_S = 5.0
STALE_S = 60.0
"""A holder silent for so long is taken for dead. On the holder's own host a dead one is known at once."""

_FLOCK_S = 20.0
_LOOK_S = 1.0  # between two looks at a holder on another machine that gives no sign of life


@dataclass(frozen=True, slots=True)
class Claim:
    """Who holds the lock. `host_id` tells machines, boots and process namespaces apart; `heartbeat` is Unix time."""

    token: str
    host: str
    host_id: str
    pid: int
    process_start: int | None
    started: str
    heartbeat: float

    @classmethod
    def new(cls) -> "Claim":
        """A claim of this process."""
        return cls(
            token=uuid.uuid4().hex,
            host=socket.gethostname(),
            host_id=host_id(),
            pid=os.getpid(),
            process_start=start_of(os.getpid()),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            heartbeat=time.time(),
        )

    def is_dead(self) -> bool:
        """Whether the holder is gone, or silent for so long that it counts as gone."""
        if self.host_id == host_id() and not is_running(self.pid, self.process_start):
            return True
        return time.time() - self.heartbeat > STALE_S


Decide = Callable[[Claim | None], Claim | None]


class ClaimFile(Protocol):
    """Where the claim lies."""

    def read(self) -> Claim | None:
        """The claim that holds now."""

    def change(self, decide: Decide, *, create: bool = False) -> None:
        """Replace the claim by what `decide` makes of it; None removes it. Nothing changes when `decide` raises.

        Without `create`, a missing file stays missing: `decide` gets None, and has to raise.
        """


class OutputLock:
    """The lock of one output folder, held by this process until `release`."""

    def __init__(self, file: ClaimFile, claim: Claim, url: str) -> None:
        self._file = file
        self._claim = claim
        self._url = redact(url)
        self._released = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="batchgen-lock-heartbeat", daemon=True)
        self._heart.start()

    @classmethod
    def acquire(cls, url: str, *, takeover: bool = False) -> "OutputLock":
        """Take the lock of the folder `url`, which exists; with `takeover` from a living holder too.

        A holder on another machine is looked at until it gives a sign of life, which it does every few seconds, or has
        been silent for STALE_S. Raises LockedError, naming the holder, or StorageError.
        """
        fs, path = filesystem(join(url, LOCK_NAME))
        file = _claim_file(fs, path)
        claim = Claim.new()
        taken_from: list[Claim] = []
        seen: list[Claim] = []

        def take(holder: Claim | None) -> Claim:
            alive = holder is not None and not holder.is_dead()
            if holder is not None and alive and not takeover:
                seen.append(holder)
                raise LockedError(
                    f"{redact(url)} is in use: process {holder.pid} on {holder.host} has been writing to it since "
                    f"{holder.started}. Wait for it to end, or stop it, and run again; or take it with --takeover."
                )
            taken_from[:] = [holder] if holder is not None and alive else []
            return replace(claim, heartbeat=time.time())

        while True:
            try:
                file.change(take, create=True)
                break
            except LockedError:
                if not seen or seen[-1].host_id == host_id() or seen[0] != seen[-1]:
                    raise
                if len(seen) == 1:
                    log.warning(
                        "%s is held by process %d on %s: waiting for up to %d s to see whether it is alive",
                        *(redact(url), seen[0].pid, seen[0].host, STALE_S),
                    )
                time.sleep(_LOOK_S)
        holder = file.read()
        if holder is None or holder.token != claim.token:
            raise LockedError(f"{redact(url)} was taken by another run at the same moment. Wait for it, and run again.")
        for former in taken_from:
            log.warning(
                "%s was taken over from process %d on %s, which wrote to it since %s: it ends at its next write",
                *(redact(url), former.pid, former.host, former.started),
            )
        return cls(file, claim, url)

    @staticmethod
    def holder(url: str) -> str | None:
        """Who holds the lock of a folder, None when nobody who is alive."""
        claim = _claim_file(*filesystem(join(url, LOCK_NAME))).read()
        return None if claim is None or claim.is_dead() else f"process {claim.pid} on {claim.host}"

    @staticmethod
    def sweep(url: str) -> bool:
        """Remove the lock of a dead run, when nobody needs it any more. Whether nobody holds the folder now."""

        def remove(holder: Claim | None) -> None:
            if holder is None or not holder.is_dead():
                raise LockedError("in use")

        with suppress(StorageError):
            _claim_file(*filesystem(join(url, LOCK_NAME))).change(remove)
        return OutputLock.holder(url) is None

    def check(self) -> None:
        """Raise LockedError when this process does not hold the lock any more."""
        self._still_ours(self._file.read())

    def release(self) -> None:
        """Give the lock back. One that was lost meanwhile stays with its new holder."""
        self._released.set()
        self._heart.join()
        with suppress(StorageError):  # the lock is then stale: the next run takes it over
            self._file.change(lambda holder: None if self._still_ours(holder) else holder)

    def _still_ours(self, holder: Claim | None) -> Claim:
        if holder is None or holder.token != self._claim.token:
            now = "is gone" if holder is None else f"was taken over by process {holder.pid} on {holder.host}"
            raise LockedError(
                f"{self._url}: the lock of this run {now}, so this run writes nothing more. "
                "It was paused or cut off for too long, or the folder was changed by hand or by --takeover. "
                "Run it again to resume."
            )
        return holder

    def _beat(self) -> None:
        while not self._released.wait(HEARTBEAT_S):
            # Trouble here shows at the next write, which has someone to tell.
            with suppress(BatchgenError):
                self._file.change(lambda holder: replace(self._still_ours(holder), heartbeat=time.time()))


class _LocalClaim:
    """The claim as a local file. Its heartbeat is the file's time of change, which a full disk can't stop."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Claim | None:
        path = str(self._path)
        with errors_as(StorageError, path), suppress(FileNotFoundError), self._guarded(create=False) as handle:
            return self._claim_in(handle)
        return None

    def change(self, decide: Decide, *, create: bool = False) -> None:
        try:
            with errors_as(StorageError, str(self._path)), self._guarded(create=create) as handle:
                self._change(handle, decide)
        except StorageError as error:
            if not create and isinstance(error.__cause__, FileNotFoundError):
                decide(None)
            raise

    def _change(self, handle: int, decide: Decide) -> None:
        old = self._claim_in(handle)
        new = decide(old)
        if new is None:
            self._path.unlink()
        elif old is None or new.token != old.token:
            content = json.dumps(asdict(new)).encode()
            try:
                os.pwrite(handle, content, 0)
                os.ftruncate(handle, len(content))
                os.fsync(handle)
            except OSError:  # nobody holds it: neither this run, which ends now, nor the old holder, which is dead
                self._path.unlink()
                raise
        else:
            os.utime(handle, (new.heartbeat, new.heartbeat))

    @contextmanager
    def _guarded(self, *, create: bool) -> Iterator[int]:
        """The open file, with nobody else looking at it until the end."""
        while True:
            handle = os.open(self._path, os.O_RDWR | (os.O_CREAT if create else 0), 0o644)
            try:
                _flock(handle, self._path)
                if self._is_current(handle):
                    yield handle
                    return
            finally:
                os.close(handle)

    def _is_current(self, handle: int) -> bool:
        """Whether the path still means this file: another run may have removed it while we waited for flock."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        return False

    def _claim_in(self, handle: int) -> Claim | None:
        status = os.fstat(handle)
        claim = parse_claim(os.pread(handle, status.st_size, 0))
        return None if claim is None else replace(claim, heartbeat=status.st_mtime)


def _claim_file(fs: fsspec.AbstractFileSystem, path: str) -> ClaimFile:
    if is_local(fs):
        return _LocalClaim(Path(path))
    if "s3" in fs.protocol:
        from batchgen.data.s3_claim import S3Claim  # loads s3fs, which is slow

        return S3Claim(fs, path)
    from batchgen.data.remote_claim import RemoteClaim

    return RemoteClaim(fs, path)


def parse_claim(content: bytes) -> Claim | None:
    """The claim in a lock file; None for a torn one, whose writer died before it held anything."""
    try:
        return Claim(**json.loads(content))
    except (ValueError, TypeError):
        return None


def _flock(handle: int, path: Path) -> None:
    """Wait until nobody else looks at the lock file, which takes microseconds unless one was stopped in the middle."""
    deadline = time.monotonic() + _FLOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                claim = parse_claim(os.pread(handle, os.fstat(handle).st_size, 0))
                holder = "a process" if claim is None else f"process {claim.pid} on {claim.host}"
                raise LockedError(
                    f"{path} is held by {holder}, which seems to be stopped. End that process, and run again."
                ) from None
            time.sleep(0.005)
        except OSError:
            return  # some network file systems have no flock: the claim is only read back, like a remote one
