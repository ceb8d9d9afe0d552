"""Servers, retries, failover: what `tidelog.client` does when a request fails."""

import asyncio
from typing import Any

import pytest

from tests.service.client.faults import (
    BUSY,
    GONE,
    HELD,
    LOST,
    OK,
    REFUSED,
    THROTTLED,
    UNKNOWN,
    FaultyTransport,
    script,
)
from tests.service.conftest import Broker
from tests.support import vloop
from tidelog.client import BadArgument, NotFound, NotReachable, Refused
from tidelog.service.client.connection import RESPONSE_S, RESPONSE_S_MIN, Connection
from tidelog.service.client.servers import Servers, parsed

A, B, C = "http://a:1", "http://b:2", "http://c:3"


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://a:1", [A]),
        ("a:1", [A]),
        ("a:1,b:2", [A, B]),
        (" http://a:1/ , https://b/x ", [A, "https://b/x"]),
        ("a:1,a:1,", [A]),
        ("[::1]:8082", ["http://[::1]:8082"]),
    ],
)
def test_servers_are_urls_or_host_and_port(text: str, urls: list[str]) -> None:
    assert parsed(text) == urls


@pytest.mark.parametrize("text", ["", ",", "a", "ftp://a:1", "http://", "a:b", "http://a:99999999"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadArgument, match="server"):
        parsed(text)


def test_after_failure_next_server_is_current() -> None:
    servers = Servers("a:1,b:2")
    servers.learn([C, A])
    assert servers.all == [A, B, C]
    servers.move_on(B)
    assert servers.current == A, "another request has moved on already"
    for after in (B, C, A):
        servers.move_on(servers.current)
        assert servers.current == after
    servers.move_on(A)
    servers.move_on(B)
    servers.learn([])
    assert servers.all == [A, B, C], "the current server stays known"


def connection(transport: FaultyTransport, servers: str = "a:1,b:2", **options: Any) -> Connection:
    return Connection(servers, transport=transport, **options)


def hosts(transport: FaultyTransport) -> str:
    return "".join(request.url.host for request in transport.seen)


async def test_request_that_no_broker_got_goes_to_next_one(broker: Broker) -> None:
    transport = FaultyTransport(broker.app, script(REFUSED))
    async with connection(transport) as client:
        await client.get("/topics")
        await client.get("/topics")
    assert hosts(transport) == "abb"


@pytest.mark.parametrize("fault", [LOST, BUSY, UNKNOWN])
async def test_request_that_broker_may_have_got_is_not_repeated_without_time(
    broker: Broker, fault: str
) -> None:
    transport = FaultyTransport(broker.app, script(fault))
    async with connection(transport) as client:
        with pytest.raises(NotReachable) as caught:
            await client.get("/topics")
    assert hosts(transport) == "a"
    assert caught.value.is_unknown == (fault != BUSY)


async def test_with_time_it_is_repeated_elsewhere_at_once(broker: Broker) -> None:
    transport = FaultyTransport(broker.app, script(BUSY, LOST, UNKNOWN, OK))
    async with connection(transport, "a:1,b:2,c:3", retry_s=30) as client:
        await client.get("/topics")
    assert hosts(transport) == "abca"
    assert client.retries == 3


@pytest.mark.parametrize(("fault", "is_unknown"), [(LOST, True), (BUSY, False)])
async def test_refusal_after_lost_response_leaves_outcome_unknown(
    broker: Broker, fault: str, is_unknown: bool
) -> None:
    transport = FaultyTransport(broker.app, script(fault, GONE))
    async with connection(transport, retry_s=30) as client:
        with pytest.raises(NotFound) as caught:
            await client.get("/topics")
    assert caught.value.is_unknown == is_unknown


async def test_throttled_request_stays_with_its_broker(broker: Broker) -> None:
    transport = FaultyTransport(broker.app, script(THROTTLED, THROTTLED))
    async with connection(transport, retry_s=30) as client:
        await client.get("/topics")
    assert hosts(transport) == "aaa"


async def test_deadline_ends_retries_and_unknown_outcome_stays_unknown(
    broker: Broker,
) -> None:
    transport = FaultyTransport(broker.app, script(UNKNOWN, *[REFUSED] * 50))
    async with connection(transport, retry_s=0.3) as client:
        with pytest.raises(NotReachable, match="connection refused") as caught:
            await client.get("/topics")
    assert caught.value.is_unknown
    assert 4 <= len(transport.seen) < 20


@pytest.mark.parametrize("retry_s", [12.0, 60.0, 120.0])
def test_silent_broker_leaves_time_for_others(retry_s: float) -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    faults = script(BUSY)
    transport = FaultyTransport(
        app, lambda request: HELD if request.url.host == "b" else faults(request)
    )

    async def main() -> float:
        async with connection(transport, "a:1", retry_s=retry_s) as client:
            client.servers.learn([B])
            await client.get("/topics")
        return asyncio.get_running_loop().time()

    took_s = vloop.run(main)
    assert hosts(transport) == "aba"
    assert took_s < retry_s


async def test_response_may_take_half_of_time_that_is_left() -> None:
    async with connection(FaultyTransport(None), "a:1") as client:
        assert client.response_s(4.0) == RESPONSE_S
        client.servers.learn([B])
        times_s = [client.response_s(left_s) for left_s in (float("inf"), 200.0, 60.0, 1.0, -1.0)]
        assert times_s == [RESPONSE_S, RESPONSE_S, 30.0, RESPONSE_S_MIN, RESPONSE_S_MIN]


@pytest.mark.parametrize("failures", [1, 4], ids=["at once", "after pauses"])
async def test_response_may_take_longer_by_wait_of_request(broker: Broker, failures: int) -> None:
    transport = FaultyTransport(broker.app, script(*[BUSY] * failures))
    async with connection(transport, retry_s=2.0) as client:
        await client.get("/topics", wait_s=30.0)
    limits_s = [request.extensions["timeout"]["read"] for request in transport.seen]
    assert limits_s == [30.0 + RESPONSE_S_MIN] * (failures + 1)


async def test_definite_no_is_error_with_status_and_code(broker: Broker) -> None:
    async with connection(FaultyTransport(broker.app), retry_s=30) as client:
        with pytest.raises(NotFound) as caught:
            await client.get("/topics/nowhere")
        assert (caught.value.status, caught.value.code) == (404, 40403)
        with pytest.raises(Refused) as refused:
            await client.post("/admin/topics", json={"topic_name": "a/b"})
        assert refused.value.status == 400
    assert len(client.servers.all) == 2


async def test_other_brokers_are_learned(broker: Broker) -> None:
    async with connection(FaultyTransport(broker.app), "a:1") as client:
        client.learn_soon()
        client.learn_soon()
        for _ in range(200):
            await asyncio.sleep(0.005)
            if client.servers.learned or client._learning is None:
                break
        assert client.servers.learned == [], "the one broker is the named one"


@pytest.mark.parametrize("servers", ["http://tide:8082/prefix"])
async def test_behind_path_of_proxy_no_broker_is_learned(broker: Broker, servers: str) -> None:
    transport = FaultyTransport(broker.app)
    async with connection(transport, servers) as client:
        await client.learn()
    assert transport.seen == []
