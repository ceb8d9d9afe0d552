"""The store refuses an acks=1 request for good. The broker goes on without that request."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from tests.support.hotlogs import names
from tests.support.logs import append, kill, made, opened, read_values
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import LogError, StoreRefused
from tidelog.storage.core.model import Acks, Part
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created

LIMIT_BYTES = 20_000
LARGE = random.Random(11).randbytes(40_000).hex()
"""Stays large, whatever packs it."""
TRIES = 100
"""Produces of other clients, a second apart: as often may the store refuse the large request."""


class Small(MemoryStore):
    """Refuses large objects, as a proxy does (413), a file size limit, or a nearly full disk."""

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        if sum(memoryview(part).nbytes for part in parts) > LIMIT_BYTES:
            raise StoreRefused("413 too large")
        return await super().create(key, parts)


async def with_refused_request(inner: Small, hot: Path) -> Log:
    """A broker that acked a request which the store refuses."""
    log = await opened(inner, hot_dir=hot)
    await log.create_topic("t", 1, {})
    assert await append(log, "before") is not None
    assert await append(log, LARGE, acks=Acks.LOCAL) is None
    await asyncio.sleep(1.0)
    return log


async def is_produced(log: Log, value: str) -> bool:
    """Whether one of many tries commits it."""
    for _ in range(TRIES):
        try:
            await append(log, value)
        except LogError:
            await asyncio.sleep(1.0)
        else:
            return True
    return False


async def test_other_produces_are_committed_beside_a_refused_request(tmp_path: Path) -> None:
    log = await with_refused_request(Small(), tmp_path)
    try:
        assert await is_produced(log, "after")
        assert await read_values(log) == ["before", "after"]
        assert names(tmp_path), "the hot log keeps what the broker acked"
    finally:
        await kill(log)


async def test_a_broker_starts_with_a_refused_request_in_its_hot_log(tmp_path: Path) -> None:
    inner = Small()
    await kill(await with_refused_request(inner, tmp_path))
    log = made(inner, hot_dir=tmp_path)
    opening = asyncio.create_task(log.open("c0ffee"))
    try:
        await asyncio.wait([opening], timeout=TRIES)
        assert opening.done(), "the broker is not ready"
        assert await is_produced(await opening, "after")
        assert names(tmp_path), "the hot log keeps what the broker acked"
    finally:
        opening.cancel()
        (opened,) = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(opened, Broker):
            await kill(opened)
