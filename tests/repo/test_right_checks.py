"""Rights are declared once, in service/operations/rights.py; few modules besides it check them."""

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
    "service/kafka/api_context.py": "makes a code of Kafka's of a refused right",
    "service/kafka/fetch.py": _LONG,
    "service/kafka/produce.py": "one refresh is for all topics of a request",
    "service/routes/consumers_v2.py": (
        "an instance belongs to no operation: its coordinator serves it"
    ),
    "service/routes/fetch.py": _LONG,
    "service/routes/produce_v3.py": _LONG,
}
"""Modules that check a right of service/operations/rights.py themselves, with the reason."""
CHECK = re.compile(r"\brights(?:_of\(.*?\))?\.(?:may|check)\(|\b(?:check_all|forbidden)\(")
_OPERATIONS = [right.operation for rights in acls.RIGHTS_TO.values() for right in rights]
_OPERATIONS.append(acls.IDEMPOTENT_WRITE)
OPERATIONS = {name for name, value in vars(acls).items() if value in _OPERATIONS}
"""Names of the constants of storage.core.acls for operations."""


def modules() -> Iterator[tuple[Path, str]]:
    for path in MODULES:
        if path.parts[0] == "service" and not DECIDING.keys() & {path, *path.parents}:
            yield path, (ROOT / path).read_text("utf-8")


def rights_made(source: str) -> set[str]:
    """Return the names of operations that a module imports, and `Right` if it makes one."""
    nodes = [*ast.walk(ast.parse(source))]
    imported = {
        alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == acls.__name__
        for alias in node.names
    }
    called = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return imported & OPERATIONS | called & {"Right", "acls.Right"}


def test_the_rules_find_what_they_forbid() -> None:
    assert {"READ", "DESCRIBE", "ALTER_CONFIGS", "IDEMPOTENT_WRITE"} <= OPERATIONS
    assert all((ROOT / path).exists() for path in DECIDING)
    for check in (
        "if rights.may(x)",
        "await self.client.rights.check(JOIN_GROUP, group)",
        "await rights_of(call.scope).check(x)",
        "await check_all(rights, FETCH, topics)",
        "raise forbidden(principal, FETCH, topic)",
    ):
        assert CHECK.search(check), check
    source = "from tidelog.storage.core.acls import READ, TOPIC, Right\n"
    assert rights_made(source) == {"READ"}
    assert rights_made(f"{source}Right('READ', TOPIC)") == {"READ", "Right"}
    assert not rights_made("from tidelog.storage.core.acls import TOPIC, Right\n")
    assert len([*modules()]) > 100


def test_only_the_listed_modules_check_a_right_inline() -> None:
    paths = {path.as_posix() for path, source in modules() if CHECK.search(source)}
    assert paths == INLINE.keys()


def test_rights_are_made_in_one_module() -> None:
    rights = {path.as_posix(): rights_made(source) for path, source in modules()}
    assert not {path: names for path, names in rights.items() if names}
