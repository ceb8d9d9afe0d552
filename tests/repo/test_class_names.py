"""A class name has one home in the product: who reads it knows which noun it is."""

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.repo.test_house_rules import MODULES, PRODUCT, ROOT


def homes(sources: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the modules of each class, by its name, from (module, source) pairs."""
    modules_by_class = defaultdict(list)
    for module, source in sources:
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                modules_by_class[node.name].append(module)
    return modules_by_class


def test_each_class_name_has_one_home() -> None:
    product = [path for path in MODULES if path.parts[0] in PRODUCT]
    sources = [(path.as_posix(), (ROOT / path).read_text("utf-8")) for path in product]
    modules_by_class = homes(sources)
    assert len(modules_by_class) > 500
    assert {name: modules for name, modules in modules_by_class.items() if len(modules) > 1} == {}


def test_two_homes_are_seen() -> None:
    assert homes([("a", "class Page: ..."), ("b", "class Page: ...\nclass Row: ...")]) == {
        "Page": ["a", "b"],
        "Row": ["b"],
    }
