"""The second half of API.md, from the application's OpenAPI document.

    python -m service.api_reference          # writes it into API.md, after the examples

What a broker documents is what it serves: the routes of `build_app` and the hot ones.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from service.app import build_app
from service.consumer_docs import documented_consumers
from service.hotdocs import documented_routes
from storage.clock import SystemClock
from storage.log import Log, LogSettings
from storage.objectstore import MemoryStore

PAGE = Path(__file__).with_name("API.md")
MARK = "## Reference\n"
DIALECTS = "Paths below `/v3` are served below `/kafka/v3` too."


async def openapi() -> dict[str, Any]:
    """The document of a broker, as `/openapi.json` has it."""
    log = Log(MemoryStore(), SystemClock(), "docs", LogSettings(), None)
    await log.open()
    try:
        app = build_app(log, extra=[documented_routes(), documented_consumers()])
        document: dict[str, Any] = app.openapi()
        return document
    finally:
        await log.close()


def reference(document: dict[str, Any]) -> str:
    """A table of routes for each tag, in the order of the tags."""
    lines = [MARK, f"{len(list(_routes(document)))} routes. {DIALECTS}", ""]
    for tag in document["tags"]:
        rows = [row for first, row in _routes(document) if first == tag["name"]]
        if rows:
            lines += [f"### {tag['name'].capitalize()}", "", tag["description"], ""]
            lines += ["| route | | query and headers | answers |", "|---|---|---|---|", *rows, ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def page(document: dict[str, Any]) -> str:
    """API.md as it should be."""
    return PAGE.read_text(encoding="utf-8").partition(MARK)[0] + reference(document)


def _routes(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """First tag and row of each."""
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            about = operation.get("summary", "").rstrip(".")
            said = (operation.get("description") or about).strip().split("\n\n")[0]
            cells = (
                f"`{method.upper()} {path}`",
                " ".join(said.split()).replace("|", "&#124;"),
                ", ".join(_parameters(operation)),
                ", ".join(sorted(operation["responses"])),
            )
            yield operation["tags"][0], f"| {' | '.join(cells)} |"


def _parameters(operation: dict[str, Any]) -> Iterator[str]:
    for parameter in operation.get("parameters", ()):
        if parameter["in"] != "path":
            yield f"`{parameter['name']}`" + ("" if parameter.get("required") else "?")


def main() -> int:
    PAGE.write_text(page(asyncio.run(openapi())), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
