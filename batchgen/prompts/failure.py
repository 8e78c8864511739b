"""How the building of one row's prompt stops: an exception inside this layer, a RowError outside of it."""

from batchgen.errors import RowError


class RowFailure(Exception):  # noqa: N818 - it fails a row, not the job
    """One row can't become a prompt. Never leaves this layer: `PromptBuilder.build` turns it into a value."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.error = RowError(kind, message)
