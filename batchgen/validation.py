"""What can be checked of a job without its model: templates, the files that it names, and the columns that it uses."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from batchgen.constrain.grammar import Grammar, named
from batchgen.errors import BatchgenError, JobFileError
from batchgen.job.load import mistakes_error, read_job
from batchgen.job.spec import Job, Truncation
from batchgen.prompts.budget import TemplateLimits
from batchgen.prompts.chat import ChatTemplate
from batchgen.prompts.chat_source import read_chat_template
from batchgen.prompts.template import RowTemplate, unknown_column


class Checked(NamedTuple):
    """A job without mistakes, and the local files that it names and that are not on this machine."""

    job: Job
    absent: tuple[str, ...]


class _Use(NamedTuple):
    """A column that a field of the job file needs."""

    field: str
    column: str


def validate_files(files: Iterable[str], overrides: Iterable[str] = (), *, check_input: bool = False) -> list[Checked]:
    """Check several job files. Raises one error that tells the mistakes of all of them."""
    settings = tuple(overrides)
    checked: list[Checked] = []
    failures: list[BatchgenError] = []
    for file in files:
        try:
            checked.append(load_checked(file, settings, check_input=check_input))
        except BatchgenError as error:
            failures.append(error)
    if len(failures) > 1:
        raise JobFileError("\n".join(str(failure) for failure in failures))
    if failures:
        raise failures[0]
    return checked


def load_checked(file: str, overrides: Iterable[str] = (), *, check_input: bool = False) -> Checked:
    """Load a job and check its templates and files; with `check_input` also that its input has the columns it uses.

    Files that are not there are no mistakes: a job may be checked far from its model and its data. Raises JobFileError
    with all mistakes, of the fields too, or InputError when the input can't be read.
    """
    job, mistakes = read_job(file, overrides)
    if job is None:
        raise mistakes_error(file, mistakes)
    uses = list(_uses(job, mistakes))
    mistakes += _chat_template_mistakes(job)
    mistakes += _grammar_mistakes(job)
    if check_input and not mistakes:
        mistakes = _columns_without_input(job, uses)
    if mistakes:
        raise mistakes_error(file, mistakes)
    return Checked(job, tuple(_absent(job)))


def _uses(job: Job, mistakes: list[str]) -> Iterator[_Use]:
    """The columns that the job needs. Templates that can't be compiled are added to `mistakes`."""
    for field, source in _templates(job):
        try:
            template = RowTemplate(source, job.where(field), _limits(job))
        except JobFileError as error:
            mistakes.append(str(error))
        else:
            yield from (_Use(field, column) for column in sorted(template.columns - template.optional))
    if isinstance(job.generate.choices, str):
        yield _Use("generate.choices", job.generate.choices)
    for name in ("messages", "tools"):
        column = getattr(job.prompt, name)
        if isinstance(column, str):
            yield _Use(f"prompt.{name}", column)
    if isinstance(job.limits.overlong, Truncation):
        yield _Use("limits.overlong.truncate.field", job.limits.overlong.truncate.field)
    if isinstance(job.output.columns, list):
        yield from (_Use(f"output.columns.{index}", column) for index, column in enumerate(job.output.columns))


def _chat_template_mistakes(job: Job) -> list[str]:
    if job.prompt.chat_template is None:
        return []
    try:
        source = read_chat_template(Path(job.prompt.chat_template))
        ChatTemplate(source.text, source.place, _limits(job))
    except JobFileError as error:
        return [f"{job.where('prompt.chat_template')}: {error}"]
    return []


def _grammar_mistakes(job: Job) -> list[str]:
    if isinstance(job.generate.json_schema, str):  # its file could not be read
        return []
    grammar = Grammar.of(job.generate)
    return (
        [f"{job.where(named(grammar.kind, found))}: {found.message}" for found in grammar.problems()] if grammar else []
    )


def _limits(job: Job) -> TemplateLimits:
    return TemplateLimits(job.limits.template_seconds, job.limits.template_chars)


def _templates(job: Job) -> Iterator[tuple[str, str]]:
    """Field and source of every template over the row's columns."""
    for name in ("text", "system", "user", "assistant"):
        source = getattr(job.prompt, name)
        if source is not None:
            yield f"prompt.{name}", source
    if job.generate.score is not None:
        yield "generate.score", job.generate.score
    for name, source in job.generate.templates.items():
        yield f"generate.{name}", source
    messages = job.prompt.messages if isinstance(job.prompt.messages, list) else []
    for index, message in enumerate(messages):
        if isinstance(message.get("content"), str):
            yield f"prompt.messages.{index}.content", message["content"]


def _columns_without_input(job: Job, uses: Iterable[_Use]) -> list[str]:
    """Mistakes: columns that no row of the input has. Raises InputError."""
    from batchgen.data.source import open_source  # pyarrow takes its time, and most checks need none
    from batchgen.data.storage import configure

    configure(**job.storage.model_dump())
    source = open_source(job.input, base=job.folder, columns=None)
    missing = [use for use in uses if not source.has_column(use.column)]
    return [f"{job.where(use.field)}: {unknown_column(use.column, sorted(source.columns))}" for use in missing]


def _absent(job: Job) -> Iterator[str]:
    """Local files and folders that the job names and that are not there."""
    paths = [job.input.path] if isinstance(job.input.path, str) else job.input.path
    plain = [path for path in paths if not any(character in path for character in "*?[")]
    for path in [job.model, job.tokenizer, *plain]:
        if path is not None and os.path.isabs(path) and not os.path.exists(path):
            yield path
