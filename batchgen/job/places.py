"""Where each value of a job was written, for messages that name the line and the field."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

FieldPath = tuple[str | int, ...]
OVERRIDE_LINE = 0  # the line of a value that came from --set


def dotted(path: FieldPath) -> str:
    """`generate.stop.0` for ("generate", "stop", 0)."""
    return ".".join(str(step) for step in path)


def split_dotted(name: str) -> FieldPath:
    """("generate", "stop", 0) for `generate.stop.0`."""
    return tuple(int(step) if step.isdecimal() else step for step in name.split("."))


@dataclass(frozen=True, slots=True)
class Places:
    """The job file's name and folder, and the line of each value in it (0 for a value that `--set` gave)."""

    file: str = "job"
    folder: Path = Path()
    lines: Mapping[FieldPath, int] = field(default_factory=dict)

    def line(self, path: FieldPath) -> int:
        """The line of a field, or of the nearest section around it that is written down."""
        around = (path[:depth] for depth in range(len(path), -1, -1))
        return next((self.lines[outer] for outer in around if outer in self.lines), 1)

    def where(self, path: FieldPath, line: int | None = None) -> str:
        """How a message names a field: "job.yaml:12: generate.seed", or "--set: generate.seed"."""
        line = self.line(path) if line is None else line
        place = "--set" if line == OVERRIDE_LINE else f"{self.file}:{line}"
        return f"{place}: {dotted(path)}" if path else place

    def is_override(self, path: FieldPath) -> bool:
        """Whether `--set` gave this value, a part of it, or the section around it."""
        written = (self.lines[known] for known in self.lines if known[: len(path)] == path)
        return OVERRIDE_LINE in (self.line(path), *written)
