"""Ends a job early when its rows fail one like the other: then the job file is wrong, not the rows."""

from collections.abc import Generator, Iterable

from batchgen.errors import JobFileError
from batchgen.prompts.builder import PromptResult

NUM_ROWS = 100


def watch_first_rows(prompts: Iterable[PromptResult], num_rows: int = NUM_ROWS) -> Generator[PromptResult]:
    """Pass prompts on. Raises JobFileError, with none of them passed on, when the first `num_rows` had one error."""
    source = iter(prompts)
    held: list[PromptResult] = []
    for prompt in source:
        held.append(prompt)
        error = held[0].error
        if error is None or prompt.error != error:
            break
        if len(held) == num_rows:
            raise JobFileError(
                f"each of the first {num_rows} rows failed in the same way ({error.kind}): {error.message}"
            )
    yield from held
    yield from source
