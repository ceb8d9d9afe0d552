"""The modules that check the bytes of Kafka's clients keep no error with a traceback.

A traceback has the frames of the functions that it left, and so the bytes that they unpacked. So a
handler may return or keep its exception only as `bare(error)`.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.repo.test_house_rules import ROOT, tree

FOLDERS = ("storage/codec/", "service/kafka/")
KEEPING = {"add", "append", "appendleft", "put_nowait", "set_exception", "set_result", "setdefault"}
"""Methods that keep their argument."""

SOURCES = [path for path in tree() if path.suffix == ".py" and str(path).startswith(FOLDERS)]


def lines_that_keep(source: str) -> list[int]:
    """Return the lines of handlers that keep or return their exception as it is."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler)]
    return [
        value.lineno
        for handler in handlers
        for node in ast.walk(handler)
        for value in _values(node)
        if isinstance(value, ast.Name) and value.id == handler.name
    ]


def _values(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the values that a statement or a call keeps."""
    values: list[ast.expr] = []
    if isinstance(node, ast.Return | ast.Assign | ast.AnnAssign) and node.value is not None:
        values = [node.value]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        values = node.args if node.func.attr in KEEPING else []
    for value in values:
        yield from value.elts if isinstance(value, ast.List | ast.Tuple) else [value]


def test_an_error_that_a_handler_keeps_is_bare() -> None:
    assert len(SOURCES) > 20
    places = [
        f"{path}:{line}" for path in SOURCES for line in lines_that_keep((ROOT / path).read_text())
    ]
    assert not places, f"use bare(error) of storage.core.errors: {places}"


@pytest.mark.parametrize(
    ("statement", "is_kept"),
    [
        ("return error", True),
        ("errors.append(error)", True),
        ("errors[1] = error", True),
        ("outcome = None, error", True),
        ("return bare(error)", False),
        ("errors.append(bare(error))", False),
        ("raise", False),
        ("answer(error)", False),
    ],
)
def test_the_rule_finds_the_ways_to_keep_an_error(statement: str, is_kept: bool) -> None:
    source = f"def f():\n    try:\n        g()\n    except E as error:\n        {statement}\n"
    assert bool(lines_that_keep(source)) is is_kept
