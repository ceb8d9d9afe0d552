"""The tree itself: the house rules that no linter checks.

The rules apply to the files of a commit: tracked files, and untracked files that git does not
ignore. Outside of a git checkout (an unpacked archive) they apply to every file but leftovers.
"""

import ast
import re
import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TOP_LEVEL = {
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
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

PRODUCT = ("storage", "service", "compaction")
EMPTY_WORDS = {"base", "common", "handler", "helper", "manager", "util"}
"""Names that say nothing of what is inside, in singular."""

UNFINISHED = re.compile(rb"\b(TO" rb"DO|FIX" rb"ME)\b")
MOCKS = re.compile(r"^\s*(from unittest(\.mock)? import .*|import unittest\.mock.*)$", re.MULTILINE)


def tree() -> list[Path]:
    """Paths of files, relative to the root, sorted."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
        paths = [Path(name) for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path.relative_to(ROOT) for path in ROOT.rglob("*") if not _is_leftover(path)]
    return sorted(path for path in paths if (ROOT / path).is_file())


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
STATIC = Path("service", "console", "static")
PACKED = [path for path in TREE if path.is_relative_to(STATIC)]
BROWSER_FILES = [path for path in PACKED if not path.is_relative_to(STATIC / "vendor")]
PACKAGES = sorted(
    {path.parent for path in MODULES if path.parts[0] in PRODUCT} - {Path("storage/public")}
)
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|new Function")


def as_parameter(path: Path) -> str:
    return path.as_posix()


def test_the_top_level_holds_only_what_was_agreed() -> None:
    entries = {path.parts[0] for path in TREE}
    assert {name for name in entries if not name.startswith(".")} <= TOP_LEVEL


def test_the_tree_is_found() -> None:
    # The rules below are vacuous on an empty list.
    assert Path("pyproject.toml") in TREE
    assert BROWSER_FILES
    assert {package.parts[0] for package in PACKAGES} == set(PRODUCT)
    assert all(package / "__init__.py" in MODULES for package in PACKAGES)


def test_a_module_says_what_it_is() -> None:
    for path in MODULES:
        module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert ast.get_docstring(module), f"{path} does not open with a docstring"
        if path.name == "__init__.py":
            assert len(module.body) == 1, f"{path} holds more than the package's docstring"


@pytest.mark.parametrize("path", BROWSER_FILES, ids=as_parameter)
def test_a_file_for_browsers_says_what_it_is(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.startswith(("//", "/*", "<!doctype", "<svg")), f"{path} does not say what it is"
    # Text of users stays text. A change that makes markup of a string has to change this line.
    assert not MARKUP.search(source), f"{path} makes markup of a string"


def test_a_name_says_what_is_inside() -> None:
    for path in MODULES:
        parts = path.with_suffix("").parts
        words = {word.rstrip("s") for part in parts for word in part.split("_")}
        assert not words & EMPTY_WORDS, f"{path}: name it for what it holds"


def test_modules_import_each_other_in_no_circle() -> None:
    """import-linter checks the arrows between packages; this, those between modules."""
    names = {_import_name(path): path for path in MODULES if path.parts[0] in PRODUCT}
    arrows = {name: _imported(ROOT / path) & names.keys() - {name} for name, path in names.items()}
    order = list(TopologicalSorter(arrows).static_order())  # CycleError names the circle
    assert set(order) == set(names)


def _import_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(("tidelog", *(part for part in parts if part not in {"__init__", "public"})))


def _imported(path: Path) -> set[str]:
    """Import names in a module, of modules and of names in them."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return names


def test_nothing_is_left_for_later() -> None:
    paths = [path for path in TREE if UNFINISHED.search((ROOT / path).read_bytes())]
    assert not paths, "finish it, or write down the limit where its reader looks for it"


def test_tests_use_no_mocks() -> None:
    tests = [path for path in MODULES if path.parts[0] == "tests"]
    paths = [path for path in tests if MOCKS.search((ROOT / path).read_text(encoding="utf-8"))]
    assert not paths, "use the in-memory implementation behind the seam"
