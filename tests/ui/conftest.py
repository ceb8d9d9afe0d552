"""A broker with something in it, and a browser that tells of everything that goes wrong."""

import base64
import shutil
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httpx
import pytest

from tests.service.kafka.wire import framed
from tests.support.broker import Broker
from tests.support.ports import free_port
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE_MS = 120_000
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
"""A page that renders it as markup gets the title `owned`."""
HOSTILE_GROUP = HOSTILE.partition("<script>")[0]
"""No path names a group with a slash in it."""
NAMED = ApiVersionsRequest(client_software_name="kafka-library", client_software_version="1.2")
"""A connected Kafka client names its library; its client id is HOSTILE."""
JSON = {"content-type": "application/vnd.kafka.json.v2+json"}
V2 = {"content-type": "application/vnd.kafka.v2+json"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One broker for all tests, with two topics, a group that is behind, and a Kafka client."""
    if CHROMIUM is None:
        pytest.skip("the console is tested in chromium: apt-get install chromium")
    folder, hot_dir = tmp_path_factory.mktemp("ui"), tmp_path_factory.mktemp("hot")
    port = free_port()
    with Broker(folder, hot_dir=hot_dir, kafka_port=port) as broker:
        with httpx.Client(base_url=broker.base_url) as client:
            _fill(broker, client)
        with socket.create_connection(("127.0.0.1", port), 60) as kafka_client:
            kafka_client.sendall(framed(NAMED, 3, client_id=HOSTILE))
            assert kafka_client.recv(4), "the answer"
            yield broker


def _fill(broker: Broker, client: httpx.Client) -> None:
    broker.create_topic("flights", 3)
    broker.create_topic("hostile", 1, cleanup_policy="compact")
    for _ in range(3):
        rows = [{"key": f"k{n}", "value": {"n": n, "carrier": "UA"}} for n in range(60)]
        _post(client, "/topics/flights", rows)
        client.post("/admin/topics/flights/seal").raise_for_status()
    _post(client, "/topics/flights", [{"key": f"k{n}", "value": {"tail": n}} for n in range(30)])
    _post(client, "/topics/hostile", [{"key": HOSTILE, "value": {"html": HOSTILE}}])
    cluster = client.get("/v3/clusters").json()["data"][0]["cluster_id"]
    record = {
        "key": {"type": "BINARY", "data": base64.b64encode(b"\x00\xff\x01").decode()},
        "value": {"type": "STRING", "data": HOSTILE},
        "headers": [{"name": HOSTILE, "value": base64.b64encode(HOSTILE.encode()).decode()}],
    }
    path = f"/v3/clusters/{cluster}/topics/hostile/records"
    assert client.post(path, json=record).json()["error_code"] == 200
    for group in ("behind", HOSTILE_GROUP):
        offsets = [{"topic_name": "flights", "partition_id": n, "offset": 5} for n in range(3)]
        body = {
            "topics": [],
            "consumer_groups": [{"consumer_group_id": group, "offsets": offsets}],
        }
        client.post(f"/v3/clusters/{cluster}/transactions", json=body).raise_for_status()
    member = {"name": "reader-1", "format": "json"}
    client.post("/consumers/reading", headers=V2, json=member).raise_for_status()
    path = "/consumers/reading/instances/reader-1/subscription"
    client.post(path, headers=V2, json={"topics": ["flights"]}).raise_for_status()


def _post(client: httpx.Client, path: str, records: list[dict[str, Any]]) -> None:
    client.post(path, headers=JSON, json={"records": records}).raise_for_status()


@pytest.fixture(scope="module")
def context(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Iterator["BrowserContext"]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:  # runs a loop in this thread
        context = playwright.chromium.launch_persistent_context(
            tmp_path_factory.mktemp("chromium"),
            executable_path=CHROMIUM,
            args=list(FLAGS),
            viewport={"width": 1280, "height": 860},
            color_scheme="light",
        )
        context.set_default_timeout(PATIENCE_MS)
        yield context
        context.close()


class Console:
    """A page, and all that went wrong in it since it was opened."""

    def __init__(self, page: "Page", base_url: str) -> None:
        self.page = page
        self.base_url = base_url
        self.wrong: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("requestfailed", self._on_failed)
        page.on("request", self._on_request)

    def open(self, fragment: str, *, afresh: bool = False) -> "Page":
        """A place of the console, with what it waits for; `afresh` with all of its files."""
        if afresh or not self.page.url.startswith(self.base_url):
            self.page.goto("about:blank")
            self.page.goto(f"{self.base_url}/ui/#/{fragment}")
        else:
            self.page.evaluate("hash => { location.hash = hash }", f"#/{fragment}")
        place = unquote(fragment.partition("?")[0])
        self.page.wait_for_function(
            "place => document.querySelector('main')?.dataset.place === place"
            " && !document.querySelector('[aria-busy=true]')",
            arg=place,
        )
        return self.page

    def allow_status(self, status: int) -> None:
        """The browser says of its own that a request was refused, which was asked for."""
        self.wrong = [message for message in self.wrong if f"status of {status}" not in message]

    def check(self) -> None:
        assert self.wrong == []
        assert self.page.title() != "owned"

    def _on_console(self, message: Any) -> None:
        if message.type in {"error", "warning"}:
            self.wrong.append(f"console: {message.text}")

    def _on_failed(self, request: Any) -> None:
        if request.failure != "net::ERR_ABORTED":  # the page has gone on: no failure
            self.wrong.append(f"failed: {request.url}: {request.failure}")

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.base_url, "data:", "about:")):
            self.wrong.append(f"elsewhere: {request.url}")


@pytest.fixture
def console(context: "BrowserContext", broker: Broker) -> Iterator[Console]:
    """A fresh page; at its end nothing may have gone wrong."""
    page = context.new_page()
    try:
        console = Console(page, broker.base_url)
        yield console
        console.check()
    finally:
        page.close()
