"""The command line: each command reads its options and calls one function of the library."""

import json
import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import click

from batchgen.endings import ending_of

if TYPE_CHECKING:
    from batchgen.runner import Preview

_LOG_JSON = "log-json"


class _ExitCodes:
    """A context that ends the program with an error's last words and exit code."""

    def __init__(self, ctx: click.Context) -> None:
        self._ctx = ctx

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        as_json = self._ctx.obj == _LOG_JSON
        match error:
            case click.ClickException() if as_json:
                message, code = f"batchgen: error: {error.format_message()}", error.exit_code
            case None | click.ClickException() | click.exceptions.Exit() | SystemExit() | BrokenPipeError():
                return
            case _:
                message, code = ending_of(error)
        if as_json:
            from batchgen.observe.progress import ending_line

            message = ending_line(message, code)
        click.echo(message, err=True)
        raise click.exceptions.Exit(code) from None


class _Commands(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        ctx.obj = _LOG_JSON if "--log-json" in ctx.args else None  # before the command reads them: it may refuse
        with _ExitCodes(ctx):
            return super().invoke(ctx)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="batchgen", message="%(prog)s %(version)s")
def commands() -> None:
    """Generate a column of text for every row of a table, with an open-weights model.

    \b
    Exit codes:
       0  every row is ok            5  the model or the engine failed
       2  the job file is wrong     10  finished, but more rows failed than allowed
       3  the input is unreadable   70  a fault in batchgen itself
       4  the output is unwritable  75  stopped on purpose: run it again to go on
    """


def _settings(command: Callable[..., None]) -> Callable[..., None]:
    option = click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="FIELD=VALUE",
        help="Override a field of the job file: generate.max_tokens=8. Repeatable.",
    )
    return option(command)


@commands.command()
@click.argument("job")
@_settings
@click.option("--quiet", "-q", is_flag=True, help="Show neither progress nor summary.")
@click.option("--log-json", is_flag=True, help="Each line on stderr is a JSON object: progress, messages and errors.")
@click.option("--fresh", is_flag=True, help="Start in an empty output folder only, and never go on with another run.")
@click.option("--extend", is_flag=True, help="The input has new files, sorted after the others: run their rows.")
@click.option("--retry-failed", is_flag=True, help="Run the rows with status error or invalid once more.")
@click.option(
    "--takeover", is_flag=True, help="Take the output from a run that holds it: that one writes nothing more."
)
@click.option(
    "--grace",
    type=click.FloatRange(min=0, min_open=True),
    default=25.0,
    show_default=True,
    metavar="SECONDS",
    help="After SIGTERM, end within so many seconds.",
)
def run(job: str, settings: tuple[str, ...], quiet: bool, log_json: bool, grace: float, **resume: bool) -> None:
    """Run a job. Run it again to go on where it stopped; a finished job does nothing.

    \b
    Example:
      batchgen run job.yaml --set input.limit=100 --set output.path=/tmp/try
    """
    from batchgen import env
    from batchgen.data.resume import Resume

    if log_json:
        env.let_libraries_show_no_bars()
    from batchgen.runner import run_job
    from batchgen.validation import load_checked

    checked = load_checked(job, settings)
    run_job(checked.job, quiet=quiet, log_json=log_json, resume=Resume(**resume), grace=grace)


@commands.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...")
@_settings
@click.option(
    "--input", "check_input", is_flag=True, help="Open the input too, and look for the columns that are used."
)
def validate(jobs: tuple[str, ...], settings: tuple[str, ...], check_input: bool) -> None:
    """Check job files without loading a model: fields, templates, and the files they name.

    \b
    Example:
      batchgen validate jobs/*.yaml
    """
    from batchgen.validation import validate_files

    for name, checked in zip(jobs, validate_files(jobs, settings, check_input=check_input), strict=True):
        click.echo(f"{name}: ok" + "".join(f"\n  not on this machine: {path}" for path in checked.absent))


@commands.command()
@click.argument("job")
@_settings
@click.option("--rows", "first", type=click.IntRange(min=1), default=3, show_default=True, help="Show the first rows.")
@click.option("--row", "rows", type=click.IntRange(min=0), multiple=True, help="Show this row instead, counted from 0.")
@click.option("--no-generate", is_flag=True, help="Show prompts only, without answers.")
def preview(job: str, settings: tuple[str, ...], first: int, rows: tuple[int, ...], no_generate: bool) -> None:
    """Show the prompt, its length and the answer of a few rows. Writes no output.

    \b
    Example:
      batchgen preview job.yaml --row 17 --no-generate
    """
    from batchgen.runner import preview_job
    from batchgen.validation import load_checked

    chosen = list(rows) or None
    for shown in preview_job(load_checked(job, settings).job, rows=chosen, first=first, generate=not no_generate):
        click.echo(_show(shown))


def _show(preview: "Preview") -> str:
    lines = [f"row {preview.row} ({preview.place}), {len(preview.token_ids or ()):,} tokens"]
    lines += ["prompt:", preview.text] if preview.text else []
    lines += ["choices:", *preview.choices] if preview.choices else []
    lines += [f"{preview.error.kind}: {preview.error.message}"] if preview.error else []
    lines += ["answer:", preview.output] if preview.output is not None else []
    return "\n".join(lines) + "\n"


@commands.command()
@click.argument("job")
@_settings
@click.option("--machine", type=click.Choice(["h200"]), help="Plan for a GPU that is not here.")
@click.option("--pilot", type=click.IntRange(min=0), default=0, metavar="N", help="Run N rows to estimate the time.")
@click.option("--groups", type=click.IntRange(min=0), default=5, show_default=True, help="Show this many groups.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(job: str, settings: tuple[str, ...], machine: str | None, pilot: int, groups: int, as_json: bool) -> None:
    """Say what a job will compute: rows, tokens, what they share, memory and time. Needs no GPU, writes nothing.

    \b
    Example:
      batchgen plan job.yaml --pilot 32
    """
    from batchgen.forecast.forecast import forecast_job
    from batchgen.validation import load_checked

    forecast = forecast_job(load_checked(job, settings).job, machine=machine, pilot=pilot, num_groups=groups)
    click.echo(json.dumps(forecast.to_json(), indent=2) if as_json else forecast.summary())


@commands.command()
@click.argument("name", default="job")
def schema(name: str) -> None:
    """Print a JSON Schema: the job file's, or the one named.

    \b
    Example:
      batchgen schema > job.schema.json
    """
    from batchgen.job.schema import read_schema

    click.echo(read_schema(name), nl=False)


@commands.command()
@click.option(
    "--model", default="qwen-0.5b", show_default=True, metavar="GEOMETRY", help="Or llama-8b, or a config.json."
)
@click.option("--workload", "workloads", multiple=True, help="Run this one only; repeatable. All of them without it.")
@click.option("--scale", default=1.0, show_default=True, help="Multiply the rows.")
@click.option("--engine", "options", multiple=True, metavar="FIELD=VALUE", help="A field of EngineConfig. Repeatable.")
@click.option(
    "--order",
    type=click.Choice(["planned", "file"]),
    default="planned",
    show_default=True,
    help="Rows as `batchgen run` orders them, or as the workload has them.",
)
@click.option("--peer", type=click.Choice(["vllm"]), help="Run this one too, in a process of its own.")
@click.option("--peer-options", default="{}", metavar="JSON", help="Arguments of the peer's engine.")
@click.option("--peer-sorted", is_flag=True, help="Give the peer its prompts in the planned order too.")
@click.option(
    "--peer-path", type=click.Path(exists=True), help="Folder with the peer's packages, for its process alone."
)
@click.option(
    "--peer-limit", default=600.0, show_default=True, metavar="SECONDS", help="For its start, and for each workload."
)
@click.option("--out", type=click.Path(dir_okay=False), help="Append one JSON line per result to this file.")
def bench(workloads: tuple[str, ...], options: tuple[str, ...], out: str | None, **settings: Any) -> None:
    """Run the standard workloads with random weights, and show how fast they were.

    One more, `schema`, answers under a JSON schema, and then draws as many tokens without it.

    \b
    Example:
      batchgen bench --model llama-8b --workload chat --workload even
    """
    from batchgen.bench.result import table
    from batchgen.bench.run import make_bench, run_bench

    for line in table(run_bench(make_bench(workloads, options, **settings), out)):
        click.echo(line)


@commands.command()
@click.argument("output")
def status(output: str) -> None:
    """Show how far the job in an output folder is, from any process or machine that can read it.

    \b
    Example:
      batchgen status s3://bucket/labels
    """
    from batchgen.data.status import describe, job_status

    click.echo(describe(job_status(output)))


@commands.command()
@click.argument("output")
@click.option("--no-input", is_flag=True, help="Leave the input alone: it may have moved or changed since.")
def verify(output: str, no_input: bool) -> None:
    """Prove an output whole: every row once and in order, every byte as it was written, the input as it was read.

    \b
    Example:
      batchgen verify labels/ && rm -r reviews/
    """
    from batchgen.data.verify import verify_output

    verified = verify_output(output, with_input=not no_input)
    click.echo(f"{output}: whole, {verified.num_rows:,} rows in {verified.num_parts:,} parts")


@commands.command()
@click.argument("output")
@click.option("--rows", "most", type=click.IntRange(min=1), default=20, show_default=True, help="Row numbers per kind.")
def errors(output: str, most: int) -> None:
    """List the rows of an output that failed, by kind of error, with the first message of each.

    \b
    Example:
      batchgen errors labels/ --rows 100
    """
    from batchgen.data.verify import describe_failures, failed_rows

    click.echo(describe_failures(failed_rows(output), most))


def main() -> None:
    """The console script."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup`
            signal.signal(number, _interrupt)
    commands(prog_name="batchgen")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
