"""Sessions and rights that end, end what waits: streams, long polls, reads of instances."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
import pytest

from tests.service.conftest import V2, Broker, append, until
from tests.service.keyed import (
    ADMIN_KEY,
    ALICE,
    allow,
    assert_denied,
    assert_unknown,
    key_of,
    open_to_alice,
)
from tests.service.test_revoked_streams import ANSWER_S, LATE, WAYS, read
from tidelog.service.security.authenticator import CONSOLE_HEADER
from tidelog.storage.core.actions import DeleteKey

CONSOLE = {CONSOLE_HEADER.decode(): "1"}
INSTANCE = "/consumers/g/instances/i"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    async with open_to_alice() as broker:
        yield broker


@pytest.mark.parametrize("way", WAYS)
async def test_a_logout_ends_what_the_session_reads(broker: Broker, way: str) -> None:
    answer = await broker.http.post("/tidelog/v1/login", json={"key": ADMIN_KEY})
    cookie = answer.headers["set-cookie"].partition(";")[0]
    broker.http.cookies.clear()
    query, accept = WAYS[way]
    header = {"cookie": cookie}
    task = asyncio.ensure_future(read(broker, query, accept, header))
    await until(lambda: broker.log._waiting or task.done(), ANSWER_S)
    assert not task.done()
    logout = await broker.http.post("/tidelog/v1/logout", headers=header | CONSOLE)
    assert logout.status_code == 204
    await append(broker.log, LATE)
    async with asyncio.timeout(ANSWER_S):
        body = await task
    assert LATE not in body
    assert b"40101" in body


async def delete_key(broker: Broker) -> None:
    (key_id,) = broker.log.state.access.keys
    await broker.log.change_access(DeleteKey(key_id))


async def deny_group(broker: Broker) -> None:
    await allow(broker.log, ALICE, "READ", "GROUP", "g", permission="DENY")


async def deny_topic(broker: Broker) -> None:
    await allow(broker.log, ALICE, "READ", permission="DENY")


@pytest.mark.parametrize(
    ("revoke", "check"),
    [
        (delete_key, assert_unknown),
        (deny_group, assert_denied),
        (deny_topic, assert_denied),
    ],
)
async def test_an_instance_that_waits_gets_no_later_record(
    broker: Broker,
    revoke: Callable[[Broker], Awaitable[None]],
    check: Callable[[httpx.Response], str],
) -> None:
    """Its position stays: another reader of the group gets the record."""
    header = await key_of(broker.log, ALICE) | {"content-type": V2}
    for path, body in (
        ("/consumers/g", {"name": "i", "format": "json", "auto.offset.reset": "earliest"}),
        (f"{INSTANCE}/subscription", {"topics": ["t"]}),
    ):
        (await broker.http.post(path, json=body, headers=header)).raise_for_status()
    accept = {"accept": "application/vnd.kafka.json.v2+json"}
    path = f"{INSTANCE}/records?timeout=30000"
    task = asyncio.ensure_future(broker.http.get(path, headers=header | accept, timeout=ANSWER_S))
    await until(lambda: broker.log._waiting or task.done(), ANSWER_S)
    assert not task.done()
    await revoke(broker)
    await append(broker.log, LATE)
    check(await task)
    admin = {"authorization": f"Bearer {ADMIN_KEY}"} | accept
    again = await broker.http.get(f"{INSTANCE}/records?timeout=5000", headers=admin)
    assert LATE in again.content
