"""A right is decided in service/operations, and declared with a route: nowhere else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.test_house_rules import MODULES, ROOT
from tidelog.storage.core import acls

DECIDING = {
    Path("service/operations"): "each operation checks its rights",
    Path("service/security"): "knows what a caller may do",
    Path("service/server/router.py"): "checks the declared access of a route",
}
"""Folders and modules that ask a caller's rights, with the reason."""
_LONG = "the request may outlast the right: the check is where the records are"
INLINE = {
    "service/kafka/appends.py": _LONG,
    "service/kafka/context.py": "makes a code of Kafka's of a refused right",
    "service/kafka/fetch.py": _LONG,
    "service/kafka/produce.py": "one refresh is for all topics of a request",
    "service/routes/consumer_instances.py": (
        "an instance belongs to no operation: its coordinator serves it"
    ),
    "service/routes/fetch.py": _LONG,
    "service/routes/produce_v3.py": _LONG,
}
"""Modules that check a right of service/operations/rights.py themselves, with the reason."""
INLINE_CHECK = re.compile(r"\b(?:[A-Z_]+|right)\.(?:is_granted|check|check_all|refusal)\(")
CHECK = re.compile(r"\brights(?:_of\(.*?\))?\.(?:may|check)\(")
_OPERATIONS = [*acls.OPERATIONS_OF.values(), (acls.IDEMPOTENT_WRITE,)]
OPERATIONS = {
    name for name, value in vars(acls).items() if any(value in ops for ops in _OPERATIONS)
}
"""Names of the constants of storage.core.acls for operations."""


def modules() -> Iterator[tuple[Path, str]]:
    for path in MODULES:
        if path.parts[0] == "service" and not DECIDING.keys() & {path, *path.parents}:
            yield path, (ROOT / path).read_text("utf-8")


def undeclared(source: str) -> set[str]:
    """Return the operations that a module names outside of a `Permission`."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "tidelog.storage.core.acls"
        for alias in node.names
        if alias.name in OPERATIONS
    }
    declarations = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Permission"
    ]
    declared = [name for call in declarations for name in _names(call)]
    names = [name for name in _names(tree) if name in imported]
    return {name for name in names if names.count(name) > declared.count(name)}


def _names(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def test_the_rules_find_what_they_forbid() -> None:
    assert {"READ", "DESCRIBE", "ALTER_CONFIGS", "IDEMPOTENT_WRITE"} <= OPERATIONS
    assert all((ROOT / path).exists() for path in DECIDING)
    assert INLINE_CHECK.search("await JOIN_GROUP.check(rights, group)")
    assert CHECK.search("if rights.may(x)")
    assert CHECK.search("await rights_of(call.scope).check(x)")
    source = "from tidelog.storage.core.acls import READ, TOPIC\n_READ = Permission(READ, TOPIC)\n"
    assert not undeclared(source)
    assert undeclared(f"{source}check(READ)") == {"READ"}
    assert len([*modules()]) > 100


def test_only_operations_ask_the_rights_of_a_caller() -> None:
    paths = [path for path, source in modules() if CHECK.search(source)]
    assert not paths, "call an operation, or check a right of service/operations/rights.py"


def test_only_the_listed_modules_check_a_right_inline() -> None:
    paths = {path.as_posix() for path, source in modules() if INLINE_CHECK.search(source)}
    assert paths == INLINE.keys()


def test_other_modules_name_an_operation_only_in_a_permission() -> None:
    names = {str(path): undeclared(source) for path, source in modules()}
    assert not {path: some for path, some in names.items() if some}
