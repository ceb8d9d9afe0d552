"""The store refuses every write. The broker is not ready until it takes one again."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.service.conftest import broker_on, post
from tidelog.storage.core.errors import StoreRefused
from tidelog.storage.core.model import Part
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created

PRODUCES = 10
REASON = "No space left on device"


class FullStore(MemoryStore):
    """A disk that is full: it can be read, and takes nothing."""

    is_full = False

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if self.is_full:
            raise StoreRefused(REASON)
        return await super().create(key, parts)

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        if self.is_full:
            raise StoreRefused(REASON)
        await super().put(key, parts)


async def test_broker_is_ready_while_it_can_write() -> None:
    store = FullStore()
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 1, {})
        assert (await broker.http.get("/ready")).status_code == 200
        store.is_full = True
        for _ in range(PRODUCES):
            assert (await post(broker.http, [{"value": 1}])).status_code == 503
        answer = await broker.http.get("/ready")
        assert answer.status_code == 503
        assert REASON in answer.json()["message"]
        store.is_full = False
        for _ in range(100):
            await post(broker.http, [{"value": 1}])
            if (await broker.http.get("/ready")).status_code == 200:
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail("the broker does not become ready")
        assert (await broker.http.get("/healthy")).status_code == 200
