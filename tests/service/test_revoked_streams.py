"""Readers that wait and lose a key, a right, a session or a token get no later record."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest

from tests.service.conftest import JSON, V2, Broker, append, until
from tests.service.keyed import (
    ADMIN,
    ADMIN_KEY,
    ALICE,
    CONSOLE,
    OPEN_TO_ALICE,
    allow,
    assert_denied,
    assert_unknown,
    key_of,
)
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
INSTANCE = "/consumers/g/instances/i"
SUBSCRIBED = (
    ("/consumers/g", {"name": "i", "format": "json", "auto.offset.reset": "earliest"}),
    (f"{INSTANCE}/subscription", {"topics": ["t"]}),
)
pytestmark = OPEN_TO_ALICE


async def deny_topic(broker: Broker) -> None:
    await allow(broker.log, ALICE, "READ", permission="DENY")


async def deny_group(broker: Broker) -> None:
    await allow(broker.log, ALICE, "READ", "GROUP", "g", permission="DENY")


async def delete_key(broker: Broker) -> None:
    (key_id,) = broker.log.state.access.keys
    await broker.log.access.change(DeleteKey(key_id))


async def read(
    broker: Broker,
    query: str,
    accept: bytes,
    header: dict[str, str],
    parts: list[bytes] | None = None,
) -> bytes:
    """The body of an answer, also of a stream; its client stays until the end.

    `parts` has what has come of it so far.
    """
    body: list[bytes] = [] if parts is None else parts

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


@asynccontextmanager
async def waiting(broker: Broker, reading: Awaitable[Any]) -> AsyncIterator[asyncio.Future[Any]]:
    """A reader that waits for a record; the record comes at the end of the block."""
    task = asyncio.ensure_future(reading)
    try:
        await until(lambda: broker.log._log.waiting or task.done(), ANSWER_S)
        assert not task.done()
        yield task
        await append(broker.log, LATE)
        async with asyncio.timeout(ANSWER_S):
            await asyncio.wait({task})
    finally:
        task.cancel()


@asynccontextmanager
async def forwarded(
    broker: Broker, principal: str, proof: tuple[str, str, int]
) -> AsyncIterator[Awaitable[bytes]]:
    """A read of the instance by way of another broker."""
    said = _Request(
        "GET",
        f"{INSTANCE}/records",
        b"timeout=30000",
        [(b"accept", b"application/vnd.kafka.json.v2+json")],
        "http",
        ("127.0.0.1", 8082),
        b"",
        (principal, "127.0.0.1"),
        proof,
    )
    served = broker.app.forwarded

    async def reading() -> bytes:
        answer = await served.take(msgspec.msgpack.encode(said), b"ticket", is_trusted=True)
        return bytes(msgspec.msgpack.decode(answer, type=_Response).body)

    try:
        yield reading()
    finally:
        served.settle(b"ticket", has_arrived=True)


async def subscribe(broker: Broker, header: dict[str, str]) -> None:
    for path, body in SUBSCRIBED:
        (await broker.http.post(path, json=body, headers=header)).raise_for_status()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("revoke", "code"), [(deny_topic, b"40301"), (delete_key, b"40101")])
async def test_reader_without_rights_gets_no_later_record(
    broker: Broker, way: str, revoke: Callable[[Broker], Awaitable[None]], code: bytes
) -> None:
    header = await key_of(broker.log, ALICE)
    async with waiting(broker, read(broker, *WAYS[way], header)) as task:
        await revoke(broker)
    assert LATE not in task.result()
    assert code in task.result()
    assert (b"event: tidelog-error" in task.result()) == (way == "events")


@pytest.mark.parametrize("way", WAYS)
async def test_logout_ends_what_session_reads(broker: Broker, way: str) -> None:
    answer = await broker.http.post("/tidelog/v1/login", json={"key": ADMIN_KEY})
    header = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    broker.http.cookies.clear()
    async with waiting(broker, read(broker, *WAYS[way], header)) as task:
        logout = await broker.http.post("/tidelog/v1/logout", headers=header | CONSOLE)
        assert logout.status_code == 204
    assert LATE not in task.result()
    assert b"40101" in task.result()


@pytest.mark.parametrize(
    ("revoke", "check"),
    [(delete_key, assert_unknown), (deny_group, assert_denied), (deny_topic, assert_denied)],
)
async def test_waiting_instance_gets_no_later_record(
    broker: Broker,
    revoke: Callable[[Broker], Awaitable[None]],
    check: Callable[[httpx.Response], str],
) -> None:
    """Its position stays: another reader of the group gets the record."""
    header = await key_of(broker.log, ALICE) | {"content-type": V2}
    await subscribe(broker, header)
    accept = {"accept": JSON}
    path = f"{INSTANCE}/records?timeout=30000"
    reading = broker.http.get(path, headers=header | accept, timeout=ANSWER_S)
    async with waiting(broker, reading) as task:
        await revoke(broker)
    check(task.result())
    again = await broker.http.get(f"{INSTANCE}/records?timeout=5000", headers=ADMIN | accept)
    assert LATE in again.content


async def test_forwarded_read_without_key_gets_no_later_record(broker: Broker) -> None:
    """A broker forwards the key's id in a signed message, and serves none without (S11)."""
    await subscribe(broker, await key_of(broker.log, ALICE) | {"content-type": V2})
    proof = (next(iter(broker.log.state.access.keys)), "", 0)
    async with forwarded(broker, ALICE, proof) as reading, waiting(broker, reading) as task:
        await delete_key(broker)
    assert LATE not in task.result()
