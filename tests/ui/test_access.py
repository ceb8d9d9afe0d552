"""The console where security is on: login, keys, ACLs, quotas, and the end of a session."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.support.broker import Broker
from tests.ui.conftest import CHROMIUM, JSON, Console
from tidelog.service.security import session_cookie

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Route

pytestmark = [pytest.mark.xdist_group("ui"), pytest.mark.timeout(90)]

ADMIN_KEY = "an-administrators-key-of-many-characters"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    if CHROMIUM is None:
        pytest.skip("the console is tested in chromium: apt-get install chromium")
    folder = tmp_path_factory.mktemp("ui-keys")
    (folder / "key").write_text(ADMIN_KEY)
    (folder / "key").chmod(0o600)
    with Broker(folder, security="keys", admin_key=f"@{folder / 'key'}") as broker:
        yield broker


@pytest.fixture
def console(context: "BrowserContext", broker: Broker) -> Iterator[Console]:
    """A page without a login; at its end it must have no errors."""
    context.clear_cookies()
    page = context.new_page()
    try:
        console = Console(page, broker.base_url)
        page.goto(f"{broker.base_url}/")
        yield console
        console.allow_status(401)
        console.check()
    finally:
        page.close()


def log_in(console: Console, key: str) -> None:
    console.page.get_by_label("Key", exact=True).fill(key)
    console.page.get_by_role("button", name="Log in").click()
    console.page.get_by_role("navigation", name="Pages").wait_for()


def key_of(broker: Broker, principal: str) -> str:
    made = httpx.post(
        f"{broker.base_url}/tidelog/v1/keys",
        json={"principal": principal},
        headers={"authorization": f"Bearer {ADMIN_KEY}"},
    )
    return str(made.raise_for_status().json()["secret"])


def test_a_session_from_its_login_to_its_end(console: Console) -> None:
    page = console.page
    page.get_by_label("Key", exact=True).fill("not a key")
    page.get_by_role("button", name="Log in").click()
    page.get_by_text("Invalid or expired key.").wait_for()
    log_in(console, ADMIN_KEY)
    page.get_by_role("heading", name="Overview").wait_for()
    assert ADMIN_KEY not in page.evaluate("document.cookie + JSON.stringify(localStorage)")
    assert page.evaluate("document.cookie") == ""
    page.reload()
    page.get_by_role("heading", name="Overview").wait_for()
    console.open("access/keys")
    page.get_by_text("super user").wait_for()
    page.get_by_role("button", name="Log out").last.click()
    page.get_by_label("Key", exact=True).wait_for()
    page.reload()
    page.get_by_label("Key", exact=True).wait_for()


def test_a_key_and_what_it_may(console: Console, broker: Broker) -> None:
    page = console.page
    log_in(console, ADMIN_KEY)
    console.open("access/keys")
    page.get_by_role("button", name="Create key").click()
    dialog = page.get_by_role("dialog")
    dialog.locator("[name=principal]").fill("app")
    dialog.locator("[name=note]").fill("the shop")
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.locator("[name=secret]").input_value()
    headers = {"authorization": f"Bearer {secret}"}
    dialog.get_by_role("button", name="Done").click()
    row = page.get_by_role("row", name="User:app")
    row.wait_for()
    assert secret not in page.content()
    assert httpx.get(f"{broker.base_url}/topics", headers=headers).json() == []

    page.get_by_role("tab", name="ACLs").click()
    page.get_by_role("button", name="Add ACL").click()
    dialog.locator("[name=principal]").fill("app")
    dialog.locator("[name=pattern]").select_option("PREFIXED")
    dialog.locator("[name=name]").fill("shop.")
    dialog.get_by_label("WRITE").check()
    dialog.get_by_text("This also allows DESCRIBE.").wait_for()
    dialog.get_by_label("CREATE", exact=True).check()
    dialog.get_by_role("button", name="Add").click()
    page.get_by_role("row", name="User:app").nth(2).wait_for()
    made = httpx.post(
        f"{broker.base_url}/admin/topics", json={"topic_name": "shop.orders"}, headers=headers
    )
    assert made.status_code == 201, made.text
    page.get_by_role("button", name="Remove: User:app may CREATE topic shop.….").click()
    dialog.get_by_role("button", name="Remove").click()
    page.get_by_text("2 of 2 ACLs").wait_for()

    page.get_by_role("tab", name="Quotas").click()
    page.get_by_role("button", name="Set quotas").click()
    dialog.locator("[name=principal]").fill("app")
    dialog.locator("[name=produces]").fill("20")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("row", name="User:app").wait_for()
    body = {"records": [{"value": "x" * 400}]}
    url = f"{broker.base_url}/topics/shop.orders"
    statuses = [httpx.post(url, json=body, headers=headers | JSON).status_code for _ in range(2)]
    assert statuses == [200, 429]
    page.get_by_role("button", name="Remove User:app").click()
    dialog.get_by_role("button", name="Remove").click()
    page.get_by_text("No quotas").wait_for()

    page.get_by_role("tab", name="Keys").click()
    page.get_by_role("button", name="Delete key of User:app").click()
    dialog.get_by_role("button", name="Delete").click()
    row.wait_for(state="detached")
    assert httpx.get(f"{broker.base_url}/topics", headers=headers).status_code == 401


def test_a_principal_with_few_rights_sees_its_own_pages(console: Console, broker: Broker) -> None:
    page = console.page
    log_in(console, key_of(broker, "User:guest"))
    page.get_by_role("heading", name="Topics").wait_for()  # not the overview
    page.get_by_text("No topics yet").wait_for()
    console.open("access/acls")
    page.get_by_text("User:guest may not DESCRIBE the cluster").wait_for()
    assert page.get_by_role("row", name="User:").count() == 0, "no ACL of others is shown"
    console.allow_status(403)


def test_a_session_ends_while_a_page_is_open(console: Console, broker: Broker) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    url = f"{broker.base_url}/tidelog/v1/keys"
    log_in(console, key_of(broker, "User:leaving"))
    keys = httpx.get(url, headers=headers).json()["data"]
    own = [key for key in keys if key["principal"] == "User:leaving"]
    (key_id,) = [key["key_id"] for key in own if key["note"] != session_cookie.NOTE]
    httpx.delete(f"{url}/{key_id}", headers=headers).raise_for_status()
    # The console asks again every half a minute.
    page = console.page
    again = page.get_by_role("dialog", name="Your session has ended")
    again.get_by_label("Key", exact=True).wait_for(timeout=240_000)
    page.keyboard.press("Escape")
    assert again.is_visible()
    backdrop = "getComputedStyle(document.querySelector('dialog'), '::backdrop').backgroundColor"
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(backdrop) == page.evaluate(ground), "the page cannot be seen"


def test_what_was_typed_survives_the_end_of_a_session(console: Console, broker: Broker) -> None:
    broker_headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    body = {"topic_name": "typing", "partitions_count": 1}
    url = f"{broker.base_url}/admin/topics"
    httpx.post(url, json=body, headers=broker_headers).raise_for_status()
    log_in(console, ADMIN_KEY)
    page = console.open("topics/typing/records")
    page.get_by_role("button", name="Produce").click()
    dialog = page.get_by_role("dialog", name="Produce a record")
    dialog.locator("[name=value]").fill('{"long": "text"}')
    page.context.clear_cookies()
    dialog.get_by_role("button", name="Produce").click()
    again = page.get_by_role("dialog", name="Your session has ended")
    again.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    again.get_by_role("button", name="Log in").click()
    again.wait_for(state="detached")
    assert dialog.locator("[name=value]").input_value() == '{"long": "text"}'
    dialog.get_by_role("button", name="Produce").click()
    page.get_by_text("Committed at partition 0, offset 0.").wait_for()


def test_a_new_key_is_not_lost(console: Console, broker: Broker) -> None:
    """Neither by a lost answer nor by a click beside the dialog with its secret."""
    log_in(console, ADMIN_KEY)
    page = console.open("access/keys")
    page.get_by_role("button", name="Create key").click()
    dialog = page.get_by_role("dialog")

    def lose(route: "Route") -> None:
        route.fetch()
        route.abort("connectionreset")

    page.route("**/tidelog/v1/keys", lose, times=1)
    dialog.locator("[name=principal]").fill("lost")
    dialog.get_by_role("button", name="Create").click()
    dialog.get_by_text("cannot be reached").wait_for()
    dialog.get_by_role("button", name="Create").click()
    secret = dialog.locator("[name=secret]").input_value()
    page.mouse.click(5, 400)
    for _ in range(3):
        page.keyboard.press("Escape")
    assert dialog.locator("[name=secret]").input_value() == secret
    dialog.get_by_role("button", name="Done").click()
    dialog.wait_for(state="detached")
    url = f"{broker.base_url}/tidelog/v1"
    said = httpx.get(f"{url}/me", headers={"authorization": f"Bearer {secret}"}).json()
    assert said["principal"] == "User:lost"
    keys = httpx.get(f"{url}/keys", headers={"authorization": f"Bearer {ADMIN_KEY}"}).json()
    assert [key["principal"] for key in keys["data"]].count("User:lost") == 1
    console.wrong = [message for message in console.wrong if "CONNECTION_RESET" not in message]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_its_pages_in_both_themes_and_on_a_phone(console: Console, theme: "str") -> None:
    page = console.page
    page.emulate_media(color_scheme=theme)  # type: ignore[arg-type]
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_label("Key", exact=True).wait_for()
    wide = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(wide) <= 0
    log_in(console, ADMIN_KEY)
    for place in ("access/keys", "access/acls", "access/quotas"):
        console.open(place)
        page.get_by_role("tab", name="Quotas").wait_for()
        assert page.evaluate(wide) <= 0, place
        assert page.locator(".problem").count() == 0, place
