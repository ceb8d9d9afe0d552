"""A broker's log on a store in memory, and a client of the application on it."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pyarrow as pa
import pytest

from tests.support.clock import ManualClock
from tests.support.faults import FaultyStore
from tests.support.held_loop import measured
from tidelog.service.http.http_server import HttpServer
from tidelog.service.server.app import Application, build_app
from tidelog.service.server.router import Router
from tidelog.service.server.service import Service
from tidelog.service.settings.settings import Settings
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.acls import Acl
from tidelog.storage.core.actions import CreateAcls
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore


@pytest.fixture(autouse=True)
def loop_is_not_held() -> Iterator[None]:
    """No step of the service holds the loop for longer than 40 ms of CPU time."""
    with measured() as held_steps:
        yield
    assert not held_steps.found, f"the service held the loop (s, what ran): {held_steps.found}"


QUIET = LogSettings(poll_interval_s=60.0, is_sealing=False)
"""Nothing happens by itself: what a test sees follows from what it asked."""


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1)


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    store = MemoryStore()
    yield store
    await store.close()


@pytest.fixture
async def log(store: MemoryStore) -> AsyncIterator[LogBroker]:
    log = await LogBroker.open(store, QUIET, clock=SystemClock(), name="broker-1")
    yield log
    await log.close()


@pytest.fixture
def app(log: LogBroker) -> Application:
    return build_app(log)


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def routed(app: Application) -> Router:
    """The application as a broker serves it, with the hot routes."""
    log = app.state.broker
    return Router(app, log, Settings(store="memory://"), app.state.counters)


@pytest.fixture
async def client(app: Application) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(routed(app)) as client:
        yield client


@pytest.fixture
def v3(log: LogBroker) -> str:
    """The cluster's path in the v3 dialect."""
    return f"/v3/clusters/{log.identity.cluster_id}"


# -- with the hot routes in front, as a broker serves it


class Broker(NamedTuple):
    """A log, its whole application, and a client of that."""

    log: LogBroker
    app: Router
    http: httpx.AsyncClient
    consumers: RestGroups

    @property
    def v3(self) -> str:
        """The cluster's path in the v3 dialect."""
        return f"/v3/clusters/{self.log.identity.cluster_id}"


@asynccontextmanager
async def broker_on(
    store: ObjectStore,
    name: str = "broker-1",
    hot_dir: Path | None = None,
    *,
    kind: type[Settings] = Settings,
    **settings: Any,
) -> AsyncIterator[Broker]:
    """A quiet broker with these settings, closed at the end; another `kind` has other limits."""
    quiet = {"store": "memory://", "seal_enabled": False, "poll_interval_ms": 60_000}
    hot = {} if hot_dir is None else {"hot_dir": str(hot_dir)}
    chosen = kind(**{**quiet, "broker_id": name, **hot, **settings})
    async with Service.open(chosen, store=store) as service, http_client(service.app) as client:
        yield Broker(service.broker, service.app, client, service.broker.groups.rest)


@asynccontextmanager
async def http_client(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tide:8082") as client:
        yield client


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    """The store of the broker, if the test plans its faults."""
    return FaultyStore(store)


def marked(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of the marks `broker` of a test and of its module."""
    marks = [mark.kwargs for mark in request.node.iter_markers("broker")]
    return {name: value for kwargs in reversed(marks) for name, value in kwargs.items()}


@pytest.fixture
async def broker(request: pytest.FixtureRequest, store: MemoryStore) -> AsyncIterator[Broker]:
    """A quiet broker.

    A mark `broker` has its settings, in `topics` the partitions of its topics by name, in `records`
    the values in `t`-0, in `acls` its ACLs.
    """
    settings = marked(request)
    topics, values = settings.pop("topics", {}), settings.pop("records", ())
    acls: list[Acl] = settings.pop("acls", [])
    is_faulty = "faulty" in request.fixturenames
    inner: ObjectStore = request.getfixturevalue("faulty") if is_faulty else store
    async with broker_on(inner, **settings) as broker:
        for name, partitions in topics.items():
            await broker.log.topics.create(name, partitions, {})
        if values:
            await append(broker.log, *values)
        if acls:
            await broker.log.access.change(CreateAcls(acls))
        yield broker


@pytest.fixture
async def other(
    request: pytest.FixtureRequest, store: MemoryStore, broker: Broker
) -> AsyncIterator[Broker]:
    """Another broker on the same store, with the same settings."""
    content = ("topics", "records", "acls")
    settings = {name: value for name, value in marked(request).items() if name not in content}
    async with broker_on(store, "b2", **settings) as other:
        yield other


@pytest.fixture
async def topic(broker: Broker) -> str:
    """A topic of three partitions."""
    await broker.log.topics.create("t", 3, {})
    return "t"


@asynccontextmanager
async def listening(app: Any, **options: Any) -> AsyncIterator[int]:
    """The application on a port of 127.0.0.1: for what an ASGI transport cannot do, streams.

    `options` are those of Server.
    """
    async with listening_server(app, **options) as server:
        yield server.servers[0].sockets[0].getsockname()[1]


@asynccontextmanager
async def connected(port: int, *sent: bytes) -> AsyncIterator[Streams]:
    """A connection, on which this was sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(sent))
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def listening_server(app: Any, **options: Any) -> AsyncIterator[HttpServer]:
    server = HttpServer(app, "127.0.0.1", 0, timeout_graceful_shutdown=5, **options)
    running = asyncio.create_task(server.serve())
    while not server.started:
        assert not running.done()
        await asyncio.sleep(0.001)
    try:
        yield server
    finally:
        server.stop()
        await running


def ends(log: LogBroker, topic: str = "t") -> list[int]:
    return [partition.high_watermark for partition in log.state.topic(topic).partitions]


async def stored(log: LogBroker, partition: int = 0, topic: str = "t") -> list[dict[str, Any]]:
    """The partition's records, from the log itself; their offsets must be dense from zero."""
    fetched = await log.records.fetch(topic, partition, 0, bytes_max=1 << 30)
    rows = [row for piece in fetched.pieces for row in piece.batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(len(rows)))
    return rows


async def until(condition: Any, seconds: float = 5.0) -> None:
    for _ in range(round(seconds / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to be")


# -- what requests and answers of the hot routes look like

V2 = "application/vnd.kafka.v2+json"
JSON = "application/vnd.kafka.json.v2+json"
BINARY = "application/vnd.kafka.binary.v2+json"
TEXT = "application/vnd.kafka.text.v2+json"
ARROW = "application/vnd.apache.arrow.stream"


async def send(
    http: httpx.AsyncClient, body: Any, media_type: str, path: str = "/topics/t"
) -> httpx.Response:
    return await http.post(path, content=body, headers={"content-type": media_type})


async def post(
    http: httpx.AsyncClient,
    records: list[dict[str, Any]],
    content_type: str = JSON,
    path: str = "/topics/t",
    key: str | None = None,
    **query: str,
) -> httpx.Response:
    """Produce; `key` is an Idempotency-Key."""
    headers = {"content-type": content_type}
    if key is not None:
        headers["idempotency-key"] = key
    body = json.dumps({"records": records})
    return await http.post(path, content=body, headers=headers, params=query)


def placed(answer: httpx.Response) -> list[tuple[int, int | None]]:
    """The reports of a success: (partition, offset) of each record."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == V2
    said = answer.json()
    assert said.keys() == {"offsets", "key_schema_id", "value_schema_id"}
    assert said["key_schema_id"] is said["value_schema_id"] is None
    for report in said["offsets"]:
        assert report["error_code"] is report["error"] is None
    return [(report["partition"], report["offset"]) for report in said["offsets"]]


def assert_refused(answer: httpx.Response, status: int, code: int, media_type: str = V2) -> str:
    """An error in our form; its message."""
    said = answer.json()
    assert (answer.status_code, said["error_code"]) == (status, code), said
    assert said.keys() == {"error_code", "message"}
    assert answer.headers["content-type"] == media_type
    return str(said["message"])


def arrow(**columns: Any) -> bytes:
    """One batch of these columns as a stream."""
    return arrow_of(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)))


def arrow_of(*batches: pa.RecordBatch, compression: Any = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


FIRST_MS = 1_700_000_000_000


async def append(
    log: LogBroker, *values: bytes | None, partition: int = 0, timestamp_ms: int = FIRST_MS
) -> None:
    """Records `timestamp_ms`, `timestamp_ms` + 1, ... ms."""
    count = len(values)
    size = count + sum(len(value) for value in values if value is not None)
    rows = Rows(list(range(timestamp_ms, timestamp_ms + count)), [None] * count, list(values))
    await log.records.append(log.state.topic("t"), [(partition, rows)], size=size, is_json=False)


async def values(broker: Broker, **query: Any) -> list[str]:
    """Records of the topic `t` as text; they must be dense."""
    path = "/topics/t/partitions/0/records"
    answer = await broker.http.get(path, headers={"accept": TEXT}, params=query)
    assert answer.status_code == 200, answer.text
    records = answer.json()
    if records:
        first = records[0]["offset"]
        assert [record["offset"] for record in records] == [*range(first, first + len(records))]
    return [record["value"] for record in records]


def positions(answer: httpx.Response) -> tuple[int, int, int]:
    """(next offset, high watermark, log start)."""
    names = ("next-offset", "high-watermark", "log-start-offset")
    next_offset, high_watermark, log_start = (
        int(answer.headers[f"tidelog-{name}"]) for name in names
    )
    return next_offset, high_watermark, log_start


@pytest.fixture
async def consumer(broker: Broker, topic: str) -> Any:
    """An instance subscribed to t, from its beginning; nothing commits by itself."""
    from tests.service.instances import subscribed  # which needs this module

    return await subscribed(broker, auto_commit_enable=False)


@pytest.fixture
async def port(broker: Broker) -> AsyncIterator[int]:
    """The port of a listening broker."""
    async with asyncio.timeout(240), listening(broker.app) as port:
        yield port
