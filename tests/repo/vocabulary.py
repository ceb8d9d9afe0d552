"""The vocabulary rule: words and sentence forms that no text of the tree may have.

The texts of a Python file are its comments and its string literals with a blank (docstrings,
messages, help texts); another file is one text. The rule keeps an old idiom out. Its words hide the
actor that a sentence must name (a broker, a client, the caller), or say of programs what only
people do.

`python -m tests.repo.vocabulary [PATH ...]` prints each violation as `file:line: text`
and exits with 1 if there is one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.repo.test_house_rules import ROOT, TREE

# A word a literal: a literal without a blank is no prose, so this file passes its own rule.
WORDS = (
    *("nobody", "somebody", "anybody", "everybody", "whoever", "whom", "anew", "upon"),
    *("sleepers?", "slept", "asleep", "carers?", "told", "tellings?", "heard", "hears"),
    *("believe[sd]?", "blames?", "patience", "forgives?", "nonsense", "dies", "died"),
    *(r"the\s+dead", r"for\s+ever", r"keeps\s+its\s+word", r"is\s+no\s+more"),
    *(r"falls\s+silent", r"in\s+vain"),
)
FORBIDDEN = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
FORMS = re.compile(r"\bAnd\s+if\s+(?:we|it|the|a)\s|,\s+who\s+[a-z]+")
STATEMENT = re.compile(
    r"(?:^|(?<=[.!?:]\s)|(?<=\n\n)|(?<=\n[-*]\s)|(?<=[|]\s))\s*((?:Who|What)\b[^.?!|]*[.?!|]?)"
)
"""A sentence that begins like a question; it may stand if it ends like one."""

PROSE = {".conf", ".css", ".html", ".js", ".md", ".service", ".sh", ".tf", ".toml", ".yaml", ".yml"}
"""Suffixes of files whose whole text is looked at."""

ALLOWED: frozenset[tuple[str, str]] = frozenset()
"""(file, message) that stays: a message of another REST proxy, which its clients match."""


class Violation(NamedTuple):
    """One forbidden word or form, by file (relative to the root) and line."""

    path: str
    line: int
    text: str


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Find forbidden words and forms; yields (place in the text, excerpt)."""
    for pattern in (FORBIDDEN, FORMS):
        for match in pattern.finditer(text):
            yield match.start(), match.group()
    for match in STATEMENT.finditer(text):
        if not match.group(1).rstrip().endswith(("?", "|")):
            yield match.start(1), match.group(1)[:40]


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file with the line of their beginning."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, source
        return
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield blocks of comments: a sentence may go over several lines."""
    first, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != first + len(block):
            yield first, "\n".join(block)
            block = []
        if not block:
            first = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield first, "\n".join(block)


def violations(paths: Iterable[Path]) -> list[Violation]:
    """Return the violations in files, given relative to the root."""
    all_violations = []
    for path in paths:
        if path.suffix in PROSE | {".py"} and "vendor" not in path.parts:
            for line, text in texts(ROOT / path):
                if (path.as_posix(), text) not in ALLOWED:
                    all_violations += [
                        Violation(
                            path.as_posix(),
                            line + text.count("\n", 0, position),
                            " ".join(excerpt.split()),
                        )
                        for position, excerpt in faults(text)
                    ]
    return all_violations


def _main(names: list[str]) -> int:
    roots = [Path(name) for name in names or ["."]]
    paths = [path for path in TREE if any(path.is_relative_to(root) for root in roots)]
    all_violations = violations(paths)
    for violation in all_violations:
        print(f"{violation.path}:{violation.line}: {violation.text}")
    print(f"{len(all_violations)} violations of the vocabulary rule in {len(paths)} files")
    return 1 if all_violations else 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
