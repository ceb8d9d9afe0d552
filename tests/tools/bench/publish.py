"""The tables of a run, into deploy/BENCHMARKS.md and the rows of README.md that quote them.

    python -m tests.tools.bench.publish FILE

FILE is the JSON of `python -m tests.tools.bench --json`, or of the other commands of this package.
Only the blocks of its parts change: the text between `<!-- bench: PART -->` and `<!-- end -->`.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from tests.tools.bench.rates import sustained
from tests.tools.bench.report import Table, machine

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "deploy" / "BENCHMARKS.md"
README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- bench: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
SPEED = "json, 1,000 a request"
"""The row of `sustained` that README.md quotes."""
SEALED = sustained.COLUMNS.index("records sealed")


def add(path: Path, part: str, new_table: Table) -> None:
    """Write a part into the JSON file; other parts in it stay."""
    parts = json.loads(path.read_text()) if path.exists() else {}
    parts[part] = {**new_table.to_json(), "machine": machine()}
    path.write_text(json.dumps(parts, indent=1))


def block(part: dict[str, Any]) -> str:
    """The Markdown of a part of the JSON file."""
    columns, rows = part["columns"], part["rows"]
    shown = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    lines = [[columns[index] for index in shown], ["---"] * len(shown)]
    lines += [[row[index] for index in shown] for row in rows]
    how = "; ".join(text for text in (part["how"], part["machine"]) if text)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{how}.\n"


def published(page: str, parts: dict[str, dict[str, Any]]) -> str:
    """The page with the blocks of these parts replaced.

    Raises ValueError if it has no such block.
    """
    if missing := set(parts) - {match[2] for match in BLOCK.finditer(page)}:
        raise ValueError(f"the page has no block `<!-- bench: {min(missing)} -->`")

    def replaced(match: re.Match[str]) -> str:
        part = parts.get(match[2])
        return match[0] if part is None else f"{match[1]}{block(part)}{match[4]}"

    return BLOCK.sub(replaced, page)


def rows_of(page: str, part: str) -> list[list[str]]:
    """The cells of the rows of a block, its column names first."""
    text = next(match[3] for match in BLOCK.finditer(page) if match[2] == part)
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith("| ---")]


def speed_row(page: str) -> str:
    """README's row about the speed, by the page."""
    row = next(row for row in rows_of(page, "sustained") if row[0].startswith(SPEED))
    rate, sealed = row[1], row[SEALED]
    return (
        f"| speed | {rate} records/s in JSON batches of 1,000 on two shared cores, {sealed} of the "
        "records sealed meanwhile: [benchmarks](deploy/BENCHMARKS.md#rates) |"
    )


def limits_row(page: str) -> str:
    """README's row about the limits: of each on the page, the last row and the first number."""
    last = {row[0]: row for row in rows_of(page, "limits")[1:] if not row[0].startswith("entries")}
    texts = [f"{to} {title}: {note.partition(', ')[0]}" for title, to, note, *_ in last.values()]
    return f"| measured | {'; '.join(texts)}: [limits](deploy/BENCHMARKS.md#limits) |"


def quoted(readme: str, page: str) -> str:
    """README with the rows that quote the page."""
    for row in (speed_row(page), limits_row(page)):
        name = row.split("|")[1]
        readme = re.sub(rf"^\|{name}\|.*$", lambda _, row=row: row, readme, flags=re.MULTILINE)
    return readme


def main(path: Path) -> int:
    page = published(PAGE.read_text("utf-8"), json.loads(path.read_text()))
    PAGE.write_text(page, "utf-8")
    README.write_text(quoted(README.read_text("utf-8"), page), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
