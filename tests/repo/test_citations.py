"""Citations in code, documents and tests resolve: sections, rules, invariants, files, links."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.repo.test_house_rules import ROOT, TREE

TEXTS = [
    path
    for path in TREE
    if path.suffix in {".md", ".py", ".js", ".css", ".html", ".toml", ".tf", ".yml", ".yaml", ".sh"}
    and "vendor" not in path.parts
]
PAGES = [path for path in TEXTS if path.suffix == ".md"]
FORMAT = Path("storage/docs/FORMAT.md")
DESIGN = [path for path in PAGES if Path("storage/docs") in path.parents and path != FORMAT]
CHAPTERS = [path for path in DESIGN if path.parent.name == "design"]
DECISIONS = Path("storage/docs/design/13-decisions.md")
DIALECTS = Path("service/docs/DIALECTS.md")
INVARIANTS = {f"I{number}" for number in range(1, 13)}

_NUMBERS = r"(\d+(?:\.\d+)?(?:(?:, | and )\d+(?:\.\d+)?)*)"
SECTIONS = re.compile(rf"\b(DESIGN|FORMAT)(?:\.md)?(?:,? sections?)? {_NUMBERS}")
DECISION = re.compile(r"\bDESIGN (D\d+)")
RULES = re.compile(r"\bFORMAT(?:\.md)?,? rule (\d+)")
NAMED = re.compile(r"\((FORMAT|DIALECTS), ((?!rule|section)[A-Za-z][A-Za-z0-9 ]*)\)")
INVARIANT = re.compile(r"(?<![\w.])I\d+\b(?!\.)")
OUTSIDE = re.compile(r"\bNUMBERS \d|\bREST\.md\b")
"""Documents that are not in the tree."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(
    r"(?<![\w/.$}{*-])(?:storage|service|compaction|tests|deploy|terraform)/[\w./-]+"
    r"\.(?:py|md|js|toml|ya?ml|sh|tf|conf|json)\b"
)
ABSENT = {"storage/public/__init__.py"}
"""Named because they must not be there."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def one_line(text: str) -> str:
    """The text without line breaks, and without the signs that begin lines of comments."""
    return re.sub(r"\s*\n\s*(?:#|//|\*)?\s*", " ", text)


@cache
def headings(path: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), re.MULTILINE)


@cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    titles = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings(path))
    return {heading.replace(" ", "-") for heading in titles}


@cache
def sections(document: str) -> set[str]:
    """The numbers of the sections of DESIGN or FORMAT."""
    titles = (
        title for path in (DESIGN if document == "DESIGN" else [FORMAT]) for title in headings(path)
    )
    return {match[1] for title in titles if (match := re.match(r"([\d.]*\d)\.? ", title))}


@cache
def decisions() -> set[str]:
    return set(re.findall(r"^\| (D\d+) \|", text_of(DECISIONS), re.MULTILINE))


def rules() -> set[str]:
    text = text_of(FORMAT).partition("## 1.")[2].partition("\n## ")[0]
    return set(re.findall(r"^(\d+)\. ", text, re.MULTILINE))


def unresolved(path: Path) -> Iterator[str]:
    text = one_line(text_of(path))
    for document, numbers in SECTIONS.findall(text):
        for number in re.findall(r"[\d.]*\d", numbers):
            if number not in sections(document):
                yield f"{document} {number}"
    yield from set(DECISION.findall(text)) - decisions()
    for rule in RULES.findall(text):
        if rule not in rules():
            yield f"FORMAT rule {rule}"
    for document, name in NAMED.findall(text):
        lower_headings = [
            heading.lower() for heading in headings(FORMAT if document == "FORMAT" else DIALECTS)
        ]
        if not any(name.lower() in heading for heading in lower_headings):
            yield f"{document}, {name}"
    yield from (cited for cited in INVARIANT.findall(text) if cited not in INVARIANTS)
    yield from OUTSIDE.findall(text)


def test_what_a_text_cites_is_in_the_tree() -> None:
    wrong = {path.as_posix(): citations for path in TEXTS if (citations := [*unresolved(path)])}
    assert not wrong


def test_a_file_that_a_text_names_is_in_the_tree() -> None:
    names = {tree_path.as_posix() for tree_path in TREE} | ABSENT
    named = {path.as_posix(): {*FILE.findall(text_of(path))} for path in TEXTS}
    assert not {path: absent for path, used in named.items() if (absent := used - names)}


@pytest.mark.parametrize("page", PAGES, ids=Path.as_posix)
def test_a_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", text_of(page))):
        if link.startswith(("https://", "http://")):
            continue
        target, _, anchor = link.partition("#")
        led = (page.parent / target if target else page).as_posix()
        there = Path((ROOT / led).resolve().relative_to(ROOT))
        assert (ROOT / there).exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {link}"


@pytest.mark.parametrize("chapter", CHAPTERS, ids=Path.as_posix)
def test_chapter_links_to_contents(chapter: Path) -> None:
    assert text_of(chapter).splitlines()[2] == "[Contents](../DESIGN.md)"


def test_citations_are_found() -> None:
    # The rules above are vacuous where nothing matches.
    assert sections("DESIGN") >= {str(number) for number in range(1, 14)} | {"8.10", "12.7"}
    assert {"D1", "D50"} <= decisions()
    assert rules() >= {"1", "7", "10"}
    assert len(CHAPTERS) > 12
    assert len([path for path in TEXTS if SECTIONS.search(one_line(text_of(path)))]) > 15
