"""How a command ends: the last words and the exit code for every error."""

import traceback
from typing import NamedTuple

from batchgen.errors import BatchgenError, InternalError, Stopped

_REPORT = "This is a fault in batchgen itself. Please report it, with everything above and the job file."


class Ending(NamedTuple):
    """What is shown last, and the exit code."""

    message: str
    exit_code: int


def ending_of(error: BaseException) -> Ending:
    """How an error ends the program. Unexpected ones show their traceback."""
    match error:
        case InternalError():
            return Ending(f"batchgen: error: {error}\n{_REPORT}", error.exit_code)
        case Stopped():
            return Ending(f"batchgen: {error}", error.exit_code)
        case BatchgenError():
            return Ending(f"batchgen: error: {error}", error.exit_code)
        case KeyboardInterrupt():
            return Ending("batchgen: stopped; run the same command again to go on", Stopped.exit_code)
    return Ending("".join(traceback.format_exception(error)) + _REPORT, InternalError.exit_code)
