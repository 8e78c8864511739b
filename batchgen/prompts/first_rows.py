"""Ends a job early when its rows fail one like the other: then the job file is wrong, not the rows."""

from collections.abc import Iterable, Iterator

from batchgen.errors import JobFileError, RowError
from batchgen.prompts.builder import PromptResult

NUM_ROWS = 100


def watch_first_rows(prompts: Iterable[PromptResult], num_rows: int = NUM_ROWS) -> Iterator[PromptResult]:
    """Pass prompts on. Raises JobFileError when each of the first `num_rows` had the same error."""
    source = iter(prompts)
    first: RowError | None = None
    for number, prompt in enumerate(source, 1):
        if prompt.error is None or first not in (None, prompt.error):
            yield prompt
            break
        first = prompt.error
        if number == num_rows:
            raise JobFileError(
                f"each of the first {num_rows} rows failed in the same way ({first.kind}): {first.message}"
            )
        yield prompt
    yield from source
