"""Idle connections take the descriptors of the store, the health routes and the peers."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.service.conftest import JSON
from tests.support.broker import Broker

CONNECTIONS = 20
FILES = 128
HEALTH = ("/healthy", "/ready", "/startup")


@contextmanager
def idle(broker: Broker, count: int) -> Iterator[None]:
    """So many connections that send nothing."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((broker.address, broker.port)))
        yield


@contextmanager
def few_files(count: int) -> Iterator[None]:
    """A process that starts here has so many descriptors, unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_health_is_answered_at_bound_of_connections(tmp_path: Path) -> None:
    tuning = {"service": {"connections_max": CONNECTIONS}}
    with Broker(tmp_path, tuning=tuning) as broker, idle(broker, CONNECTIONS + 5):
        assert [httpx.get(broker.base_url + path).status_code for path in HEALTH] == [200] * 3


def test_idle_connections_leave_descriptors_for_wal(tmp_path: Path) -> None:
    with ExitStack() as cleanup:
        with few_files(FILES):
            broker = cleanup.enter_context(Broker(tmp_path))
        client = cleanup.enter_context(httpx.Client(base_url=broker.base_url))
        broker.create_topic("t")
        before = produce(client)
        with idle(broker, 2 * FILES):
            assert [before, *(produce(client) for _ in range(5))] == [200] * 6


def produce(client: httpx.Client) -> int:
    body = '{"records":[{"value":1}]}'
    return client.post("/topics/t", content=body, headers={"content-type": JSON}).status_code
