"""A broker and its connections in virtual time, without sockets."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.service.conftest import Broker, marked
from tests.service.virtual_connections import PORTS, Connection, served
from tests.support.vloop import VirtualLoop

Connect = Callable[..., Connection]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    return "asyncio", {"loop_factory": VirtualLoop}


@pytest.fixture
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    """A broker with the topic `t`. A mark `broker` has its settings."""
    async with served(**marked(request)) as broker:
        yield broker


@pytest.fixture
async def connect(broker: Broker) -> AsyncIterator[Connect]:
    """A function that opens a connection to a port of the broker; it ends with the test."""
    configs = {name: config_of(broker) for name, config_of in PORTS.items()}
    connections: list[Connection] = []

    def connect(port: str = "clients", **more: Any) -> Connection:
        connections.append(Connection(configs[port], **more))
        return connections[-1]

    yield connect
    for connection in connections:
        connection.end()
