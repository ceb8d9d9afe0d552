"""Lost answers, hanging brokers and slips of the hand lose no work and make no second record."""

import os
import re
import signal
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.broker import Broker
from tests.ui.conftest import Console
from tests.ui.test_stored_bytes import stored

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Route

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(180)]


def lose(route: "Route") -> None:
    """The broker gets the request, and the answer is lost."""
    route.fetch()
    route.abort("connectionreset")


def opened(console: Console, topic: str) -> "Locator":
    page = console.open(f"topics/{topic}/records")
    page.get_by_role("button", name="Produce").click()
    return page.get_by_role("dialog")


def test_a_record_is_produced_once_although_the_answer_is_lost(
    console: Console, broker: Broker
) -> None:
    broker.create_topic("once", 1)
    dialog = opened(console, "once")
    page = console.page

    def produce_without_answer(value: str) -> None:
        page.route("**/topics/once/records", lose, times=1)
        dialog.locator("[name=value]").fill(value)
        dialog.get_by_role("button", name="Produce").click()
        page.get_by_text("cannot be reached").wait_for()

    for number, value in enumerate(("1", "2")):
        if number:
            page.get_by_role("button", name="Produce").click()
        produce_without_answer(value)
        dialog.get_by_role("button", name="Produce").click()
        page.get_by_text(f"Committed at partition 0, offset {number}.").wait_for()
    assert stored(broker, "once") == [b"1", b"2"]
    # The same content in another dialog, and other content in the same dialog, are new records.
    page.get_by_role("button", name="Produce").click()
    produce_without_answer("2")
    dialog.locator("[name=value]").fill("3")
    dialog.get_by_role("button", name="Produce").click()
    page.get_by_text("Committed at partition 0, offset 3.").wait_for()
    assert stored(broker, "once") == [b"1", b"2", b"2", b"3"]
    console.wrong = [message for message in console.wrong if "CONNECTION_RESET" not in message]


def test_typed_text_survives_a_click_outside_enter_and_escape(
    console: Console, broker: Broker
) -> None:
    broker.create_topic("kept", 1)
    dialog = opened(console, "kept")
    page = console.page
    value = dialog.locator("[name=value]")
    assert value.input_value() == "", "no sample that Enter could send"
    value.fill('{"typed": true}')
    box = value.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 40, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(5, 400)
    page.mouse.up()
    page.mouse.click(5, 400)
    dialog.locator("[name=key]").fill("k")
    for key in ("Escape", "Escape", "Escape", "Enter"):
        page.keyboard.press(key)
    assert dialog.is_visible()
    assert value.input_value() == '{"typed": true}'
    assert stored(broker, "kept") == []
    page.keyboard.press("Control+Enter")
    page.get_by_text("Committed at partition 0, offset 0.").wait_for()
    assert stored(broker, "kept") == [b'{"typed": true}']
    page.get_by_role("button", name="Produce").click()
    dialog.wait_for()
    page.keyboard.press("Escape")  # nothing is typed yet
    dialog.wait_for(state="detached")


@pytest.mark.parametrize("place", ["overview", "topics", "groups", "topics/flights"])
def test_a_broker_that_hangs_is_seen_by_the_age_of_the_data(
    console: Console, broker: Broker, place: str
) -> None:
    page = console.page
    page.clock.install()
    console.open(place, afresh=True)
    page.locator(".loaded").first.wait_for()
    page.clock.run_for(6_000)
    assert page.locator(".age").count() == 0
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        for _ in range(40):
            page.clock.run_for(1_000)
            if page.locator(".loaded.stale").count():
                break
        page.get_by_text(re.compile(r"As of \d\d:\d\d:\d\d, \d+ s old\.")).wait_for()
        for _ in range(15):
            page.clock.run_for(1_000)
        page.get_by_text("The broker did not answer within 10 s.").first.wait_for()
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    for _ in range(100):
        page.clock.run_for(1_000)
        if not page.locator(".age").count():
            break
        httpx.get(f"{broker.base_url}/topics").raise_for_status()  # lets real time pass
    assert page.locator(".problem, .loaded.stale").count() == 0


def test_a_first_load_of_a_broker_that_hangs_ends_with_an_error(
    console: Console, broker: Broker
) -> None:
    page = console.page
    page.clock.install()
    console.open("groups", afresh=True)
    os.kill(broker.pid, signal.SIGSTOP)
    try:
        page.evaluate("location.hash = '#/topics/flights/configs'")
        page.locator(".bones").wait_for()
        for _ in range(12):
            page.clock.run_for(1_000)
        page.get_by_text("The broker did not answer within 10 s.").wait_for()
    finally:
        os.kill(broker.pid, signal.SIGCONT)
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("cleanup.policy").first.wait_for()
