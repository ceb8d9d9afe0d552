"""The glossary of the design names each public type of core and state, and each setting."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.test_house_rules import ROOT
from tidelog.service.settings.settings import Settings

PAGE = Path("storage/docs/design/02-glossary.md")
GLOSSARY = (ROOT / PAGE).read_text(encoding="utf-8")
NAMED = set(re.findall(r"`(\w+)`", GLOSSARY))
FOLDERS = ("storage/core", "storage/state")
MODULES = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("*.py"))]
SETTINGS = [field.name for field in dataclasses.fields(Settings)]


def types_of(module: ast.Module) -> Iterator[str]:
    """Public classes and aliases: names in CamelCase that a module assigns."""
    for node in module.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and re.fullmatch(r"[A-Z]+[a-z]\w*", target.id):
                yield target.id


def test_the_glossary_and_the_modules_are_found() -> None:
    assert {path.parent.relative_to(ROOT).as_posix() for path in MODULES} == set(FOLDERS)
    assert len(NAMED) > 150
    assert len(SETTINGS) > 40
    module = ast.parse("class A: ...\nclass _B: ...\nUnit: TypeAlias = int\nMAX = 1")
    assert list(types_of(module)) == ["A", "Unit"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_glossary_has_each_type(path: Path) -> None:
    missing = set(types_of(ast.parse(path.read_text(encoding="utf-8")))) - NAMED
    assert not missing, f"{PAGE} has no row of {missing}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_glossary_has_the_noun_of_each_setting(setting: str) -> None:
    assert setting in NAMED, f"{PAGE} has no row of `{setting}`"


def test_each_noun_has_one_row() -> None:
    nouns = re.findall(r"^\| ([a-z][^|]*) \|", GLOSSARY, re.MULTILINE)
    nouns = [noun for noun in nouns if noun not in ("noun", "error", "the same")]
    assert len(nouns) > 100
    assert not {noun for noun in nouns if nouns.count(noun) > 1}
