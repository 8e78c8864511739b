"""Ends a job early when its rows fail one like the other: then the job file is wrong, not the rows."""

from batchgen.errors import JobFileError, RowError
from batchgen.prompts.builder import PromptResult

NUM_ROWS = 100


class FirstRows:
    """Watches the first rows of a job."""

    def __init__(self, num_rows: int = NUM_ROWS) -> None:
        self._num_rows = num_rows
        self._num_seen = 0
        self._error: RowError | None = None

    def watch(self, result: PromptResult) -> None:
        """Take the next row's prompt. Raises JobFileError when all of the first rows had the same error."""
        if self._num_seen >= self._num_rows:
            return
        if result.error is None or (self._num_seen and result.error != self._error):
            self._num_seen = self._num_rows  # rows differ: nothing more to watch
            return
        self._error = result.error
        self._num_seen += 1
        if self._num_seen == self._num_rows:
            raise JobFileError(
                f"each of the first {self._num_rows} rows failed in the same way ({self._error.kind}): "
                f"{self._error.message}"
            )
