"""Records that come after a key or a right was taken away go out to who waits for them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from tests.service.conftest import V2, Broker, append, until
from tests.service.keyed import ALICE, allow, key_of, open_to_alice
from tidelog.service.peers.forwarding import _Request, _Response
from tidelog.storage.core.actions import DeleteKey

LATE = b'"late"'
PATH = "/topics/t/partitions/0/records"
ANSWER_S = 60.0
WAYS = {
    "long poll": ("offset=0&timeout=30000", b"application/vnd.kafka.json.v2+json"),
    "events": ("offset=0", b"text/event-stream"),
    "lines": ("offset=0&follow=true", b"application/x-ndjson"),
}


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with open_to_alice() as broker:
        yield broker


async def deny(broker: Broker) -> None:
    await allow(broker.log, ALICE, "READ", permission="DENY")


async def delete_key(broker: Broker) -> None:
    (key_id,) = broker.log.state.access.keys
    await broker.log.change_access(DeleteKey(key_id))


REVOKE = {"a DENY": deny, "a deleted key": delete_key}


async def read(broker: Broker, query: str, accept: bytes, header: dict[str, str]) -> bytes:
    """The body of an answer, also of a stream; its client stays until the end."""
    body: list[bytes] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        body.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "GET",
        "path": PATH,
        "query_string": query.encode(),
        "headers": [(b"accept", accept), *((k.encode(), v.encode()) for k, v in header.items())],
        "client": ("127.0.0.1", 1),
    }
    await broker.app(scope, receive, send)
    return b"".join(body)


async def late(
    broker: Broker, reading: Awaitable[bytes], revoke: Callable[[Broker], Awaitable[None]]
) -> bytes:
    """The answer of a reader that waits and loses its rights, before there is a record."""
    task = asyncio.ensure_future(reading)
    try:
        await until(lambda: broker.log._waiting or task.done(), ANSWER_S)
        assert not task.done()
        await revoke(broker)
        await append(broker.log, LATE)
        async with asyncio.timeout(ANSWER_S):
            return await task
    finally:
        task.cancel()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("revoked", REVOKE)
async def test_a_reader_without_rights_gets_no_later_record(
    broker: Broker, way: str, revoked: str
) -> None:
    query, accept = WAYS[way]
    header = await key_of(broker.log, ALICE)
    assert LATE not in await late(broker, read(broker, query, accept, header), REVOKE[revoked])


async def test_a_forwarded_read_without_a_key_gets_no_later_record(broker: Broker) -> None:
    """A broker forwards the key's id, and its message is signed: one without is not served at all
    (S11)."""
    header = await key_of(broker.log, ALICE) | {"content-type": V2}
    body = {"name": "i", "format": "json", "auto.offset.reset": "earliest"}
    made = await broker.http.post("/consumers/g", content=json.dumps(body), headers=header)
    made.raise_for_status()
    path = "/consumers/g/instances/i"
    topics = '{"topics":["t"]}'
    subscribed = await broker.http.post(f"{path}/subscription", content=topics, headers=header)
    subscribed.raise_for_status()
    said = _Request(
        "GET",
        f"{path}/records",
        b"timeout=30000",
        [(b"accept", b"application/vnd.kafka.json.v2+json")],
        "http",
        ("127.0.0.1", 8082),
        b"",
        (ALICE, "127.0.0.1"),
        (next(iter(broker.log.state.access.keys)), "", 0),
    )
    forwarded = broker.app.forwarded

    async def reading() -> bytes:
        answer = await forwarded.take(msgspec.msgpack.encode(said), b"ticket", is_trusted=True)
        return msgspec.msgpack.decode(answer, type=_Response).body

    try:
        assert LATE not in await late(broker, reading(), delete_key)
    finally:
        forwarded.settle(b"ticket", has_arrived=True)
