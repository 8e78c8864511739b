"""The rules of the house that no linter knows: small files, small functions, docstrings, and where things may stand."""

import ast
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted([*ROOT.glob("batchgen/**/*.py"), *ROOT.glob("kernels/**/*.py"), *ROOT.glob("schemas/*.py")])
SOURCES = [*PACKAGES, *sorted(ROOT.glob("scripts/**/*.py"))]
PYTHON = [*SOURCES, *sorted(ROOT.glob("tests/**/*.py"))]

FILE_LINES = 300
FUNCTION_LINES = 60
KERNEL_LINES = 120

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> list[Function]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, Function)]


def length(function: Function) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def is_kernel(function: Function) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def function_named(path: str, name: str) -> Function:
    return next(function for function in functions(ROOT / path) if function.name == name)


def test_the_sources_are_found() -> None:
    assert len(PACKAGES) > 30


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_file_and_its_functions_are_short(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines <= FILE_LINES
    long = {
        f"{function.name} (line {function.lineno})": length(function)
        for function in functions(path)
        if length(function) > (KERNEL_LINES if is_kernel(function) else FUNCTION_LINES)
    }
    assert not long


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_module_says_what_it_is_for(path: Path) -> None:
    assert not path.read_text().strip() or ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("path", PACKAGES, ids=name_of)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.parent.name == "observe" or path.name == "cli.py":
        return
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert not [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_no_leftovers(path: Path) -> None:
    """No banners, and no error swallowed: whoever catches everything raises it again."""
    text = path.read_text()
    assert not re.search(r"^\s*#\s*[-=*#~]{4,}", text, re.MULTILINE)
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    broad = [handler for handler in handlers if handler.type is None or ast.unparse(handler.type) == "BaseException"]
    assert not [handler.lineno for handler in broad if not isinstance(handler.body[-1], ast.Raise)]


def test_the_two_spines_read_on_one_screen() -> None:
    """One function is the life of a job, one the life of a step."""
    assert length(function_named("batchgen/runner.py", "run_job")) <= 40
    assert length(function_named("batchgen/engine/engine.py", "step")) <= 15


def test_commands_are_a_few_lines_each() -> None:
    """A command reads its options and calls the library; what it does is tested there."""
    commands = [
        f for f in functions(ROOT / "batchgen/cli.py") if any("command" in ast.unparse(d) for d in f.decorator_list)
    ]
    assert len(commands) >= 4
    assert not {command.name: length(command) for command in commands if length(command) > 25}


def test_environment_is_read_in_one_place() -> None:
    readers = [
        name_of(path)
        for path in ROOT.glob("batchgen/**/*.py")
        if re.search(r"\bos\.(environ|getenv)\b", path.read_text())
    ]
    assert set(readers) <= {"batchgen/env.py"}


def test_kernels_is_no_package() -> None:
    """With kernels/__init__.py, transformers would take the folder for the package of that name and fail to import."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    spec = find_spec("kernels")
    assert spec is None or str(ROOT) not in str(spec.submodule_search_locations)


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_no_large_or_binary_file_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    files = [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]
    large = {name_of(path): path.stat().st_size for path in files if path.stat().st_size > 300_000}
    assert not large
