"""The peer port where security is on: messages of brokers are taken, others only at level 1."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import httpx
import msgspec
import pytest

from tests.service.conftest import V2, append, listening, until
from tests.service.keyed import ADMIN_KEY, SETTINGS, allow, key_of
from tidelog.service.peers import client
from tidelog.service.peers.client import ANNOUNCE, GROUP_REQUEST, HAND_OVER, METRICS, HttpPeers
from tidelog.service.peers.forwarding import _Request, _Response
from tidelog.service.peers.listener import PeerListener
from tidelog.service.security import authenticator, peer_signatures
from tidelog.service.security.authenticator import ADMIN_ID
from tidelog.service.security.caller import ADMIN
from tidelog.service.security.peer_signatures import HEADER
from tidelog.service.server.router import Router
from tidelog.service.server.service import Service
from tidelog.service.settings.settings import Settings
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.cluster.messages import ForwardRefused
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import DeleteKey
from tidelog.storage.store.memory import MemoryStore

ALICE = "User:alice"
BODY = b'{"name": "i", "format": "json", "auto.offset.reset": "earliest"}'
TYPE = [(b"content-type", V2.encode())]


class Process(NamedTuple):
    """A broker with security and its listener for peers, in this process."""

    log: Broker
    peers: HttpPeers
    app: Router


@asynccontextmanager
async def process(store: MemoryStore, name: str) -> AsyncIterator[Process]:
    quiet = {"seal_enabled": False, "poll_interval_ms": 60_000, "broker_id": name}
    settings = Settings(store="file:///nowhere", **quiet, **SETTINGS)
    async with Service.open(settings, store=store) as service:
        listener = PeerListener(service.peer_app, "127.0.0.1", 0)
        service.closing.push_async_callback(listener.close)
        await service.broker.join(await listener.start(""))
        yield Process(service.broker, service._peers, service.app)


@pytest.fixture
async def pair(store: MemoryStore) -> AsyncIterator[list[Process]]:
    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(process(store, name)) for name in "ab"]
        for peer in pair:
            await peer.log._membership.look()
        yield pair


def forwarded(
    principal: str,
    key_id: str,
    group: str = "g",
    *,
    method: str = "POST",
    path: str = "",
    query: bytes = b"",
    body: bytes = BODY,
) -> bytes:
    """A request of the group; to create an instance unless there is a path."""
    return msgspec.msgpack.encode(
        _Request(
            method, f"/consumers/{group}{path}", query, TYPE, "http", ("b", 1), body,
            (principal, "10.0.0.1"), (key_id, "", 0),
        )
    )  # fmt: skip


def status(answer: bytes) -> int:
    return msgspec.msgpack.decode(answer, type=_Response).status


async def unsigned(to: Process, path: str, message: bytes, **more: str) -> httpx.Response:
    """A message of a process that knows the token alone."""
    me = to.log.cluster.members().me
    headers = {"authorization": f"Bearer {me.token}", **more}
    async with httpx.AsyncClient(base_url=me.address, trust_env=False) as http:
        return await http.post(path, content=message, headers=headers)


async def subscribe(sender: Process, to: Member) -> None:
    """An instance of the administrator at a broker, by way of another one."""
    topics = {"path": "/instances/i/subscription", "body": b'{"topics": ["t"]}'}
    for message in (forwarded(ADMIN, ADMIN_ID), forwarded(ADMIN, ADMIN_ID, **topics)):
        assert status(await sender.peers.post(to, GROUP_REQUEST, message)) in (200, 204)


async def test_brokers_take_each_others_messages(pair: list[Process]) -> None:
    a, b = pair
    await a.log.topics.create("t", 1, {})
    to = b.log.cluster.members().me
    assert (await a.peers.post(to, METRICS, b"")).startswith(b"# HELP")
    assert status(await a.peers.post(to, GROUP_REQUEST, forwarded(ADMIN, ADMIN_ID))) == 200


async def test_read_ends_when_its_peer_waits_for_it_no_more(pair: list[Process]) -> None:
    a, b = pair
    await a.log.topics.create("t", 1, {})
    to = b.log.cluster.members().me
    await subscribe(a, to)
    (instance,) = b.log.groups.rest.members.group("g").instances.values()
    read = forwarded(
        ADMIN, ADMIN_ID, method="GET", path="/instances/i/records", query=b"timeout=60000"
    )
    reading = asyncio.create_task(a.peers.post(to, GROUP_REQUEST, read))
    await until(instance.lock.locked)
    reading.cancel()
    await until(lambda: not instance.under_way)


async def test_large_answer_of_another_broker_has_its_memory_until_its_client_has_it(
    pair: list[Process],
) -> None:
    a, b = pair
    await a.log.topics.create("t", 1, {})
    await b.log.refresh()
    for _ in range(16):
        await append(b.log, b'"%s"' % (b"x" * 900_000))
    to = b.log.cluster.members().me
    await subscribe(a, to)
    await a.log.refresh()
    answers = a.app.admission.answers
    async with asyncio.timeout(60), listening(a.app) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=connection)
        path = "/consumers/g/instances/i/records?max_bytes=60000000"
        key = f"Authorization: Bearer {ADMIN_KEY}"
        accept = "Accept: application/vnd.kafka.json.v2+json"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{key}\r\n{accept}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.partition(b"content-length: ")[2].split()[0])
        assert answers.used >= size > 900_000
        await reader.readexactly(size)
        await until(lambda: not answers.used)
        writer.close()
        await writer.wait_closed()


async def test_token_alone_is_not_enough(pair: list[Process]) -> None:
    a, b = pair
    message = forwarded(ADMIN, ADMIN_ID)
    for path in (HAND_OVER, ANNOUNCE, METRICS, client.GROUP_ARRIVED, client.GROUP_LOST):
        assert (await unsigned(b, path, message)).status_code == 401
    assert status((await unsigned(b, GROUP_REQUEST, message)).content) == 401
    assert "g" not in b.log.state.members
    # Signed, but for another broker, for another route, or another message.
    signatures = a.peers.signatures
    assert signatures is not None
    me = b.log.cluster.members().me.id
    for header in (
        signatures.sign(a.log.cluster.members().me.id, GROUP_REQUEST, message),
        signatures.sign(me, METRICS, message),
        signatures.sign(me, GROUP_REQUEST, forwarded(ALICE, ADMIN_ID)),
    ):
        answer = await unsigned(b, GROUP_REQUEST, message, **{HEADER: header})
        assert status(answer.content) == 401
    header = signatures.sign(me, GROUP_REQUEST, message)
    for expected in (200, 401):  # and once only
        answer = await unsigned(b, GROUP_REQUEST, message, **{HEADER: header})
        assert status(answer.content) == expected


async def test_draft_without_signature_is_refused_and_committed_by_its_sender(
    pair: list[Process],
) -> None:
    """As a broker that switches security on sees those that do not have it yet."""
    a, b = pair
    a.peers.signatures = None
    with pytest.raises(ForwardRefused, match="401"):
        await a.peers.post(b.log.cluster.members().me, HAND_OVER, b"draft")
    await a.log.topics.create("t", 1, {})
    await b.log._log.wal.refresh()
    assert "t" in b.log.state.topics


async def test_brokers_of_version_0_1_are_peers_at_level_1(
    pair: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They send neither a signature nor a key's id, and ignore both."""
    b = pair[1]
    await allow(b.log, ALICE, "ALL", "GROUP", "g")
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(forwarded(ALICE, ""))[:-1])
    assert status((await unsigned(b, GROUP_REQUEST, old)).content) == 401
    for module in (authenticator, peer_signatures):
        monkeypatch.setattr(module, "SIGNED_LEVEL", format_levels.NEWEST + 1)
    assert status((await unsigned(b, GROUP_REQUEST, old)).content) == 200
    assert (await unsigned(b, METRICS, b"")).text.startswith("# HELP")


@pytest.mark.parametrize(
    ("principal", "key_id"),
    [(ALICE, ""), (ALICE, "0" * 16), (ALICE, ADMIN_ID), ("User:bob", "alice"), (ADMIN, "alice")],
)
async def test_broker_looks_key_up_itself(pair: list[Process], principal: str, key_id: str) -> None:
    """Even a message that is signed names no principal without its key."""
    a, b = pair
    await key_of(a.log, ALICE)
    (own,) = a.log.state.access.keys
    await b.log._log.wal.refresh()
    message = forwarded(principal, own if key_id == "alice" else key_id)
    assert status(await a.peers.post(b.log.cluster.members().me, GROUP_REQUEST, message)) == 401


async def test_forwarded_request_ends_with_its_key(pair: list[Process]) -> None:
    a, b = pair
    await key_of(a.log, ALICE)
    await allow(a.log, ALICE, "ALL", "GROUP", "g")
    (own,) = a.log.state.access.keys
    to, message = b.log.cluster.members().me, forwarded(ALICE, own)
    assert status(await a.peers.post(to, GROUP_REQUEST, message)) == 200  # b refreshes its view
    await a.log.access.change(DeleteKey(own))
    await b.log._log.wal.refresh()
    assert status(await a.peers.post(to, GROUP_REQUEST, message)) == 401
    assert ADMIN_KEY.encode() not in message
