"""Parses the .tf files into Python values, for README.md, the tests and the schema's check."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import hcl2

MODULE = Path(__file__).parent
EXAMPLES = MODULE / "examples"
IS_BLOCK = "__is_block__"


class Block(NamedTuple):
    """A block with labels, such as `resource "aws_s3_bucket" "log"`; `kind` is its first word."""

    kind: str
    labels: tuple[str, ...]
    body: dict[str, Any]

    @property
    def address(self) -> str:
        prefix = "" if self.kind == "resource" else f"{self.kind}."
        return prefix + ".".join(self.labels)


LABELS = {"resource": 2, "data": 2, "variable": 1, "output": 1, "module": 1, "provider": 1}


@cache
def blocks(folder: Path = MODULE) -> tuple[Block, ...]:
    """Return the blocks of all files of a folder, in the order of the files' names."""
    return tuple(
        block
        for path in sorted(folder.glob("*.tf"))
        for block in _blocks(hcl2.loads(path.read_text(encoding="utf-8")))
    )


def of_kind(kind: str, folder: Path = MODULE) -> list[Block]:
    return [block for block in blocks(folder) if block.kind == kind]


def resources(kind: str) -> list[Block]:
    """Return the resources of one type, such as aws_s3_bucket."""
    return [block for block in of_kind("resource") if block.labels[0] == kind]


def text(value: object) -> str:
    """Return a literal string without its quotes; any other expression unchanged."""
    written = str(value)
    if len(written) > 1 and written[0] == written[-1] == '"':
        return written[1:-1].replace('\\"', '"')
    return written


def members(body: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes and inner blocks of a body, without the keys that the parser adds."""
    return {key: value for key, value in body.items() if not key.startswith("__")}


def inner(value: object) -> list[dict[str, Any]]:
    """Return the blocks in a member of a body; empty if the member is an attribute."""
    if not isinstance(value, list):
        return []
    return [each for each in value if isinstance(each, dict) and IS_BLOCK in each]


def template(name: str, **words: str | bool) -> str:
    """Render a file of policies/ as Terraform's `templatefile` does.

    Only `${name}` and `if` without `else` are supported.
    """
    source = (MODULE / "policies" / f"{name}.json.tftpl").read_text(encoding="utf-8")
    chosen = re.sub(
        r"%\{ if (\w+) \}(.*?)%\{ endif \}",
        lambda found: found[2] if words[found[1]] else "",
        source,
        flags=re.DOTALL,
    )
    return re.sub(r"\$\{(\w+)\}", lambda found: str(words[found[1]]), chosen)


def source(folder: Path = MODULE) -> str:
    """Return the text of a folder's files without comments."""
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
