"""The tree itself: the house rules that no linter checks.

What is looked at is what a commit would hold: files that are tracked, or not yet added and not
ignored. Outside of a git checkout (an unpacked archive) it is every file but obvious leftovers.
"""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOP_LEVEL = {
    "LICENSE",
    "Makefile",
    "README.md",
    "compaction",
    "deploy",
    "pyproject.toml",
    "service",
    "storage",
    "terraform",
    "tests",
}
"""Besides these, only dotfiles and `.ci`."""

LEFTOVERS = {"__pycache__", "build", "data", "dist", "spark-warehouse", "tidelog-data"}
DOT_DIRECTORIES = {".ci", ".github"}

PACKAGES = ("storage", "service", "compaction")
PYTHON_LINES_MAX = 500
EMPTY_WORDS = {"base", "common", "handler", "helper", "manager", "util"}
"""Names that say nothing of what is inside, in singular."""

UNFINISHED = re.compile(rb"\b(TO" rb"DO|FIX" rb"ME)\b")
MOCKS = re.compile(r"^\s*(from unittest(\.mock)? import .*|import unittest\.mock.*)$", re.MULTILINE)


def tree() -> list[Path]:
    """Paths of files, relative to the root, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        found = [Path(name) for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if not _is_leftover(path)]
    return sorted(path for path in found if (ROOT / path).is_file())


def _is_leftover(path: Path) -> bool:
    directories = path.relative_to(ROOT).parts[:-1]
    return any(
        name in LEFTOVERS
        or name.endswith(".egg-info")
        or (name.startswith(".") and name not in DOT_DIRECTORIES)
        for name in directories
    )


TREE = tree()
MODULES = [path for path in TREE if path.suffix == ".py"]
BROWSER_FILES = [
    path for path in TREE if path.parts[:2] == ("service", "ui") and path.parts[2] != "vendor"
]
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function")


def as_parameter(path: Path) -> str:
    return path.as_posix()


def test_the_top_level_holds_only_what_was_agreed() -> None:
    entries = {path.parts[0] for path in TREE}
    assert {name for name in entries if not name.startswith(".")} <= TOP_LEVEL


def test_the_tree_is_found() -> None:
    # The rules below are vacuous on an empty list.
    assert Path("pyproject.toml") in TREE
    assert all(Path(package, "__init__.py") in MODULES for package in PACKAGES)


@pytest.mark.parametrize("path", MODULES, ids=as_parameter)
def test_a_module_is_short_and_says_what_it_is(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= PYTHON_LINES_MAX, f"{path} has {lines} lines: split it"
    module = ast.parse(source)
    assert ast.get_docstring(module), f"{path} does not open with a docstring"
    if path.name == "__init__.py":
        assert len(module.body) == 1, f"{path} holds more than the package's map"


@pytest.mark.parametrize("path", BROWSER_FILES, ids=as_parameter)
def test_a_file_for_browsers_is_short_and_says_what_it_is(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.count("\n") <= PYTHON_LINES_MAX, f"{path}: split it"
    assert source.startswith(("//", "/*", "<!doctype", "<svg")), f"{path} does not say what it is"
    # What users wrote is text. Whoever makes markup of a string has to change this line first.
    assert not MARKUP.search(source), f"{path} makes markup of a string"


def test_what_browsers_load_is_in_the_package() -> None:
    with open(ROOT / "pyproject.toml", "rb") as file:
        globs = tomllib.load(file)["tool"]["setuptools"]["package-data"]["service"]
    packed = {found for glob in globs for found in (ROOT / "service").glob(glob) if found.is_file()}
    loaded = {path for path in TREE if path.parts[:2] == ("service", "ui")}
    assert {ROOT / path for path in loaded} <= packed


@pytest.mark.parametrize("path", MODULES, ids=as_parameter)
def test_a_name_says_what_is_inside(path: Path) -> None:
    words = {word.rstrip("s") for part in path.with_suffix("").parts for word in part.split("_")}
    assert not words & EMPTY_WORDS, f"{path}: name it for what it holds"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_of_a_package_names_its_modules(package: str) -> None:
    map_of_it = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text("utf-8")))
    assert map_of_it is not None
    modules = {path.stem for path in MODULES if path.parts[0] == package and len(path.parts) == 2}
    missing = {name for name in modules if not re.search(rf"\b{name}\b", map_of_it)}
    assert missing <= {"__init__"}, f"{package}/__init__.py does not say what these are for"


def test_nothing_is_left_for_later() -> None:
    found = [path for path in TREE if UNFINISHED.search((ROOT / path).read_bytes())]
    assert not found, "finish it, or write down the limit where its reader looks for it"


def test_tests_use_no_mocks() -> None:
    tests = [path for path in MODULES if path.parts[0] == "tests"]
    found = [path for path in tests if MOCKS.search((ROOT / path).read_text(encoding="utf-8"))]
    assert not found, "use the in-memory implementation behind the seam"
