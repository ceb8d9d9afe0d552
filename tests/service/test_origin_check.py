"""Host and Origin as tables: which names a broker answers under, and whose pages it serves.

Browsers send `Sec-Fetch-Site` to trustworthy addresses alone; elsewhere they send `Origin`, and a
page whose name was bound to the broker's address is of the same origin.
"""

import socket
from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, ends
from tests.service.instances import STRIMZI, created
from tidelog.service.http.errors import CrossSite
from tidelog.service.http.media_types import UnsupportedMediaType
from tidelog.service.security.origin_check import KNOWN_MAX, Sites, WrongHost
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import LogError

KEYS = {"security": "keys", "admin_key": "k" * 30}


def sites(**settings: Any) -> Sites:
    return Sites(Settings(store="memory://", **settings))


def refusal(
    policy: Sites, headers: dict[str, str], *, has_effects: bool = True
) -> type[LogError] | None:
    sent = {name.encode(): text.encode() for name, text in headers.items()}
    scope = {"path": "/topics", "headers": list(sent.items()), "server": ("10.0.0.1", 8082)}
    error = policy.refusal(scope, sent, has_effects=has_effects)
    return None if error is None else type(error)


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8082", "console.localhost", "127.0.0.1:8082", "10.1.2.3", "127.1",
        "[::1]:8082", "[2001:db8::1]", "broker-1:8082", "tidelog", "tidelog.logs.svc",
        "tidelog.logs.svc.cluster.local:8082", "ip-10-0-0-1.eu-west-1.compute.internal",
        "localhost.", socket.gethostname(), f"{socket.gethostname()}.local:8082",
        "log.example.com", "LOG.example.com:443", "a.corp.example", "a.b.corp.example:1",
        "peer.example.org", "",
    ],
)  # fmt: skip
def test_broker_answers_under_its_names(host: str) -> None:
    policy = sites(
        allowed_hosts="log.example.com; *.corp.example", peer_address="http://peer.example.org:9000"
    )
    assert refusal(policy, {"host": host}, has_effects=False) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.test", "evil.test:8082", "localhost.evil.test", "127.0.0.1.evil.test", "corp.example",
        "evilcorp.example", "log.example.com.evil.test", "evil.internal.test", "evil test", "a/b.c",
        "\xe9vil.test", "x" * 5000 + ".test", "internal.evil", "tidelog.logs",
    ],
)  # fmt: skip
def test_broker_answers_under_no_other_name(host: str) -> None:
    policy = sites(allowed_hosts="log.example.com;*.corp.example")
    for _ in range(2):  # what is refused is not remembered
        assert refusal(policy, {"host": host}, has_effects=False) is WrongHost
    assert len(policy.known) == 1


def test_names_do_not_count_where_clients_need_keys() -> None:
    assert refusal(sites(**KEYS), {"host": "evil.test"}) is None
    assert refusal(sites(**KEYS, allowed_hosts="a.b"), {"host": "evil.test"}) is WrongHost
    assert refusal(sites(allowed_hosts="*"), {"host": "evil.test"}) is None


def test_names_that_are_remembered_are_bounded() -> None:
    policy = sites()
    for number in range(KNOWN_MAX + 10):
        assert refusal(policy, {"host": f"h:{number}"}) is None
    assert len(policy.known) <= KNOWN_MAX + 1


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"origin": "http://log.example"}, None),
        ({"origin": "https://LOG.example"}, None),  # a proxy ends TLS
        ({"origin": "https://log.example:443"}, None),
        ({"origin": "http://log.example:3000"}, CrossSite),
        ({"origin": "http://evil.test"}, CrossSite),
        ({"origin": "http://evil.test", "sec-fetch-site": "same-origin"}, None),
        ({"origin": "null"}, CrossSite),
        ({"origin": ""}, CrossSite),
        ({"origin": "file://log.example"}, CrossSite),
        ({"origin": "http://log.example.evil.test"}, CrossSite),
        ({"origin": "http://evil.test@log.example"}, CrossSite),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "none"}, None),
        ({"sec-fetch-site": "same-site"}, CrossSite),
        ({"sec-fetch-site": "cross-site"}, CrossSite),
        ({"sec-fetch-site": "Cross-Site "}, CrossSite),
        ({"sec-fetch-site": "something new"}, CrossSite),
        ({"host": "inner:8082", "origin": "http://other.example"}, CrossSite),
        (
            {
                "host": "inner:8082",
                "x-forwarded-host": "log.example",
                "origin": "http://log.example",
            },
            None,
        ),
        (
            {
                "host": "log.example",
                "x-forwarded-port": "8443",
                "origin": "https://log.example:8443",
            },
            None,
        ),
        ({"host": "inner:8082", "origin": "https://public.example:8443"}, None),
        ({"host": "inner:8082", "origin": "https://public.example:9443"}, CrossSite),
        ({"sec-fetch-site": "same-origin", "content-length": "2"}, UnsupportedMediaType),
        ({"origin": "http://log.example", "transfer-encoding": "chunked"}, UnsupportedMediaType),
        ({"content-length": "2"}, None),  # no page
    ],
)
def test_pages_of_other_sites_have_no_effects(
    headers: dict[str, str], expected: type[LogError] | None
) -> None:
    policy = sites(allowed_hosts="log.example;public.example:8443")
    assert refusal(policy, {"host": "log.example", **headers}) is expected


def test_reads_of_other_sites_are_browsers_business() -> None:
    foreign = {"host": "h", "origin": "http://evil.test", "sec-fetch-site": "cross-site"}
    assert refusal(sites(), foreign, has_effects=False) is None


@pytest.mark.parametrize("text", ["http://a.b", "a b", "*.", "a.*", "*a.b", "a.b:x", "/", "[::1]"])
def test_entry_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(BadSettings, match="allowed_hosts"):
        sites(allowed_hosts=f"a.b;{text}")


async def test_health_is_answered_under_any_name(broker: Broker) -> None:
    for path, status in (("/healthy", 200), ("/topics", 421)):
        answer = await broker.http.get(path, headers={"host": "probe.example"})
        assert answer.status_code == status, answer.text


@pytest.mark.broker(allowed_hosts="log.example")
async def test_page_gets_reason_that_helps(broker: Broker) -> None:
    answer = await broker.http.get("/topics", headers={"host": "logs.example"})
    assert (answer.status_code, answer.json()["error_code"]) == (421, 42101)
    assert "allowed_hosts" in answer.json()["message"]


# -- requests of pages

TOPIC = b'{"topic_name":"u","partitions_count":1}'
RECORDS = b'{"records":[{"value":"AA=="}]}'
ROUTES = {
    "create": ("POST", "/admin/topics", TOPIC),
    "produce": ("POST", "/topics/t", RECORDS),
    "seal": ("POST", "/admin/topics/t/seal", b""),
    "instance": ("POST", "/consumers/g", b"{}"),
    "delete": ("DELETE", "{v3}/topics/t", b""),
    "config": ("PUT", "{v3}/topics/t/configs/retention.ms", b'{"value":"1"}'),
}
CORP = {"host": "broker.corp.test:8082"}
PAGES = {
    "another site, not trustworthy": CORP | {"origin": "http://evil.test"},
    "another site": {"sec-fetch-site": "cross-site"},
    "a sibling": {
        "host": "localhost:8082",
        "origin": "http://localhost:3000",
        "sec-fetch-site": "same-site",
    },
    "a sandbox": CORP | {"origin": "null"},
}
OWN = {"host": "localhost:8082", "origin": "http://localhost:8082"}
EVIL = {"host": "evil.test:8082", "origin": "http://evil.test:8082"}


async def sent(broker: Broker, route: str, headers: dict[str, str]) -> httpx.Response:
    method, path, body = ROUTES[route]
    url = path.format(v3=broker.v3)
    return await broker.http.request(method, url, content=body, headers=headers)


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("route", ROUTES)
async def test_page_of_another_site_changes_nothing(broker: Broker, page: str, route: str) -> None:
    before = broker.log.state.encode()
    answer = await sent(broker, route, {**PAGES[page], "content-type": "application/json"})
    assert (answer.status_code, answer.json()["error_code"]) == (403, 40301)
    assert broker.log.state.encode() == before


@pytest.mark.broker(topics={"t": 1})
async def test_page_of_another_site_moves_no_position(broker: Broker) -> None:
    consumer = await created(broker, **STRIMZI)
    await consumer.ok("POST", "/subscription", {"topics": ["t"]})
    answer = await consumer("GET", "/records", **PAGES["another site, not trustworthy"])
    assert answer.status_code == 403


async def test_name_that_is_not_brokers_is_refused(broker: Broker) -> None:
    headers = EVIL | {"sec-fetch-site": "same-origin", "content-type": "application/json"}
    assert (await broker.http.get("/topics", headers=headers)).status_code == 421
    assert (await sent(broker, "create", headers)).status_code == 421


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize("route", ["create", "produce"])
async def test_page_without_type_of_its_body_is_refused(broker: Broker, route: str) -> None:
    assert (await sent(broker, route, OWN)).status_code == 415


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8082"},
        {"host": "127.0.0.1:8082", "origin": "http://127.0.0.1:8082"},
        {"host": "[::1]:8082", "origin": "http://[::1]:8082", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {},
    ],
    ids=str,
)
async def test_other_requests_are_served(broker: Broker, headers: dict[str, str]) -> None:
    typed = {"content-type": "application/json", **headers}
    assert (await sent(broker, "create", typed)).status_code == 201
    assert (await sent(broker, "produce", typed)).status_code == 200
    assert ends(broker.log) == [1]
    foreign = {"sec-fetch-site": "cross-site"}
    assert (await broker.http.get("/topics", headers=foreign)).status_code == 200
