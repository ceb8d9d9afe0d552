"""Every invariant of the design is cited by tests that would fail without it."""

import ast
import functools
import re
from collections import defaultdict
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "storage" / "docs" / "design" / "10-invariants.md"
INVARIANTS = list(dict.fromkeys(re.findall(r"^\| (I\d+) \|", PAGE.read_text(), re.MULTILINE)))
TO = re.compile(r"\bI(\d+) to I(\d+)\b")


@functools.cache
def cited() -> dict[str, list[str]]:
    """By invariant, the tests whose name or docstring cites it."""
    tests = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_test and node.name.startswith("test_"):
                for invariant in of_test(node.name, ast.get_docstring(node) or ""):
                    tests[invariant].append(f"{path.relative_to(TESTS)}::{node.name}")
    return tests


def of_test(name: str, docstring: str) -> set[str]:
    ranges = [(int(first), int(last)) for first, last in TO.findall(docstring)]
    ranges += [(int(a), int(b)) for a, b in re.findall(r"_i(\d+)_to_i(\d+)_", name)]
    invariants = {f"I{number}" for first, last in ranges for number in range(first, last + 1)}
    invariants |= set(re.findall(r"\bI\d+\b", docstring))
    return invariants | {f"I{number}" for number in re.findall(r"(?<=_i)\d+(?=_)", name)}


def test_the_list_is_read() -> None:
    assert [f"I{number}" for number in range(1, 13)] == INVARIANTS
    assert of_test("test_i1_to_i3_hold", "I7 too") == {"I1", "I2", "I3", "I7"}
    assert of_test("test_i10_i4_x", "") == {"I10", "I4"}


@pytest.mark.parametrize("invariant", INVARIANTS)
def test_an_invariant_is_cited_by_tests(invariant: str) -> None:
    print(invariant, *cited()[invariant], sep="\n    ")
    assert len(cited()[invariant]) > 1, f"no test cites {invariant}"


def test_nothing_else_is_cited() -> None:
    assert cited().keys() <= set(INVARIANTS)
