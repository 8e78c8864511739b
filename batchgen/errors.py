"""The errors that end a job, and the error that ends one row.

BatchgenError            something the user should read; carries an exit code
├── JobFileError      2  the job file, or something it names, is wrong
├── InputError        3  the input can't be read
├── StorageError      4  the output can't be read or written
│   └── LockedError   4  another run holds the output folder
├── EngineError       5  the model can't be loaded, or the engine can't go on
├── InternalError    70  batchgen broke a promise of its own: please report it
├── TooManyBadRows   10  the job finished, but more rows than allowed are not ok
└── Stopped          75  the job stopped on purpose; run it again to resume

A bad row is no error of this tree: it is a RowError, a value that travels with the row into its output row.
"""

from typing import NamedTuple


class RowError(NamedTuple):
    """Why one row has no answer. `kind` is one of the documented words (docs/output.md), `message` is for people."""

    kind: str
    message: str


class BatchgenError(Exception):
    """Something the user should read. The message says what happened, where, and what to do."""

    exit_code = 70


class JobFileError(BatchgenError):
    """The job file, or something that it names, is wrong."""

    exit_code = 2


class InputError(BatchgenError):
    """The input can't be read."""

    exit_code = 3


class StorageError(BatchgenError):
    """The output can't be read or written."""

    exit_code = 4


class LockedError(StorageError):
    """Another run holds the output folder."""


class EngineError(BatchgenError):
    """The model can't be loaded, or the engine can't go on."""

    exit_code = 5


class InternalError(BatchgenError):
    """batchgen broke a promise of its own: please report it."""


class TooManyBadRows(BatchgenError):  # noqa: N818 - an outcome, named as the exit code table names it
    """The job finished, but more rows than `limits.failed_rows` allows are not ok."""

    exit_code = 10


class Stopped(BatchgenError):  # noqa: N818
    """The job stopped on purpose; run it again to resume."""

    exit_code = 75
