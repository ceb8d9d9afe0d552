"""The listener for Kafka's protocol on a broker in memory, and a client that writes frames."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from tests.service.conftest import QUIET
from tests.service.kafka.wire import MemoryTransport, answer, framed
from tests.service.keyed import SETTINGS
from tidelog.service.kafka.connections import connection, handshake
from tidelog.service.kafka.connections.connection import KafkaConnection
from tidelog.service.kafka.messages.produce import InitProducerIdRequest, InitProducerIdResponse
from tidelog.service.kafka.messages.schema import Message
from tidelog.service.server.kafka import KafkaPorts, KafkaServer
from tidelog.service.server.service import Ports, Service
from tidelog.service.settings.settings import Settings
from tidelog.storage.broker import LogSettings
from tidelog.storage.cluster.liveness import KafkaListener
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore

M = TypeVar("M", bound=Message)
NOW_MS = 1_790_000_000_000
NODE = KafkaListener("broker.example", 9092, 7, "eu-1a")


class _Transport(MemoryTransport):
    def __init__(self) -> None:
        super().__init__()
        self.on_write: Callable[[], object] = lambda: None

    def writelines(self, pieces: list[bytes | memoryview]) -> None:
        super().writelines(pieces)
        self.on_write()

    def abort(self) -> None:
        super().abort()
        self.on_write()


class Client:
    """One connection to the listener."""

    def __init__(self, server: KafkaServer, host: str) -> None:
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self.transport = _Transport()
        self.transport.on_write = self._written
        self.connection = KafkaConnection(server.listener.server)
        self.connection.opened(self.transport, host)
        server.listener.server.admission.arrive(self.connection, host)

    def _written(self) -> None:
        for frame in self.transport.frames():
            self._answers.pop(int.from_bytes(frame[:4], "big")).set_result(frame)
        if self.transport.is_aborted:
            for future in self._answers.values():
                future.set_exception(ConnectionError("the broker closed the connection"))
            self._answers.clear()

    def send(self, request: Message, version: int, client_id: str | None = "test") -> None:
        """Send a request that gets no answer."""
        self._send(framed(request, version, next(self._numbers), client_id))

    def _send(self, frame: bytes) -> None:
        self.connection.frames.push(frame)
        self.connection.advance()

    async def ask(
        self, request: Message, kind: type[M], version: int, client_id: str | None = "test"
    ) -> M:
        """Send a request; return its answer."""
        number = next(self._numbers)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(framed(request, version, number, client_id))
        frame = await asyncio.wait_for(future, 20)
        response: M = answer(frame, kind, version)[1]
        return response


class Kafka:
    """A broker with a listener. `client()` connects."""

    def __init__(self, service: Service) -> None:
        assert service.kafka is not None
        self.log, self.counters, self.server = service.broker, service.counters, service.kafka
        self.context = self.server.listener.server.context
        self._clients: list[Client] = []

    def client(self, host: str = "192.0.2.1") -> Client:
        made = Client(self.server, host)
        self._clients.append(made)
        return made

    def leave(self, client: Client) -> None:
        """Close the connection of a client."""
        client.connection.closed()
        self._clients.remove(client)

    async def close(self) -> None:
        for client in self._clients:
            client.connection.closed()
        assert self.server.listener.server.memory.used == 0
        await self.server.close()


@asynccontextmanager
async def broker(
    log_settings: LogSettings = QUIET, *, object_store: ObjectStore | None = None, **settings: Any
) -> AsyncIterator[Kafka]:
    """A broker of its own in memory or on `object_store`, with a listener."""
    kind = type("TunedSettings", (Settings,), {"log_settings": lambda _: log_settings})
    own = {"store": "memory://", "broker_id": "broker-1", "kafka_port": NODE.port}
    chosen = kind(**own, kafka_node_id=NODE.node_id, zone=NODE.zone, **settings)
    ports = Ports(connections_max=100, kafka=KafkaPorts([], NODE.host, NODE.port))
    async with Service.open(chosen, store=object_store or MemoryStore(), ports=ports) as service:
        made = Kafka(service)
        try:
            yield made
        finally:
            await made.close()


@pytest.fixture
async def kafka() -> AsyncIterator[Kafka]:
    """A listener with the topic `t` of three partitions."""
    async with broker() as made:
        await made.log.topics.create("t", 3, {})
        yield made


@pytest.fixture
async def secured(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Kafka]:
    """A broker that needs keys, with the topic `t`."""
    monkeypatch.setattr(handshake, "FAILED_DELAY_S", 0.01)
    monkeypatch.setattr(connection, "CLOSE_DELAY_S", 0.01)
    async with broker(**SETTINGS) as made:
        await made.log.topics.create("t", 1, {})
        yield made


async def init_producer(client: Client) -> InitProducerIdResponse:
    """A new producer."""
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
    return await client.ask(request, InitProducerIdResponse, 4)


def batch(
    *values: bytes | None,
    key: bytes | None = b"k",
    timestamp: int | None = None,
    producer: tuple[int, int, int] = (-1, -1, -1),
    codec: int = 0,
    step_ms: int = 1,
) -> bytes:
    """Return a record batch as aiokafka makes it. Timestamps begin at `timestamp` or now."""
    producer_id, epoch, sequence = producer
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=codec,
        is_transactional=0,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        batch_size=1 << 30,
    )
    first = SystemClock().now_ms() if timestamp is None else timestamp
    for offset, value in enumerate(values):
        builder.append(offset, first + offset * step_ms, key, value, [])
    return bytes(builder.build())
