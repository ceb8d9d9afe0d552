"""A broker for findings that need nothing else."""

from collections.abc import AsyncIterator

import pytest

from tests.service.conftest import Broker, broker_on
from tidelog.storage.store.memory import MemoryStore


@pytest.fixture
async def broker() -> AsyncIterator[Broker]:
    """One broker on a store in memory, with the topic `t` of one partition."""
    store = MemoryStore()
    async with broker_on(store) as broker:
        await broker.log.create_topic("t", 1, {})
        yield broker
    await store.close()
