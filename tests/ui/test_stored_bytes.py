"""The bytes that a user types are stored, and the console shows and copies the stored bytes."""

import base64
import json
import re

import httpx
import pytest

from tests.support.broker import Broker
from tests.ui.conftest import Console

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(180)]

VALUES = (
    '{"id": 9007199254740993, "price": 1.10, "amount": 12345678901234567.89}',
    "9223372036854775807",
    '{"a":1e400}',
    '{"z":-0}',
    '{"b":1,"2":0,"1":0,"b":2}',
    '{"order_id": 9223372036854775807, "total": 0.1000000000000000055511151231257827}',
    "0.123456789012345678901234567890",
    '{"a":1,"a":{"a":2},"a":[]}',
    '"\\u00e9 \\ud83d\\ude00 é 😀 \\/ \\" : , { ["',
    " [ 1 ,\t2 ]\n",
    '{"empty": {}, "list": [], "null": null, "deep": [[1, 2], {"x": [true, false]}]}',
    "[" * 20_000 + "]" * 20_000,
)
"""JSON texts that change if a program parses them and writes them again."""


def stored(broker: Broker, topic: str) -> list[bytes]:
    url = f"{broker.base_url}/topics/{topic}/partitions/0/records?offset=0"
    said = httpx.get(url, headers={"accept": "application/vnd.kafka.binary.v2+json"})
    return [base64.b64decode(record["value"]) for record in said.raise_for_status().json()]


def packed(text: str) -> str:
    """The text without white space outside of strings."""
    return "".join(re.findall(r'"(?:[^"\\]|\\.)*"|[^\s"]+', text))


@pytest.fixture
def clipboard(console: Console) -> None:
    console.page.context.grant_permissions(["clipboard-read", "clipboard-write"])


def test_typed_values_are_stored_shown_and_copied_as_they_are(
    console: Console, broker: Broker, clipboard: None
) -> None:
    broker.create_topic("typed", 1)
    page = console.open("topics/typed/records")
    dialog = page.get_by_role("dialog")
    for number, value in enumerate(VALUES):
        page.get_by_role("button", name="Produce").click()
        dialog.locator("[name=value]").fill(value)
        dialog.get_by_role("button", name="Produce").click()
        page.get_by_text(f"Committed at partition 0, offset {number}.").wait_for()
    assert stored(broker, "typed") == [value.encode() for value in VALUES]
    for number, value in enumerate(VALUES):
        page.get_by_role("button", name=f"Record {number}", exact=True).click()
        record = page.locator(".record")
        record.wait_for()
        more = record.get_by_role("button", name="Show all")
        if more.count():
            more.click()
        shown = record.locator("pre").inner_text()
        assert packed(shown) == packed(value)
        record.get_by_role("button", name="Copy").click()
        page.get_by_text("Value copied as it is stored.").first.wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == value
        page.get_by_role("button", name=f"Record {number}", exact=True).click()
        record.wait_for(state="detached")


def test_keys_and_headers_are_stored_as_they_are(console: Console, broker: Broker) -> None:
    broker.create_topic("whole", 1)
    page = console.open("topics/whole/records")
    dialog = page.get_by_role("dialog")

    def produce(form: str, key: str) -> None:
        page.get_by_role("button", name="Produce").click()
        dialog.locator("[name=key-form]").select_option(form)
        dialog.locator("[name=key]").fill(key)
        dialog.locator("[name=form]").select_option("null")
        if form == "text":
            dialog.get_by_role("button", name="Add header").click()
            dialog.locator("[name=header-name]").fill("a: b")
            dialog.locator("[name=header-value]").fill("  two spaces ")
        dialog.get_by_role("button", name="Produce").click()
        dialog.wait_for(state="detached")

    for form, key in (("text", ""), ("json", '{"id": 9007199254740993}'), ("hex", "00 ff")):
        produce(form, key)
    url = f"{broker.base_url}/topics/whole/partitions/0/records?offset=0"
    said = httpx.get(url, headers={"accept": "application/vnd.kafka.binary.v2+json"}).json()
    keys = [base64.b64decode(record["key"]) for record in said]
    assert keys == [b"", b'{"id": 9007199254740993}', b"\x00\xff"]
    (header,) = said[0]["headers"]
    assert (header["key"], base64.b64decode(header["value"])) == ("a: b", b"  two spaces ")


def test_a_value_that_is_not_json_is_refused(console: Console, broker: Broker) -> None:
    broker.create_topic("refusing", 1)
    page = console.open("topics/refusing/records")
    page.get_by_role("button", name="Produce").click()
    dialog = page.get_by_role("dialog")
    for value in ("", '{"a": }', "NaN"):
        dialog.locator("[name=value]").fill(value)
        dialog.get_by_role("button", name="Produce").click()
        dialog.get_by_text("The value is not JSON").wait_for()
    assert stored(broker, "refusing") == []


def test_an_error_in_one_record_leaves_the_others_usable(console: Console, broker: Broker) -> None:
    """A record view that fails is contained: here a function of the browser fails for one text."""
    broker.create_topic("guarded", 1)
    bodies = [{"value": {"type": "STRING", "data": data}} for data in ("poison", "good")]
    cluster = httpx.get(f"{broker.base_url}/v3/clusters").json()["data"][0]["cluster_id"]
    url = f"{broker.base_url}/v3/clusters/{cluster}/topics/guarded/records"
    for body in bodies:
        assert httpx.post(url, content=json.dumps(body)).json()["error_code"] == 200
    page = console.open("topics/guarded/records")
    page.evaluate(
        "() => { const real = Array.prototype.filter;"
        " Array.prototype.filter = function (...given) {"
        " if (this[0] === false && this[1]?.[0] === 'text' && document.title !== 'fixed')"
        " throw new Error('a bug');"
        " return real.apply(this, given); } }"
    )
    page.get_by_role("button", name="Record 0", exact=True).click()
    page.get_by_text("The console cannot show this record: a bug").wait_for()
    assert page.locator("tr.opens").count() == 2
    page.evaluate("document.title = 'fixed'")
    page.get_by_role("button", name="Record 1", exact=True).click()
    page.locator(".record pre").get_by_text("good").wait_for()
    page.get_by_role("tab", name="Configuration").click()
    page.get_by_text("cleanup.policy").first.wait_for()
    console.wrong = [message for message in console.wrong if "a bug" not in message]
