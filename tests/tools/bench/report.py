"""The report of a benchmark: rows with a target, and tables, printed and as JSON.

A part of the run writes them.
"""

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table as Printed


class Row(NamedTuple):
    """One line: `seen` and `target` in `unit`; the median of several runs where a run is short."""

    part: str
    what: str
    seen: float
    unit: str
    target: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    note: str = ""
    is_smaller_better: bool = False

    def cells(self) -> tuple[str, ...]:
        """As text for the table."""
        reached = ""
        if self.target is not None and self.seen:
            share = self.target / self.seen if self.is_smaller_better else self.seen / self.target
            reached = f"{100 * share:.0f} %"
        both = "" if self.p50_ms is None else f"{number(self.p50_ms)} / {number(self.p99_ms or 0)}"
        return (
            self.what,
            f"{number(self.seen)} {self.unit}".strip(),
            "" if self.target is None else f"{number(self.target)} {self.unit}",
            reached,
            both,
            self.note,
        )


class Table(NamedTuple):
    """One part of the report as text. `how` says what was run, and where."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    how: str = ""

    def to_json(self) -> dict[str, Any]:
        return self._asdict()

    def show(self, title: str) -> None:
        printed = Printed(*self.columns, title=title, caption=self.how or None)
        for row in self.rows:
            printed.add_row(*row)
        Console(width=170 if not sys.stdout.isatty() else None).print(printed)


COLUMNS = ("what", "seen", "target", "reached", "p50 / p99 ms", "note")


def table(rows: Sequence[Row]) -> Table:
    return Table(COLUMNS, [row.cells() for row in rows])


def number(value: float) -> str:
    """Three digits of a small number; a large one whole, with commas."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def machine() -> str:
    """The machine, the interpreter and the day of this run."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d}"
    )
