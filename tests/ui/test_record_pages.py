"""Pages of records: the newest page has the newest record, and no record is out of reach."""

import re
from typing import Any

import httpx
import pytest

from tests.support.broker import Broker, tidelog
from tests.ui.conftest import JSON, Console

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(180)]


def produce(broker: Broker, topic: str, records: list[dict[str, Any]]) -> None:
    url = f"{broker.base_url}/topics/{topic}"
    httpx.post(url, headers=JSON, json={"records": records}).raise_for_status()


def offsets(console: Console) -> list[int]:
    """The offsets on the page, when it is loaded."""
    page = console.page
    page.get_by_text(re.compile(r"(offsets|nothing) .*of")).first.wait_for()
    shown = page.locator("table.records tr.opens td:first-child").all_inner_texts()
    return [int(text.replace(",", "")) for text in shown]


def test_the_newest_page_has_the_newest_record_whatever_the_sizes(
    console: Console, broker: Broker
) -> None:
    broker.create_topic("large", 1)
    for number in range(30):
        produce(broker, "large", [{"key": f"k{number}", "value": "x" * 100_000}])
    console.open("topics/large/records")
    page, seen = console.page, []
    while True:
        page_offsets = offsets(console)
        seen = page_offsets + seen
        older = page.get_by_role("button", name="← Older")
        if older.is_disabled():
            break
        older.click()
    assert seen == [*range(30)]
    assert max(page_offsets) < 29, "there were several pages"
    newer = page.get_by_role("button", name="Newer →")
    while newer.is_enabled():
        newer.click()
        page_offsets = offsets(console)
    assert page_offsets[-1] == 29


def test_a_filter_from_the_newest_finds_the_newest_first(console: Console, broker: Broker) -> None:
    broker.create_topic("found", 1)
    rows = [{"key": f"{'even' if n % 2 == 0 else 'odd'}", "value": n} for n in range(150)]
    produce(broker, "found", rows)
    page = console.open("topics/found/records")
    page.get_by_label("Key contains").fill("EVEN")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("searched").wait_for()
    assert offsets(console) == [*range(50, 150, 2)]
    page.get_by_role("button", name="← Older").click()
    page.get_by_text("offsets 0 to 48").wait_for()
    assert offsets(console) == [*range(0, 50, 2)]
    page.get_by_role("button", name="Newer →").click()
    page.get_by_text("offsets 50 to 148").wait_for()


def test_paging_shows_all_records_of_a_compacted_topic(console: Console, broker: Broker) -> None:
    broker.create_topic("cities", 1, cleanup_policy="compact", min_cleanable_dirty_ratio="0")
    produce(broker, "cities", [{"key": f"city-{n}", "value": n} for n in range(10)])
    produce(broker, "cities", [{"key": "hot", "value": n} for n in range(400)])
    produce(broker, "cities", [{"key": f"new-{n}", "value": n} for n in range(60)])
    httpx.post(f"{broker.base_url}/admin/topics/cities/seal").raise_for_status()
    tidelog("compact", "cities", "--yes", "--store", broker.store)
    # With the next seal, the broker reads the table as it is after the compaction.
    produce(broker, "cities", [{"key": "last", "value": 0}])
    httpx.post(f"{broker.base_url}/admin/topics/cities/seal").raise_for_status()
    kept_offsets = [*range(10), *range(409, 471)]
    console.open("topics/cities/records")
    page, seen = console.page, []
    for _ in range(5):
        seen = offsets(console) + seen
        older = page.get_by_role("button", name="← Older")
        if older.is_disabled():
            break
        older.click()
    assert seen == kept_offsets
    page.get_by_label("From").select_option("oldest")
    seen = []
    for _ in range(5):
        seen += offsets(console)
        newer = page.get_by_role("button", name="Newer →")
        if newer.is_disabled():
            break
        newer.click()
    assert seen == kept_offsets
    console.open("topics")
    page.get_by_role("row", name=re.compile("cities")).get_by_text("≤ 471").wait_for()
    console.open("topics/cities")
    page.locator(".stat", has_text="Records").get_by_text("72").wait_for()


def test_the_sums_of_a_topic_count_all_partitions(console: Console, broker: Broker) -> None:
    broker.create_topic("wide", 64)
    produce(broker, "wide", [{"partition": n, "value": n} for n in range(64)])
    page = console.open("topics/wide")
    page.locator(".stat", has_text="Records").locator(".stat-value", has_text="64").wait_for()
    assert page.locator(".bar-row").count() == 24
