"""The connected Kafka clients: rows of one broker, the rows of all brokers, and their bounds."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec
import pytest

from tests.service.conftest import broker_on
from tests.service.kafka.conftest import Kafka, batch, broker
from tests.service.kafka.test_produce import _produce, _request
from tests.service.kafka.test_security import _client_of
from tests.service.keyed import SETTINGS, allow, key_of, secured
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest, ApiVersionsResponse
from tidelog.service.telemetry import kafka_clients
from tidelog.service.telemetry.kafka_clients import (
    ROWS_MAX,
    BrokerClients,
    ClientRow,
    ConnectedClients,
    ConnectionNow,
)
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.store.memory import MemoryStore

ROUTE = "/tidelog/v1/kafka-clients"


class Open(NamedTuple):
    """A connection that is open."""

    seen: ConnectionNow

    def now(self) -> ConnectionNow:
        return self.seen


def opened(client_id: str, host: str = "192.0.2.1", age_s: float = 1.0, software: str = "") -> Open:
    return Open(ConnectionNow(client_id, software, "", host, False, age_s, 2, 30, 400))


def answering(*answers: bytes) -> Callable[[], Awaitable[Sequence[bytes]]]:
    async def ask() -> Sequence[bytes]:
        return answers

    return ask


async def test_a_connection_tells_its_client(kafka: Kafka) -> None:
    client = kafka.client("192.0.2.7")
    said = ApiVersionsRequest(
        client_software_name="apache-kafka-java", client_software_version="4.1.0"
    )
    await client.ask(said, ApiVersionsResponse, 3, "billing-1")
    now = client.connection.now()
    assert now[:5] == ("billing-1", "apache-kafka-java 4.1.0", "", "192.0.2.7", False)
    assert (now.requests, now.age_s >= 0) == (1, True)
    request = _request((0, batch(b"x" * 500)))
    await _produce(client, request)
    later = client.connection.now()
    assert (later.client_id, later.requests) == ("test", 2)
    assert later.bytes_in - now.bytes_in > 500
    assert later.bytes_out > now.bytes_out


async def test_a_connection_has_its_principal_and_no_secret() -> None:
    async with broker(**SETTINGS) as kafka:
        await kafka.log.topics.create("t", 1, {})
        await allow(kafka.log, "User:alice", "WRITE")
        client = await _client_of(kafka, "alice")
        await _produce(client, _request((0, batch(b"x"))))
        clients = await ConnectedClients(
            kafka.log, [client.connection, kafka.client().connection]
        ).own()
        principals = [(row.principal, row.client_id, row.requests) for row in clients.rows]
        assert principals == [("", "", 0), ("User:alice", "test", 3)]


async def test_ten_thousand_connections_are_rows_within_a_bound() -> None:
    async with broker() as kafka:
        many = [opened(f"c{number % 1500:04}") for number in range(9_000)]
        many += [opened("pool", age_s=number, software="kgo 1.2") for number in range(1_000)]
        clients = ConnectedClients(kafka.log, many)
        own = await clients.own()
        assert (own.connections, own.is_truncated, len(own.rows)) == (10_000, True, ROWS_MAX)
        first = own.rows[0]
        assert (first.client_id, first.connections) == ("pool", 1_000)
        assert (first.requests, first.bytes_in, first.bytes_out) == (2_000, 30_000, 400_000)
        assert (first.software_name, first.software_version) == ("kgo", "1.2")
        age_ms = kafka.log.clock.now_ms() - first.connected_ms
        assert 999_000 <= age_ms < 1_100_000, "since the oldest connection"
        assert [row.client_id for row in own.rows[1:]] == [f"c{n:04}" for n in range(ROWS_MAX - 1)]
        total = await clients.all()
        assert (total.connections, total.is_truncated, total.missing) == (10_000, True, [])
        assert len(total.rows) == ROWS_MAX


async def test_what_differs_is_a_row_of_its_own() -> None:
    async with broker() as kafka:
        now = opened("a").seen
        others = [
            now._replace(client_id="b"),
            now._replace(software="kgo 1"),
            now._replace(principal="User:x"),
            now._replace(host="192.0.2.2"),
            now._replace(is_tls=True),
        ]
        clients = await ConnectedClients(
            kafka.log, [Open(state) for state in (now, now, *others)]
        ).own()
        assert [row.connections for row in clients.rows] == [2, 1, 1, 1, 1, 1]
        assert not clients.is_truncated


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\nb", "x" * 32_000, "\u202eabc"])
async def test_a_clients_text_is_printable_and_bounded(hostile: str) -> None:
    async with broker() as kafka:
        (row,) = (await ConnectedClients(kafka.log, [opened(hostile)]).own()).rows
        assert row.client_id.isprintable()
        assert len(row.client_id) <= 6 * kafka_clients.TEXT_CHARS_MAX
        assert not re.search(r"[\x00-\x1f]", row.client_id)


async def test_brokers_that_do_not_answer_are_named() -> None:
    async with broker() as kafka:
        peers = [Member(f"{name}id", name, "", "", 0) for name in ("zoe", "bob", "old", "new")]
        kafka.log._membership.others = peers
        row = ClientRow("far", "", "", "", "192.0.2.9", True, 5, 7)
        bob = BrokerClients("bobid", "bob", 3, 7, False, [row])
        old = msgspec.msgpack.encode({"id": "oldid"})
        ask = answering(msgspec.msgpack.encode(bob), old, b"\xff", b"")
        clients = await ConnectedClients(kafka.log, [opened("near")], ask).all()
        assert clients.missing == ["new", "old", "zoe"]
        assert (clients.connections, clients.is_truncated) == (8, False)
        shown = [(broker.name, row.client_id) for broker, row in clients.rows]
        assert shown == [("bob", "far"), ("broker-1", "near")]
        truncated = msgspec.msgpack.encode(msgspec.structs.replace(bob, is_truncated=True))
        assert (await ConnectedClients(kafka.log, (), answering(truncated)).all()).is_truncated
        own = ConnectedClients(kafka.log, [opened("near")])
        before = await own.own()
        encoded = msgspec.msgpack.decode(await own.encoded(), type=BrokerClients)
        assert before.rows[0].connected_ms <= encoded.rows[0].connected_ms
        encoded.rows[0].connected_ms = before.rows[0].connected_ms  # by the clock of each call
        assert encoded == before


async def test_the_route_needs_the_right_to_describe_the_cluster() -> None:
    async with secured(MemoryStore()) as made:
        key = await key_of(made.log, "User:alice")
        assert (await made.http.get(ROUTE, headers=key)).status_code == 403
        await allow(made.log, "User:alice", "DESCRIBE", "CLUSTER", "kafka-cluster")
        answer = await made.http.get(ROUTE, headers=key)
        assert answer.status_code == 200
        assert answer.json()["clients"] == []


async def test_a_broker_without_kafka_clients_has_an_empty_list() -> None:
    async with broker_on(MemoryStore()) as made:
        answer = (await made.http.get(ROUTE)).json()
        assert answer["now_ms"] > 0
        del answer["now_ms"]
        assert answer == {
            "connections": 0, "is_truncated": False, "missing_brokers": [], "clients": []
        }  # fmt: skip
