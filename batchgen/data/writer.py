"""Writing beside the engine: tasks run one after the other in a thread of their own."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from batchgen.errors import StorageError

Task = Callable[[], None]
MOST_WAITING = 3


class Writer:
    """Runs tasks in the order in which they come. After one has failed no other runs; who calls next gets its error."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batchgen-writer")
        self._waiting: deque[Future[None]] = deque()
        self._failed = False
        self.told = False
        """Whether a call raised what went wrong."""

    @property
    def gave_up(self) -> bool:
        """Whether a task failed, so that no other one runs; known for certain after `stop`."""
        return self._failed

    @property
    def has_room(self) -> bool:
        """Whether a task would be taken at once."""
        return sum(not future.done() for future in list(self._waiting)) < MOST_WAITING

    def offer(self, task: Task) -> None:
        """Hand over a task without waiting, and without raising what went wrong before."""
        self._waiting.append(self._thread.submit(self._run, task))

    def submit(self, task: Task) -> None:
        """Hand over a task; wait while too many are waiting. Raises what an earlier one raised."""
        self.check()
        while len(self._waiting) >= MOST_WAITING:
            self._collect()
        self._waiting.append(self._thread.submit(self._run, task))

    def check(self) -> None:
        """Raise what a task has raised by now. Takes no time."""
        while self._waiting and self._waiting[0].done():
            self._collect()

    def drain(self) -> None:
        """Wait until all tasks are done. Raises what one of them raised."""
        while self._waiting:
            self._collect()

    def stop(self) -> None:
        """Let the running task end, and drop the others."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._waiting = deque(future for future in self._waiting if not future.cancelled())

    def _collect(self) -> None:
        self.told = self._waiting[0].exception() is not None
        self._waiting[0].result()  # one that failed stays first: its error comes again
        self._waiting.popleft()

    def _run(self, task: Task) -> None:
        if self._failed:
            raise StorageError("not written, since an earlier write failed")
        self._failed = True
        task()
        self._failed = False
