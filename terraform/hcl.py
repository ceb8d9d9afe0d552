"""The module's files as Python values, for the README, the tests and the schema's check."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hcl2

ROOT = Path(__file__).parent
EXAMPLES = ROOT / "examples"
IS_BLOCK = "__is_block__"


class Block(NamedTuple):
    """A block with labels, as `resource "aws_s3_bucket" "log"`; `kind` is its first word."""

    kind: str
    labels: tuple[str, ...]
    body: dict[str, Any]

    @property
    def address(self) -> str:
        prefix = "" if self.kind == "resource" else f"{self.kind}."
        return prefix + ".".join(self.labels)


LABELS = {"resource": 2, "data": 2, "variable": 1, "output": 1, "module": 1, "provider": 1}


@cache
def blocks(folder: Path = ROOT) -> tuple[Block, ...]:
    """All of a folder's files, in the order of their names."""
    return tuple(
        block
        for path in sorted(folder.glob("*.tf"))
        for block in _blocks(hcl2.loads(path.read_text(encoding="utf-8")))
    )


def of_kind(kind: str, folder: Path = ROOT) -> list[Block]:
    return [block for block in blocks(folder) if block.kind == kind]


def resources(kind: str) -> list[Block]:
    """Those of one type, as aws_s3_bucket."""
    return [block for block in of_kind("resource") if block.labels[0] == kind]


def text(value: object) -> str:
    """A literal string without its quotes; anything else as it is written."""
    written = str(value)
    if len(written) > 1 and written[0] == written[-1] == '"':
        return written[1:-1].replace('\\"', '"')
    return written


def members(body: dict[str, Any]) -> dict[str, Any]:
    """Attributes and inner blocks, without what the parser adds."""
    return {key: value for key, value in body.items() if not key.startswith("__")}


def inner(value: object) -> list[dict[str, Any]]:
    """The blocks that an attribute stands for; none where it is a value."""
    if not isinstance(value, list):
        return []
    return [each for each in value if isinstance(each, dict) and IS_BLOCK in each]


def template(name: str, **words: str | bool) -> str:
    """A file of policies/ as `templatefile` makes it: words, and `if` without `else`."""
    source = (ROOT / "policies" / f"{name}.json.tftpl").read_text(encoding="utf-8")
    chosen = re.sub(
        r"%\{ if (\w+) \}(.*?)%\{ endif \}",
        lambda found: found[2] if words[found[1]] else "",
        source,
        flags=re.DOTALL,
    )
    return re.sub(r"\$\{(\w+)\}", lambda found: str(words[found[1]]), chosen)


def source(folder: Path = ROOT) -> str:
    """All that is written, without comments."""
    written = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.tf")))
    return re.sub(r"(^|\s)#.*$", "", written, flags=re.MULTILINE)


def _blocks(parsed: dict[str, Any]) -> Iterator[Block]:
    for kind, found in parsed.items():
        if kind.startswith("__"):
            continue
        for each in found:
            yield _unpacked(kind, each)


def _unpacked(kind: str, each: dict[str, Any]) -> Block:
    labels: list[str] = []
    for _ in range(LABELS.get(kind, 0)):
        ((label, each),) = members(each).items()
        labels.append(text(label))
    return Block(kind, tuple(labels), each)
