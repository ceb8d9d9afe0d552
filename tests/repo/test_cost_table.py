"""The cost table of BENCHMARKS: its dollars follow from its rates and S3's list prices."""

import re
from pathlib import Path

from tests.tools.bench.costs import CASES, Rates, row

PAGE = Path(__file__).parents[2] / "deploy" / "BENCHMARKS.md"


def test_dollars_are_rates_by_prices() -> None:
    text = PAGE.read_text().partition("## What it costs")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \| \$[\d.,]+ \|$", text, re.MULTILINE)
    assert [title for title, _, _ in rows] == [case.title for case in CASES]
    for case, (_, puts, gets) in zip(CASES, rows, strict=True):
        assert row(case, Rates(float(puts), float(gets))) in text
