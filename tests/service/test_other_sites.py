"""A page of another site writes, wherever a browser does not reach the broker as localhost.

Browsers send `Sec-Fetch-Site` to trustworthy addresses alone; elsewhere they send `Origin`, and a
page whose name was bound to the broker's address is of the same origin.
"""

import pytest

from tests.service.conftest import broker_on
from tests.service.instances import STRIMZI, Instance, created
from tidelog.storage.store.memory import MemoryStore

TOPIC = b'{"topic_name":"u","partitions_count":1}'
RECORDS = b'{"records":[{"value":"AA=="}]}'

ROUTES = {
    "create": ("POST", "/admin/topics", TOPIC),
    "produce": ("POST", "/topics/t", RECORDS),
    "seal": ("POST", "/admin/topics/t/seal", b""),
    "delete": ("DELETE", "/v3/clusters/{cluster}/topics/t", b""),
}
PAGES = {
    "another site, not trustworthy": {
        "host": "broker.corp.test:8082",
        "origin": "http://evil.test",
    },
    "a sibling": {
        "host": "localhost:8082",
        "origin": "http://localhost:3000",
        "sec-fetch-site": "same-site",
    },
    "a sandbox": {"host": "broker.corp.test:8082", "origin": "null"},
}


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("route", ROUTES)
async def test_a_page_of_another_site_changes_nothing(page: str, route: str) -> None:
    method, path, body = ROUTES[route]
    async with broker_on(MemoryStore()) as broker:
        await broker.log.create_topic("t", 1, {})
        before = broker.log.state.encode()
        url = path.format(cluster=broker.log.wal.cluster.cluster_id)
        headers = {**PAGES[page], "content-type": "application/json"}
        answer = await broker.http.request(method, url, content=body, headers=headers)
        assert answer.status_code == 403
        assert broker.log.state.encode() == before


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_name_that_is_not_the_brokers_is_refused(method: str) -> None:
    async with broker_on(MemoryStore()) as broker:
        headers = {
            "host": "evil.test:8082",
            "origin": "http://evil.test:8082",
            "sec-fetch-site": "same-origin",
            "content-type": "application/json",
        }
        path, body = ("/topics", b"") if method == "GET" else ("/admin/topics", TOPIC)
        answer = await broker.http.request(method, path, content=body, headers=headers)
        assert answer.status_code == 421


@pytest.mark.parametrize("route", ["create", "produce"])
async def test_a_page_says_what_its_body_is(route: str) -> None:
    method, path, body = ROUTES[route]
    async with broker_on(MemoryStore()) as broker:
        await broker.log.create_topic("t", 1, {})
        headers = {"host": "localhost:8082", "origin": "http://localhost:8082"}
        answer = await broker.http.request(method, path, content=body, headers=headers)
        assert answer.status_code == 415


async def test_a_page_of_another_site_moves_no_position() -> None:
    async with broker_on(MemoryStore()) as broker:
        await broker.log.create_topic("t", 1, {})
        consumer: Instance = await created(broker, **STRIMZI)
        await consumer.ok("POST", "/subscription", {"topics": ["t"]})
        answer = await consumer("GET", "/records", **PAGES["another site, not trustworthy"])
        assert answer.status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:8082"},
        {"host": "127.0.0.1:8082", "origin": "http://127.0.0.1:8082"},
        {"host": "[::1]:8082", "origin": "http://[::1]:8082", "sec-fetch-site": "same-origin"},
    ],
    ids=["localhost", "an address", "its own page"],
)
async def test_others_may(headers: dict[str, str]) -> None:
    async with broker_on(MemoryStore()) as broker:
        sent = {"content-type": "application/json", **headers}
        answer = await broker.http.post("/admin/topics", content=TOPIC, headers=sent)
        assert answer.status_code == 201, answer.text
