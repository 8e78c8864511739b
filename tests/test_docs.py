"""The documentation against the tree: links, the file map, every field, command and error."""

import re
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli import commands
from batchgen.errors import BatchgenError
from batchgen.job.fields import walk
from batchgen.job.load import load_job

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("jobs/*.md"), *ROOT.glob("kernels/*.md")])
NOT_IN_THE_MAP = {"__pycache__", "batchgen.egg-info", "build", "dist", "out"}


def anchor(heading: str) -> str:
    """The name that a heading has in a link, as the usual renderers make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, fragment = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} leads nowhere"
        if fragment:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            assert fragment in {anchor(heading) for heading in headings}, target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_is_finished(page: Path) -> None:
    text = page.read_text()
    assert text.startswith("# ")
    assert text.count("```") % 2 == 0
    assert not re.search(r"\b(TODO|TBD|FIXME|lorem)\b", text)


def blocks(language: str) -> list[tuple[str, str]]:
    """All code blocks of a language, with the page that each stands on."""
    found = [(page, re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)) for page in PAGES]
    return [(str(page.relative_to(ROOT)), block) for page, inside in found for block in inside]


def test_every_job_in_the_pages_is_valid(tmp_path: Path) -> None:
    jobs = [(page, block) for page, block in blocks("yaml") if block.startswith("version:")]
    assert len(jobs) >= 2
    for page, block in jobs:
        (tmp_path / "job.yaml").write_text(block)
        assert load_job(tmp_path / "job.yaml", ()).version == 1, page


def test_the_engine_example_runs(tiny_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [block for page, block in blocks("python") if page == "README.md"]
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in code
    code = code.replace("HuggingFaceTB/SmolLM2-135M-Instruct", str(tiny_llama))
    exec(code, {"token_ids": [72, 101, 108]})
    assert capsys.readouterr().out.startswith("a (")


def test_file_map_is_the_tree() -> None:
    block = README.split("## File map", 1)[1].split("```")[1]
    entries = [line.split()[0] for line in block.strip().splitlines()]
    inside = {line.split()[0] for line in block.splitlines() if line.startswith("  ")}
    shown = {entry for entry in entries if entry not in inside} | {f"batchgen/{entry}" for entry in inside}
    tree = {mapped(path) for path in ROOT.iterdir() if not path.name.startswith(".")} | {".ci/"}
    tree |= {f"batchgen/{mapped(path)}" for path in (ROOT / "batchgen").iterdir()}
    assert shown == {entry for entry in tree if entry.rstrip("/").split("/")[-1] not in NOT_IN_THE_MAP}


def mapped(path: Path) -> str:
    return path.name + "/" if path.is_dir() else path.name


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [path.relative_to(ROOT / "docs") for path in ROOT.glob("docs/**/*.md") if path.name != "README.md"]
    assert [str(page) for page in pages if f"]({page})" not in index] == []


def test_every_field_of_the_job_file_is_documented() -> None:
    page = (ROOT / "docs" / "job-file.md").read_text()
    missing = [
        ".".join(path) for path, _ in walk() if f"`{'.'.join(path)}`" not in page and f"`{path[-1]}`" not in page
    ]
    assert not missing


@pytest.mark.parametrize("name", sorted(commands.commands))
def test_every_command_is_documented_and_has_an_example(name: str) -> None:
    command = commands.commands[name]
    assert f"## batchgen {name}" in (ROOT / "docs" / "cli.md").read_text()
    assert command.help is not None
    assert f"batchgen {name}" in command.help
    assert [option.name for option in command.params if not described(option)] == []


def described(parameter: Any) -> bool:
    return parameter.param_type_name == "argument" or bool(parameter.help)


def test_every_exit_code_is_documented() -> None:
    page = (ROOT / "docs" / "cli.md").read_text()
    codes = {error.exit_code for error in all_errors(BatchgenError)}
    assert [code for code in codes if not re.search(rf"^\s*.*\b{code}  ", page, re.MULTILINE)] == []


def test_every_error_is_in_the_drawn_tree() -> None:
    import batchgen.errors

    drawing = batchgen.errors.__doc__ or ""
    for error in all_errors(BatchgenError):
        assert re.search(rf"\b{error.__name__}\s+{error.exit_code}\b", drawing) or error is BatchgenError
        assert error.__doc__


def all_errors(error: type[BatchgenError]) -> list[type[BatchgenError]]:
    return [error, *(found for child in error.__subclasses__() for found in all_errors(child))]
