"""HEAD and OPTIONS are answered, as monitors and balancers ask."""

from collections.abc import AsyncIterator

import pytest

from tests.service.conftest import Broker, append, broker_on
from tidelog.storage.store.memory import MemoryStore

PATHS = ["/", "/healthy", "/ready", "/metrics", "/topics", "/topics/t", "/v3/clusters"]
HOT = "/topics/t/partitions/0/records"


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    store = MemoryStore()
    async with broker_on(store) as broker:
        await broker.log.create_topic("t", 1, {})
        await append(broker.log, b"1")
        yield broker
    await store.close()


@pytest.mark.parametrize("path", [*PATHS, HOT])
async def test_head_is_get_without_a_body(broker: Broker, path: str) -> None:
    got = await broker.http.get(path)
    asked = await broker.http.head(path)
    assert asked.status_code == got.status_code == 200
    assert asked.content == b""
    assert asked.headers["content-type"] == got.headers["content-type"]


@pytest.mark.parametrize("path", [*PATHS, HOT])
async def test_options_names_the_methods(broker: Broker, path: str) -> None:
    answer = await broker.http.options(path)
    assert answer.status_code in (200, 204)
    assert {"GET", "HEAD", "OPTIONS"} <= set(answer.headers["allow"].replace(" ", "").split(","))
