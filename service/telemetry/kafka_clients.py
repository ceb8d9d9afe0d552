"""The clients of Kafka's protocol that are connected to the brokers of a cluster.

A client is a row: all connections to one broker with the same client id, library, principal and
address. A broker makes its rows from its open connections only at a request, so the only cost of a
connection is its counters. One broker asks the others (service.peers). An answer has at most
ROWS_MAX rows, those with the most connections (I10). No row has a secret.
"""

from collections.abc import Collection
from typing import NamedTuple, Protocol

import msgspec

from tidelog.service.slices import sliced
from tidelog.service.telemetry.rates import Ask, answers, no_answers
from tidelog.storage.broker import Broker

ROWS_MAX = 1_000
TEXT_CHARS_MAX = 255
"""Characters of a client id that are shown: a client may send 32,767."""


class ConnectionNow(NamedTuple):
    """One open connection.

    `software` is the name and the version of the client's library, with a space between them; "" if
    the client did not name it. Counters begin with the connection, and `age_s` is the time since
    then.
    """

    client_id: str
    software: str
    principal: str
    host: str
    is_tls: bool
    age_s: float
    requests: int
    bytes_in: int
    bytes_out: int


class ClientRow(msgspec.Struct):
    """The connections of one client to one broker.

    The counters are sums over the connections that are open; `connected_ms` is the time of the
    oldest one, in ms since 1970.
    """

    client_id: str
    software_name: str
    software_version: str
    principal: str
    address: str
    is_tls: bool
    connected_ms: int
    connections: int = 0
    requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def order(self) -> tuple[int, str, str, str]:
        """The key of the order of rows: the most connections first."""
        return -self.connections, self.client_id, self.principal, self.address


class BrokerClients(msgspec.Struct):
    """The clients of one broker, as it reports them to its peers."""

    id: str
    name: str
    number: int
    connections: int
    is_truncated: bool
    rows: list[ClientRow]


class ClusterClients(NamedTuple):
    """The clients of all brokers.

    `missing` has the names of the live brokers that did not answer in time; `connections` counts
    the connections to the brokers that answered.
    """

    connections: int
    rows: list[tuple[BrokerClients, ClientRow]]
    is_truncated: bool
    missing: list[str]


class ConnectedClient(Protocol):
    def now(self) -> ConnectionNow: ...


class ConnectedClients:
    """The connected Kafka clients of one broker and, through `ask`, of its peers.

    Owned by one event loop.
    """

    def __init__(
        self, broker: Broker, connections: Collection[ConnectedClient] = (), ask: Ask = no_answers
    ) -> None:
        """`connections` has the open connections at each time."""
        self._broker = broker
        self._connections = connections
        self._ask = ask

    async def encoded(self) -> bytes:
        """Return the clients of this broker as its peers decode them."""
        return msgspec.msgpack.encode(await self.own())

    async def own(self) -> BrokerClients:
        """Return the clients of this broker."""
        now_ms = self._broker.clock.now_ms()
        rows: dict[tuple[object, ...], ClientRow] = {}
        count = 0
        async for connection in sliced(list(self._connections)):
            connection_now = connection.now()
            count += 1
            key = (
                connection_now.client_id,
                connection_now.software,
                connection_now.principal,
                connection_now.host,
                connection_now.is_tls,
            )
            row = rows.get(key)
            connected_ms = now_ms - round(connection_now.age_s * 1000)
            if row is None:
                row = rows[key] = _row(connection_now, connected_ms)
            row.connections += 1
            row.requests += connection_now.requests
            row.bytes_in += connection_now.bytes_in
            row.bytes_out += connection_now.bytes_out
            row.connected_ms = min(row.connected_ms, connected_ms)
        me = self._broker.cluster.members().me
        shown = sorted(rows.values(), key=lambda row: row.order)[:ROWS_MAX]
        return BrokerClients(me.id, me.name, me.number, count, len(shown) < len(rows), shown)

    async def all(self) -> ClusterClients:
        """Return the clients of every broker that answers in time, and the names of the others."""
        texts = await self._ask()
        brokers = [await self.own(), *answers(texts, BrokerClients)]
        broker_ids = {broker.id for broker in brokers}
        # `_ask` does not ask a silent broker again, but clients may still be connected to it.
        live = self._broker.cluster.members().live
        missing = [member.name for member in live if member.id not in broker_ids]
        rows = [(broker, row) for broker in brokers for row in broker.rows]
        rows.sort(key=lambda pair: (pair[1].order, pair[0].name))
        return ClusterClients(
            sum(broker.connections for broker in brokers),
            rows[:ROWS_MAX],
            len(rows) > ROWS_MAX or any(broker.is_truncated for broker in brokers),
            sorted(missing),
        )


def _row(connection_now: ConnectionNow, connected_ms: int) -> ClientRow:
    name, _, version = connection_now.software.rpartition(" ")
    return ClientRow(
        _shown(connection_now.client_id),
        name,
        version,
        connection_now.principal,
        connection_now.host,
        connection_now.is_tls,
        connected_ms,
    )


def _shown(text: str) -> str:
    """Return a client's text without control characters, which a terminal would interpret."""
    text = text[:TEXT_CHARS_MAX]
    return text if text.isprintable() else text.encode("unicode_escape").decode()
