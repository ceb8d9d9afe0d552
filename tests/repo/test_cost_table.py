"""The cost table of BENCHMARKS: its dollars follow from its rates and S3's list prices."""

import pytest

from tests.tools.bench.costs import CASES, COLUMNS
from tests.tools.bench.publish import PAGE, rows_of
from tidelog.service.telemetry.store_costs import GET_USD, MONTH_S, PUT_USD

ROUNDED = 0.03
"""A rate is printed with three digits."""


def test_dollars_are_rates_by_prices() -> None:
    columns, *rows = rows_of(PAGE.read_text(encoding="utf-8"), "costs")
    assert columns == [*COLUMNS]
    titles = [title.partition(" (")[0] for title, *_ in rows]
    assert titles[1:] == [case.title.partition(" (")[0] for case in CASES]
    for title, puts, lists, gets, _, dollars, _ in rows:
        price = (_number(puts) + _number(lists)) * PUT_USD + _number(gets) * GET_USD
        expected = pytest.approx(price * MONTH_S, rel=ROUNDED, abs=0.01)
        assert _number(dollars.lstrip("$")) == expected, title


def _number(text: str) -> float:
    return float(text.replace(",", ""))
