"""Host and Origin as tables: which names a broker answers under, and whose pages it serves."""

import socket
from typing import Any

import pytest

from tests.service.conftest import Broker, broker_on
from tidelog.service.http.errors import CrossSite
from tidelog.service.http.media_types import UnsupportedMediaType
from tidelog.service.security.origin_check import KNOWN_MAX, Sites, WrongHost
from tidelog.service.settings.fields import BadSettings
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore

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
def test_a_broker_answers_under_its_names(host: str) -> None:
    policy = sites(
        allowed_hosts="log.example.com; *.corp.example",
        peer_address="http://peer.example.org:9000",
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
def test_a_broker_answers_under_no_other_name(host: str) -> None:
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


def test_reads_of_other_sites_are_the_browsers_business() -> None:
    foreign = {"host": "h", "origin": "http://evil.test", "sec-fetch-site": "cross-site"}
    assert refusal(sites(), foreign, has_effects=False) is None


@pytest.mark.parametrize("text", ["http://a.b", "a b", "*.", "a.*", "*a.b", "a.b:x", "/", "[::1]"])
def test_an_entry_that_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(BadSettings, match="allowed_hosts"):
        sites(allowed_hosts=f"a.b;{text}")


async def test_health_is_answered_under_any_name(broker: Broker) -> None:
    for path, status in (("/healthy", 200), ("/topics", 421)):
        answer = await broker.http.get(path, headers={"host": "probe.example"})
        assert answer.status_code == status, answer.text


async def test_a_page_gets_a_reason_that_helps() -> None:
    async with broker_on(MemoryStore(), allowed_hosts="log.example") as broker:
        answer = await broker.http.get("/topics", headers={"host": "logs.example"})
        assert (answer.status_code, answer.json()["error_code"]) == (421, 42101)
        assert "allowed_hosts" in answer.json()["message"]
