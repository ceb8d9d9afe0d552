"""The console as people use it: pages load, flows go through, what users wrote is never markup."""

import re
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.support.broker import Broker, until
from tests.ui.conftest import HOSTILE, HOSTILE_GROUP, JSON, Console

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(90)]

PLACES = {
    "overview": "Brokers",
    "topics": "flights",
    "topics/flights": "Segment sizes",
    "topics/flights/records": "carrier",
    "topics/flights/configs": "cleanup.policy",
    "groups": "behind",
    "groups/behind": "Lag over time",
    "clients": "kafka-library",
    "metadata": "Checkpoint",
    "api": "openapi.json",
}


def heading(console: Console, text: str) -> None:
    console.page.get_by_role("heading", name=text, exact=True).wait_for()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_page_loads_in_both_themes(console: Console, theme: Any) -> None:
    console.page.emulate_media(color_scheme=theme)
    for place, text in PLACES.items():
        # By a link from outside, and by a click in the console.
        page = console.open(place, afresh=theme == "light" and place in {"topics", "metadata"})
        page.get_by_text(text).first.wait_for()
        assert page.locator(".problem").count() == 0, place
        console.check()
    ground = "getComputedStyle(document.body).backgroundColor"
    light, dark = "rgb(244, 246, 247)", "rgb(13, 19, 23)"
    assert console.page.evaluate(ground) == {"light": light, "dark": dark}[theme]


def test_a_phone_has_no_sideways_scroll(console: Console) -> None:
    console.page.set_viewport_size({"width": 360, "height": 740})
    for place in [*PLACES, f"groups/{quote(HOSTILE_GROUP, safe='')}", "topics/hostile/records"]:
        page = console.open(place)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{place} is {wide} px too wide"
    console.page.get_by_role("link", name="Topics").first.click()
    heading(console, "Topics")
    console.page.get_by_role("button", name="Create topic").click()
    box = console.page.locator("dialog[open]").bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360


def test_the_theme_is_remembered(console: Console) -> None:
    page = console.open("topics")
    ground = "getComputedStyle(document.body).backgroundColor"
    page.get_by_role("button", name="Theme: System").click()
    page.get_by_role("button", name="Theme: Light").click()
    assert page.evaluate(ground) == "rgb(13, 19, 23)"
    console.open("topics", afresh=True)
    assert page.evaluate(ground) == "rgb(13, 19, 23)"
    page.get_by_role("button", name="Theme: Dark").click()
    assert page.evaluate(ground) == "rgb(244, 246, 247)"


def test_a_topic_from_its_creation_to_its_end(console: Console, broker: Broker) -> None:
    page = console.open("topics")
    page.keyboard.press("n")
    dialog = page.get_by_role("dialog")

    def save(value: str) -> None:
        dialog.get_by_role("textbox").fill(value)
        dialog.get_by_role("button", name="Save").click()

    dialog.locator("[name=name]").fill("not a name")
    assert dialog.get_by_role("button", name="Create").is_disabled()
    dialog.locator("[name=name]").fill("made.here")
    dialog.locator("[name=partitions]").fill("2")
    page.keyboard.press("Enter")
    page.get_by_text("No records yet").wait_for()

    page.get_by_role("tab", name="Records").click()
    page.get_by_role("button", name="Produce").click()
    dialog.locator("[name=key]").fill("k1")
    dialog.locator("[name=value]").fill('{"deep": {"n": [1, 2]}}')
    dialog.get_by_role("button", name="Add header").click()
    dialog.locator("[name=header-name]").fill("trace")
    dialog.locator("[name=header-value]").fill("00-ab")
    dialog.get_by_role("button", name="Produce").click()
    page.get_by_text(re.compile(r"Committed at partition \d, offset 0")).wait_for()
    row = page.get_by_role("row", name=re.compile("k1"))
    row.click()
    page.locator(".record pre").get_by_text('"deep": {').wait_for()
    page.get_by_text("00-ab").wait_for()
    page.get_by_role("group", name="Value as").get_by_role("button", name="Hex").click()
    page.get_by_text("7b 22 64 65 65 70").wait_for()

    page.get_by_role("tab", name="Configuration").click()
    page.get_by_role("button", name="Change retention.ms").click()
    save("x")
    dialog.get_by_text("invalid value 'x' for topic config retention.ms").wait_for()
    console.allow_status(400)
    save("1")
    dialog.get_by_text("retention deletes 1 record").wait_for()
    dialog.get_by_role("button", name="Delete 1 record").wait_for()
    save("3600000")
    page.get_by_role("row", name=re.compile(r"retention\.ms set.*1 h")).wait_for()
    page.get_by_role("link", name="Topics").first.click()
    page.get_by_role("link", name="Defaults").click()
    page.get_by_role("button", name="Change log.roll.ms").click()
    save("soon")
    dialog.get_by_text("invalid value 'soon' for the default log.roll.ms").wait_for()
    console.allow_status(400)
    save("7200000")
    page.get_by_role("row", name=re.compile(r"log\.roll\.ms cluster.*2 h")).wait_for()
    page.get_by_role("row", name=re.compile(r"num\.partitions broker")).wait_for()
    page = console.open("topics/made.here/configs")
    page.get_by_role("row", name=re.compile(r"segment\.ms cluster.*2 h")).wait_for()
    page.get_by_role("button", name="Change retention.ms").click()
    dialog.get_by_role("button", name="Default: 604800000").click()
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("row", name=re.compile(r"retention\.ms 604800000 7 d")).wait_for()
    page.get_by_role("button", name="Add partitions").click()
    dialog.get_by_role("spinbutton").fill("4")
    dialog.get_by_role("button", name="Add").click()
    page.get_by_text("4 partitions. You can add more").wait_for()

    page.get_by_role("button", name="Delete topic").click()
    dialog.get_by_role("textbox").fill("made.her")
    assert dialog.get_by_role("button", name="Delete").is_disabled()
    dialog.get_by_role("textbox").fill("made.here")
    dialog.get_by_role("button", name="Delete").click()
    heading(console, "Topics")
    assert "made.here" not in httpx.get(f"{broker.base_url}/topics").json()


def test_records_by_offset_by_key_and_page_by_page(console: Console) -> None:
    page = console.open("topics/flights/records?p=0&from=offset&at=3")
    page.get_by_text("offsets 3 to").wait_for()
    page.get_by_role("button", name="← Older").click()
    page.get_by_text("offsets 0 to").wait_for()
    page.get_by_label("From").select_option("newest")
    page.get_by_label("Key contains").fill("no such key")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("No key matches").wait_for()
    page.get_by_label("Key contains").fill("k1")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("row", name=re.compile("k1")).first.wait_for()
    keys = page.locator("table.records td.key").all_inner_texts()
    assert keys
    assert all("k1" in key for key in keys)


def test_following_shows_what_is_committed(console: Console, broker: Broker) -> None:
    page = console.open("topics/flights/records?p=2")
    page.get_by_role("button", name="Follow live").click()
    page.locator(".live-state.live").wait_for()
    for number in range(3):
        body = {"records": [{"partition": 2, "key": "live", "value": {"seen": number}}]}
        httpx.post(f"{broker.base_url}/topics/flights", json=body, headers=JSON).raise_for_status()
    page.get_by_text('{"seen":2}').wait_for()
    shown = page.locator("table.records td:last-child").all_inner_texts()
    assert shown == ['{"seen":2}', '{"seen":1}', '{"seen":0}']
    page.get_by_role("button", name="Stop following").click()
    page.get_by_text(re.compile(r"offsets \d+ to")).wait_for()


def test_a_group_is_reset_after_a_preview_and_deleted_by_name(
    console: Console, broker: Broker
) -> None:
    page = console.open("groups")
    page.get_by_role("row", name=re.compile("^behind")).click()
    heading(console, "Lag over time")
    page.get_by_role("button", name="Reset offsets").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("[name=to]").select_option("LATEST")
    dialog.get_by_role("button", name="Preview").click()
    dialog.get_by_role("row", name=re.compile(r"flights-0\b.*\+")).wait_for()
    cluster = httpx.get(f"{broker.base_url}/v3/clusters").json()["data"][0]["cluster_id"]
    url = f"{broker.base_url}/v3/clusters/{cluster}/consumer-groups/behind"
    before = [row["offset"] for row in httpx.get(f"{url}/offsets").json()["data"]]
    assert before == [5, 5, 5], "a preview changes nothing"
    dialog.get_by_role("button", name="Reset now").click()
    page.get_by_text("Offsets of behind reset").wait_for()
    assert httpx.get(f"{url}/lag-summary").json()["total_lag"] == 0
    page.get_by_role("button", name="Delete group").click()
    dialog.get_by_role("textbox").fill("behind")
    dialog.get_by_role("button", name="Delete").click()
    heading(console, "Groups")
    assert httpx.get(url).status_code == 404
    # For the pages of the tests that may come after this one.
    offsets = [{"topic_name": "flights", "partition_id": n, "offset": 5} for n in range(3)]
    group = {"consumer_group_id": "behind", "offsets": offsets}
    body = {"topics": [], "consumer_groups": [group]}
    again = f"{broker.base_url}/v3/clusters/{cluster}/transactions"
    httpx.post(again, json=body).raise_for_status()


def test_a_group_with_members_shows_what_each_reads(console: Console) -> None:
    page = console.open("groups/reading")
    page.get_by_role("row", name=re.compile(r"reader-1.*flights: 0, 1, 2")).wait_for()
    page.get_by_role("button", name="Reset offsets").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("The group has members").wait_for()
    assert dialog.get_by_role("row", name=re.compile("flights")).count() == 0, "nothing to reset"


def test_nothing_that_users_wrote_is_markup(console: Console) -> None:
    page = console.open("topics/hostile/records")
    for row in page.locator("tr.opens").all():
        row.click()
        page.locator(".record").wait_for()
        assert HOSTILE in page.locator("table.records").inner_text().replace('\\"', '"')
        row.click()
    console.open("clients")
    page.get_by_text(HOSTILE).wait_for()
    console.open("groups")
    page.get_by_text(HOSTILE_GROUP).first.click()
    page.get_by_role("heading", name=HOSTILE_GROUP).wait_for()
    page.get_by_role("button", name="Delete group").click()
    page.get_by_role("dialog").get_by_text(HOSTILE_GROUP).wait_for()
    assert page.locator("img[src=x], main script").count() == 0
    assert page.title() != "owned"


def test_keys_go_where_they_say(console: Console) -> None:
    page = console.open("overview")
    page.keyboard.press("g")
    page.keyboard.press("t")
    heading(console, "Topics")
    page.get_by_role("row", name=re.compile("flights")).wait_for()
    page.keyboard.press("/")
    page.keyboard.type("fli")
    page.get_by_text("1 of").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.get_by_role("tab", name="Layout").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog", name="Keys").wait_for(state="detached")
    assert page.evaluate("location.hash") == "#/topics/flights"


def test_the_api_reference_is_the_brokers_own(console: Console, broker: Broker) -> None:
    page = console.page
    page.goto(f"{broker.base_url}/docs")
    heading(console, "API reference")
    page.get_by_label("Search the API").fill("post /topics/{topic_name}")
    operation = page.locator("details.operation").first
    operation.click()
    operation.get_by_text("application/vnd.kafka.json.v2+json").first.wait_for()
    operation.locator("pre").get_by_text('"records"').first.wait_for()
    operation.get_by_text("idempotency-key", exact=True).wait_for()
    # Every operation of the description is there, and every one can be shown.
    said = httpx.get(f"{broker.base_url}/openapi.json").json()
    count = sum(len(item) for item in said["paths"].values())
    page.get_by_label("Search the API").fill("")
    operations = page.locator("details.operation")
    until(lambda: operations.count() == count)
    page.evaluate(
        "document.querySelectorAll('details.operation').forEach((one) => one.open = true)"
    )
    until(lambda: page.locator(".operation-body .answer").count() >= count)
    assert operations.count() == count
    console.check()


def test_the_first_page_has_the_health_of_the_cluster(console: Console) -> None:
    """Problems are folded by kind. The answers are as of a cluster with a broker that crashed."""
    runbook = "deploy/README.md#a-group-has-no-members"
    idle = [
        {"name": "group-without-members", "what": f"group g{number} is idle", "runbook": runbook}
        for number in range(120)
    ]
    gone_broker = {"name": "broker-2", "address": "http://b:9", "since_ms": 1}
    page = console.page

    def answer_health(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "problems": idle, "is_well": False})

    def answer_overview(route: Any) -> None:
        answer = route.fetch()
        route.fulfill(response=answer, json={**answer.json(), "gone": [gone_broker]})

    page.route("**/tidelog/v1/health", answer_health)
    page.route("**/tidelog/v1/overview*", answer_overview)
    console.open("overview", afresh=True)
    heading(console, "Not well")
    (row,) = page.get_by_role("table", name="Problems").get_by_role("row").all()[1:]
    assert "120" in row.inner_text()
    assert "group g0 is idle and 119 more" in row.inner_text()
    page.get_by_text("1 gone").wait_for()
    page.get_by_text("broker-2").wait_for()
    page.unroute_all()
    console.open("overview", afresh=True)
    page.get_by_role("table", name="Brokers").wait_for()
    assert page.get_by_text("120 problems").count() == 0


def test_the_dearest_purpose_of_requests_is_named_with_its_setting(console: Console) -> None:
    """The dollars are those of the prices in this browser, and those of the API at S3's."""
    costs = [
        {
            "purpose": "tails of other brokers",
            "setting": None,
            "requests_a_minute": {"get": 6000.0, "delete": 10.0},
            "usd_a_month": 105.12,
        },
        {
            "purpose": "commits",
            "setting": "flush_interval_ms",
            "requests_a_minute": {"put": 240.0, "get": 0.5},
            "usd_a_month": 52.57,
        },
    ]
    page = console.page

    def answer(route: Any) -> None:
        health = route.fetch().json()
        route.fulfill(json={**health, "store": {**health["store"], "costs": costs}})

    page.route("**/tidelog/v1/health", answer)
    console.open("overview", afresh=True)
    table = page.get_by_role("table", name="Cost by purpose")
    tails, commits = (table.get_by_role("row", name=name) for name in ("tails", "commits"))
    tails.wait_for()
    assert table.get_by_role("rowheader").all_inner_texts() == [one["purpose"] for one in costs]

    def cells(row: Any) -> str:
        return " | ".join(row.get_by_role("cell").all_inner_texts())

    assert cells(tails) == "0 | 0 | 6,000 | 6,010 | $105.12 | none"
    assert cells(commits) == "240 | 0 | 0.5 | 241 | $52.57 | flush_interval_ms"
    total = table.get_by_role("row", name="All brokers")
    assert cells(total) == "All brokers | 240 | 0 | 6,001 | 6,251 | $157.69 | "
    page.get_by_text("Most of it: tails of other brokers, 67 %. No setting lowers it.").wait_for()

    page.get_by_role("button", name="Edit prices").click()
    page.get_by_role("dialog").get_by_label("PUT").fill("0.05")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("Most of it: commits, 83 %. flush_interval_ms lowers it.").wait_for()
    assert table.get_by_role("rowheader").first.inner_text() == "commits"

    page.set_viewport_size({"width": 400, "height": 800})
    page.get_by_role("columnheader", name="Lowered by").wait_for(state="hidden")
    assert page.evaluate("document.documentElement.scrollWidth") == 400, "nothing scrolls sideways"
    page.evaluate("localStorage.clear()")
    page.unroute_all()


def test_prices_are_kept_and_change_the_cost(console: Console) -> None:
    page = console.open("overview")
    page.locator(".plot canvas").first.wait_for(timeout=20_000)
    page.get_by_role("button", name="Edit prices").click()
    page.get_by_role("dialog").get_by_role("spinbutton").first.fill("5000")
    page.get_by_role("button", name="Save").click()
    console.open("overview", afresh=True)
    page.get_by_role("row", name=re.compile(r"^PUT .* 5000 ")).wait_for()
    assert "$0.00" not in page.locator(".stat", has_text="Cost per day").inner_text()


def test_a_broker_that_does_not_answer_leaves_what_was_seen(console: Console) -> None:
    page = console.open("topics")
    row = page.get_by_role("row", name=re.compile("flights"))
    row.wait_for()
    again = "document.dispatchEvent(new Event('visibilitychange'))"
    page.route("**/tidelog/v1/topics", lambda route: route.abort("connectionrefused"))
    page.evaluate(again)
    page.get_by_text("The broker cannot be reached. The data below is not current.").wait_for()
    row.wait_for()
    page.unroute("**/tidelog/v1/topics")
    page.evaluate(again)
    page.get_by_role("alert").wait_for(state="detached")
    assert row.count() == 1
    console.wrong = [message for message in console.wrong if "CONNECTION_REFUSED" not in message]


def test_what_is_not_there_is_said(console: Console) -> None:
    for place in ("topics/nowhere", "groups/nowhere", "nowhere"):
        page = console.open(place)
        page.get_by_role("alert").get_by_text("Not found").wait_for()
        assert page.get_by_role("table").count() == 0
    console.allow_status(404)
