"""The report of a benchmark."""

import statistics
from typing import NamedTuple


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
        if self.target is not None:
            share = self.target / self.seen if self.is_smaller_better else self.seen / self.target
            reached = f"{100 * share:.0f} %"
        return (
            self.what,
            f"{_number(self.seen)} {self.unit}",
            "" if self.target is None else f"{_number(self.target)} {self.unit}",
            reached,
            "" if self.p50_ms is None else f"{self.p50_ms:.2f}",
            "" if self.p99_ms is None else f"{self.p99_ms:.2f}",
            self.note,
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def median(values: list[float]) -> float:
    """The median, under the name that the table's readers know."""
    return statistics.median(values)
