"""Connections whose clients have proved no principal, to a broker with principals."""

import asyncio
from typing import Any

import pytest
from uvicorn.server import ServerState

from tests.service.conftest import Broker
from tests.service.connections.conftest import Connect
from tests.service.keyed import ADMIN_KEY, SETTINGS, allow, key_of
from tests.service.virtual_connections import Connection, Transport, client_port
from tidelog.service.http.uvicorn_protocol import UNPROVED_BYTES_MAX
from tidelog.service.peers import listener
from tidelog.service.peers.client import VITALS

pytestmark = pytest.mark.broker(**SETTINGS)
STRANGERS = 20
HEAD = b"GET %b HTTP/1.1\r\nHost: tide:8082\r\n"
TOPICS = HEAD % b"/topics"
ALLOWED = TOPICS + b"Authorization: Bearer %b\r\n\r\n" % ADMIN_KEY.encode()


async def test_only_request_of_principal_proves_connection(
    broker: Broker, connect: Connect
) -> None:
    """A client without a login may not keep out others by requests that are refused."""
    admission = broker.app.admission
    admission.limits = admission.limits._replace(connections_max=6, address_max=6)
    forbidden = (await key_of(broker.log, "User:stranger"))["authorization"].encode()
    first = {
        b"missing": TOPICS + b"\r\n",
        b"wrong": TOPICS + b"Authorization: Bearer wrong\r\n\r\n",
        b"public": HEAD % b"/healthy" + b"\r\n",
        b"a public page": HEAD % b"/console/" + b"\r\n",
        b"forbidden": TOPICS + b"Authorization: %b\r\n\r\n" % forbidden,
        b"allowed": ALLOWED,
    }
    connections = {}
    for name, request in first.items():
        connections[name] = connect()
        await connections[name].send(request)
        assert await connections[name].status()
    new = [connect() for _ in range(4)]
    closed = [name for name, connection in connections.items() if connection.is_closed]
    assert closed == [b"missing", b"wrong", b"public", b"a public page"]
    await new[-1].send(ALLOWED)
    assert await new[-1].status() == 200


def posted(path: bytes, body: bytes, rights: bytes = b"") -> bytes:
    head = b"POST %b HTTP/1.1\r\nHost: tide:8082\r\nContent-Length: %d\r\n" % (path, len(body))
    json = b"application/vnd.kafka.json.v2+json" if rights else b"application/json"
    return head + b"Content-Type: %b\r\n%b\r\n" % (json, rights) + body


WRONG_LOGIN = posted(b"/tidelog/v1/login", b'{"key":"wrong"}')
RIGHTS = b"Authorization: Bearer %b\r\n" % ADMIN_KEY.encode()
LARGE = posted(b"/topics/t", b'{"records":[{"value":"%b"}]}' % (b"x" * 200_000), RIGHTS)
HEADS = b"GET /topics HTTP/1.1\r\nHost: tide:8082\r\nX: %b\r\n\r\n" % (b"x" * 6000)


@pytest.mark.parametrize("behind", [LARGE, HEADS * 10, WRONG_LOGIN * 3 + LARGE[:100_000]])
async def test_few_bytes_are_kept_behind_unproved_request(connect: Connect, behind: bytes) -> None:
    connection = connect()
    await connection.send(WRONG_LOGIN + behind)
    waiting = [cycle for cycle, _ in connection.protocol.pipeline]
    heads = [field for cycle in waiting for field in cycle.scope["headers"]]
    head_bytes = sum(len(name) + len(value) for name, value in heads)
    assert head_bytes + sum(len(cycle.body) for cycle in waiting) <= UNPROVED_BYTES_MAX
    await connection.send(b"x" * 1000)
    await asyncio.sleep(10.0)
    written = bytes(connection.transport.written)
    assert written.count(b"HTTP/1.1 401") == 1 + len(waiting), "of those that were kept"
    assert written.count(b"HTTP/1.1") == 1 + len(waiting)
    assert connection.is_closed


@pytest.mark.parametrize("request_", [WRONG_LOGIN, TOPICS + b"\r\n"], ids=["login", "no key"])
async def test_answers_to_unproved_clients_take_turns(connect: Connect, request_: bytes) -> None:
    """Else the answers to thousands of connections are due in one iteration of the loop."""
    loop = asyncio.get_running_loop()
    now: list[bytes] = []
    answers: list[int] = []

    def note() -> None:
        answers.append(len(now))
        now.clear()

    class Noted(Transport):
        def write(self, data: Any) -> None:
            if data.startswith(b"HTTP/1.1 401"):
                now.append(data)
                if len(now) == 1:
                    loop.call_soon(note)

    connections = [connect(transport=Noted()) for _ in range(50)]
    for connection in connections:
        connection.protocol.data_received(request_)
    await asyncio.sleep(10.0)
    assert sum(answers) == 50
    assert max(answers) <= 2, "one in each iteration, and one before `note`"


async def test_unproved_client_that_leaves_has_no_turn(broker: Broker, connect: Connect) -> None:
    first, leaving, last = connect(), Connection(client_port(broker)), connect()
    for connection in (first, leaving, last):
        connection.protocol.data_received(TOPICS + b"\r\n")
    leaving.end()
    await asyncio.sleep(1.0)
    statuses = [connection.transport.written[:12] for connection in (first, leaving, last)]
    assert statuses == [b"HTTP/1.1 401", b"", b"HTTP/1.1 401"]


async def test_large_body_directly_behind_its_head_is_served(connect: Connect) -> None:
    connection = connect()
    await connection.send(LARGE)
    assert await connection.status() == 200
    await connection.send(LARGE + LARGE)  # its principal is proved
    await asyncio.sleep(10.0)
    assert connection.transport.written.count(b"HTTP/1.1 200") == 3


async def test_principal_with_all_connections_gives_its_idle_ones_to_others(
    broker: Broker, connect: Connect
) -> None:
    admission = broker.app.admission
    most = 4
    admission.limits = admission.limits._replace(connections_max=most, address_max=most)
    await allow(broker.log, "User:stranger", "READ", "TOPIC", "t")
    stranger = (await key_of(broker.log, "User:stranger"))["authorization"].encode()
    rights = b"Authorization: %b\r\n\r\n" % stranger
    strangers = [connect() for _ in range(most)]
    for connection in strangers:
        await connection.send(TOPICS + rights)
        await asyncio.sleep(2.0)
    poll = HEAD % b"/topics/t/partitions/0/records?timeout=30000"
    for connection in strangers[:2]:
        await connection.send(poll + rights)
    other = connect()
    is_closed = [connection.is_closed for connection in strangers]
    assert is_closed == [False, False, True, False], "two have a request under way"
    await other.send(ALLOWED)
    assert await other.status() == 200


async def test_strangers_do_not_lock_out_peers(
    broker: Broker, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", STRANGERS)
    server = ServerState()
    token = broker.log._membership.me.token.encode()
    head = b"POST %b HTTP/1.1\r\nHost: x\r\n" % VITALS.encode()
    for _ in range(STRANGERS + 5):
        await connect("peers", server=server).send(head)
    peer = connect("peers", server=server)
    await peer.send(head + b"Authorization: Bearer %b\r\nContent-Length: 0\r\n\r\n" % token)
    status = await peer.status()
    text = bytes(peer.transport.written)
    # This broker serves no vitals: its own answer says so.
    assert status == 200 or b"no consumer groups and no reports" in text
