"""Composition of the listener for Kafka's protocol.

The ports are bound before the store is opened. The listener accepts connections only after the
broker has registered: the liveness object has the address that all brokers give to clients.
"""

import asyncio
import contextlib
import socket
from typing import NamedTuple

from tidelog.service.http.handshakes import Handshakes
from tidelog.service.http.listening_sockets import bound_sockets
from tidelog.service.kafka.admin.acls import disabled_acl_apis
from tidelog.service.kafka.admin.configs import Configs
from tidelog.service.kafka.admin.topics import Topics
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.apis import table
from tidelog.service.kafka.connections.frame import DECODED_FACTOR
from tidelog.service.kafka.connections.listener import CONNECTION_BYTES, Listener, limits_of
from tidelog.service.kafka.connections.listener_parts import ListenerParts
from tidelog.service.kafka.connections.outbox import UnsentAnswers
from tidelog.service.kafka.connections.request_memory import RequestMemory
from tidelog.service.kafka.fetch import KafkaFetch
from tidelog.service.kafka.group_offsets import KafkaGroupOffsets
from tidelog.service.kafka.groups import Groups
from tidelog.service.kafka.log_dirs import Placement
from tidelog.service.kafka.metadata import KafkaMetadata
from tidelog.service.kafka.offsets import KafkaOffsets
from tidelog.service.kafka.produce import KafkaProduce
from tidelog.service.peers.listener import reachable
from tidelog.service.security.authenticator import Security
from tidelog.service.security.tls_certificates import ServerCertificate
from tidelog.service.settings.kafka import KafkaSettings, address_of
from tidelog.service.settings.requests import RequestSettings
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import KafkaListener
from tidelog.storage.codec.checksum import crc32c

UNSENT_ALL_BYTES_MAX = 64 * 1024 * 1024
ROLE = "for Kafka clients "


class KafkaPorts(NamedTuple):
    """The bound sockets of a broker, and the host and port that its clients are given."""

    sockets: list[socket.socket]
    host: str
    port: int


def bind(settings: KafkaSettings, worker: int, stack: contextlib.ExitStack) -> KafkaPorts | None:
    """Bind the ports for Kafka clients; `stack` closes them.

    Return None if there are none. A worker binds the shared port and its own. Raises LogError.
    """
    if not settings.kafka_port:
        return None
    host = settings.kafka_host or settings.host
    own = settings.kafka_port + worker
    sockets = bound_sockets(host, settings.kafka_port, role=ROLE, is_shared=worker > 0)
    if worker:
        sockets += bound_sockets(host, own, role=ROLE)
    for sock in sockets:
        stack.enter_context(sock)
    if settings.kafka_advertised:
        advertised, port = address_of(settings.kafka_advertised)
        return KafkaPorts(sockets, advertised, port + worker)
    return KafkaPorts(sockets, reachable(host), own)


def advertised(
    settings: KafkaSettings, ports: KafkaPorts | None, broker: Broker, worker: int
) -> tuple[KafkaListener, ...]:
    """Return the listener as the liveness object names it."""
    if ports is None:
        return ()
    node_id = settings.kafka_node_id + max(worker - 1, 0)
    if not settings.kafka_node_id:
        node_id = 1 + crc32c(broker.cluster.members().me.id.encode()) % (2**31 - 2)
    return (KafkaListener(ports.host, ports.port, node_id, settings.zone),)


class KafkaServer:
    """The listener of one broker, from `start` to `close`."""

    def __init__(
        self,
        context: Context,
        security: Security | None,
        named: KafkaListener,
        certificate: ServerCertificate | None,
        handshakes: Handshakes,
    ) -> None:
        self.metadata = KafkaMetadata(context, named)
        handlers = (
            KafkaProduce(context),
            KafkaFetch(context),
            KafkaOffsets(context),
            self.metadata,
            Placement(context, self.metadata),
            Topics(context),
            Configs(context, named.node_id),
            Groups(context),
            KafkaGroupOffsets(context),
        )
        apis = [api for handler in handlers for api in handler.apis()]
        if security is None:
            apis += disabled_acl_apis(context)
        server = ListenerParts(
            asyncio.get_running_loop(),
            context,
            table(apis),
            context.counters.admission,
            RequestMemory(context.settings.buffer_bytes_max),
            security,
            UnsentAnswers(UNSENT_ALL_BYTES_MAX),
            handshakes.turns,
        )
        self.listener = Listener(server, certificate.server if certificate else None, handshakes)
        self._draining: asyncio.Task[None] | None = None

    async def start(self, sockets: list[socket.socket], backlog: int) -> None:
        """Accept connections. Raises LogError."""
        await self.listener.listen(sockets, backlog)

    def begin_drain(self) -> None:
        """Send clients to other brokers from now on."""
        if self._draining is None:
            self._draining = asyncio.create_task(self.listener.drain(), name="tidelog-kafka-drain")

    @property
    def is_drained(self) -> bool:
        """Whether all clients have left, or had the time to leave."""
        return self._draining is not None and self._draining.done()

    async def close(self) -> None:
        """Drain, then end all connections."""
        self.begin_drain()
        assert self._draining is not None
        await self._draining
        await self.listener.close()


def memory_bounds(settings: RequestSettings, connections_max: int) -> dict[str, int]:
    """Return the maximum bytes of each part of the memory that the listener needs."""
    requests = RequestMemory(settings.buffer_bytes_max)
    connections = connections_max + limits_of(connections_max).spare_max
    return {
        "kafka requests": requests.limit,
        "kafka decoded requests": DECODED_FACTOR * requests.decoded.limit,
        "kafka answers": UNSENT_ALL_BYTES_MAX,
        "kafka connections": connections * CONNECTION_BYTES,
    }
