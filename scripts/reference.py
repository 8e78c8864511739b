"""Writes what is made from the code: schemas/*.json, docs/job-file.md and docs/cli.md. `--check` only compares.

Text of people stays: only what lies between the two marks of a page is replaced.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from click.testing import CliRunner
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from batchgen.cli import commands
from batchgen.data.manifest import manifest_schema
from batchgen.job.fields import describe, section_of
from batchgen.job.schema import job_schema
from batchgen.job.section import Section
from batchgen.job.spec import Job

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made by scripts/reference.py: begin -->", "<!-- end -->"


def job_reference() -> str:
    """One table for the top of the file and one for each section in it."""
    sections = [name for name, field in Job.model_fields.items() if is_section(field)]
    tops = [name for name in Job.model_fields if name not in sections]
    parts = ["## Top of the file\n", table((name, Job.model_fields[name], (name,)) for name in tops)]
    for name in sections:
        section = section_of(Job.model_fields[name].annotation)
        assert section is not None
        assert section.__doc__
        rows = ((field, info, (name, field)) for field, info in section.model_fields.items())
        parts += [f"## `{name}`\n", " ".join(section.__doc__.split()) + "\n", table(rows)]
    return "\n".join(parts)


def is_section(field: FieldInfo) -> bool:
    """Whether a field of the job is a section."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def table(rows: Iterator[tuple[str, FieldInfo, tuple[str, ...]]]) -> str:
    """Field, what to write, default, meaning."""
    lines = ["| field | write | default | meaning |", "|---|---|---|---|"]
    for name, field, path in rows:
        lines.append(f"| `{name}` | {describe(path)} | {default(field)} | {field.description} |")
    return "\n".join(lines) + "\n"


def default(field: FieldInfo) -> str:
    """The default as the file would have it."""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default in ([], {}):
        return ""
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def cli_reference() -> str:
    """The help text of batchgen and of each command."""
    parts = [f"```text\n{help_of()}```\n"]
    parts += [f"## batchgen {name}\n\n```text\n{help_of(name)}```\n" for name in commands.commands]
    return "\n".join(parts)


def help_of(*words: str) -> str:
    """What `batchgen ... --help` prints."""
    done = CliRunner().invoke(commands, [*words, "--help"], prog_name="batchgen", terminal_width=100)
    return done.output


def between_marks(page: Path, text: str) -> str:
    """The page with the text between its marks."""
    pattern = f"{re.escape(BEGIN)}.*?{re.escape(END)}"
    return re.sub(pattern, lambda _: f"{BEGIN}\n\n{text}\n{END}", page.read_text(), flags=re.DOTALL)


def main() -> int:
    """Write all, or say what is out of date."""
    made = {
        "schemas/job.schema.json": job_schema(),
        "schemas/manifest.schema.json": manifest_schema(),
        "docs/job-file.md": between_marks(ROOT / "docs/job-file.md", job_reference()),
        "docs/cli.md": between_marks(ROOT / "docs/cli.md", cli_reference()),
    }
    stale = [name for name, text in made.items() if (ROOT / name).read_text() != text]
    if "--check" in sys.argv[1:]:
        if stale:
            print(f"out of date: {', '.join(stale)}; run python scripts/reference.py")
        return len(stale)
    for name in stale:
        (ROOT / name).write_text(made[name])
    print(f"written: {', '.join(stale) or 'nothing new'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
