"""The tables of deploy/BENCHMARKS.md are those of runs, and README.md quotes them."""

import re

import pytest

from tests.tools.bench.__main__ import PARTS
from tests.tools.bench.publish import BLOCK, PAGE, README, limits_row, published, rows_of, speed_row


def test_the_page_has_a_block_for_each_part() -> None:
    blocks = [match[2] for match in BLOCK.finditer(PAGE.read_text("utf-8"))]
    assert len(blocks) == len(set(blocks))
    assert {*PARTS, "limits", "peers"} == set(blocks)


def test_no_block_is_empty() -> None:
    page = PAGE.read_text("utf-8")
    assert all(len(rows_of(page, match[2])) > 1 for match in BLOCK.finditer(page))


def test_the_readme_quotes_the_page() -> None:
    lines, page = README.read_text("utf-8").splitlines(), PAGE.read_text("utf-8")
    assert speed_row(page) in lines
    assert limits_row(page) in lines


def test_a_part_replaces_its_own_block_only() -> None:
    page = "a\n<!-- bench: x -->\nold\n<!-- end -->\nb\n<!-- bench: y -->\nkept\n<!-- end -->\n"
    part = {"columns": ["what", "no", "seen"], "rows": [["p", "", "1"]], "how": "h", "machine": "m"}
    new = published(page, {"x": part})
    assert new == page.replace("old\n", "| what | seen |\n| --- | --- |\n| p | 1 |\n\nh; m.\n")
    assert rows_of(new, "x") == [["what", "seen"], ["p", "1"]]
    with pytest.raises(ValueError, match=re.escape("<!-- bench: z -->")):
        published(page, {"z": part})
