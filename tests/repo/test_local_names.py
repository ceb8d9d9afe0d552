"""Local names that say nothing of their value: how many there are.

A local name has the noun of its type or its role. Participles are for booleans (`is_open`).
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repo.test_house_rules import MODULES, PRODUCT, ROOT

EMPTY_WORDS = (
    "found each one held at where known kept gone given taken more who what some asked done seen "
    "left before after others made wanted twice opened answered owned young said rest"
)
EMPTY = frozenset(EMPTY_WORDS.split())
PRODUCT_PART_MAX, TESTS_PART_MAX = 0.001, 0.013
Function = ast.FunctionDef | ast.AsyncFunctionDef


class LocalName(NamedTuple):
    """A parameter or a variable of a function, by file and line of the function."""

    path: Path
    line: int
    function: str
    name: str


def local_names(path: Path, source: str) -> Iterator[LocalName]:
    """Iterate over the names that each function binds, each once for a function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Function):
            for name in sorted(_bound(node)):
                yield LocalName(path, node.lineno, node.name, name)


def _bound(function: Function) -> set[str]:
    """Return the names that a function binds itself, with its lambdas and comprehensions."""
    names = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    nodes: list[ast.AST] = list(function.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name:
            names.add(node.name)
        nodes += ast.iter_child_nodes(node)
    return names - {"self", "cls"}


def test_bound_names_are_counted() -> None:
    source = """
async def f(self, at, *, given=1):
    def g(kept): pass
    with x as one, y as (held, _):
        found: int = [each for each in z if (where := each)]
    match z:
        case gone: pass
    try: taken.known = lambda thing: 0
    except E as data: pass
"""
    names = [name for *_, name in local_names(Path("m.py"), source)]
    expected = "_ at data each found given gone held one thing where"
    assert names == [*expected.split(), "kept"]


@pytest.mark.parametrize(
    ("folders", "part_max"), [(PRODUCT, PRODUCT_PART_MAX), (("tests",), TESTS_PART_MAX)]
)
def test_local_names_say_what_they_hold(folders: tuple[str, ...], part_max: float) -> None:
    names = [
        name
        for path in MODULES
        if path.parts[0] in folders
        for name in local_names(path, (ROOT / path).read_text("utf-8"))
    ]
    empty = [name for name in names if name.name in EMPTY]
    assert len(names) > 5000, "the functions are not found"
    assert len(empty) <= part_max * len(names), "\n".join(
        f"{path}:{line} {function}: {name}" for path, line, function, name in empty
    )
