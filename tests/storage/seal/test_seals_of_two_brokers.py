"""Two brokers seal one topic: a sealer that is behind the other does not doubt a good table."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.clock import ManualClock
from tests.support.logs import MANUAL, append, closing, opened, read_values
from tests.support.maintenance import caring
from tests.support.views import AGE_S
from tidelog.compaction.retention import delete_records
from tidelog.storage.broker import Broker
from tidelog.storage.core.model import Acks
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import Table
from tidelog.storage.write.requests import AppendRequest


@contextlib.asynccontextmanager
async def ahead_and_behind(inner: MemoryStore) -> AsyncIterator[tuple[Broker, Broker]]:
    """Two brokers that know the first record of `t`."""
    ahead, behind = await opened(inner), await opened(inner)
    async with closing(ahead, behind):
        await ahead.create_topic("t", 1, {})
        await append(ahead, "a")
        await behind.refresh()
        yield ahead, behind


async def seal_without_the_action(log: Log) -> None:
    """The broker stops between its commit to the table and its action in the WAL."""
    real = log.writer.append

    async def stops(request: AppendRequest, acks: Acks) -> Any:
        if request.actions:
            raise asyncio.CancelledError
        return await real(request, acks)

    log.writer.append = stops  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await log.seal("t")
    log.writer.append = real  # type: ignore[method-assign]


@pytest.mark.parametrize("suspended_s", [0.0, AGE_S + 1])
async def test_a_view_that_is_loaded_again_during_a_seal_makes_no_doubt(suspended_s: float) -> None:
    """The table is ahead, and has records that the sealer's view does not have yet."""

    inner = MemoryStore()
    async with ahead_and_behind(inner) as (ahead, behind):
        await append(ahead, "b")
        await seal_without_the_action(ahead)
        assert isinstance(behind.clock, ManualClock)
        behind.clock.advance(suspended_s)
        loaded = behind.state
        await behind.seal("t")
        assert (behind.state is not loaded) == (suspended_s > 0)
        assert not behind.tables.doubts
        assert behind.state.partition("t", 0).sealed_end == 2
        assert await read_values(behind) == ["a", "b"]


async def test_records_that_expire_before_the_view_is_loaded_again_make_no_doubt() -> None:
    """The sealed end that the sealer read first is below them, and the table is ahead."""

    inner = MemoryStore()
    async with ahead_and_behind(inner) as (ahead, behind):
        assert await ahead.seal("t") == 1
        await append(ahead, "b")
        await seal_without_the_action(ahead)
        async with caring(inner) as cluster:
            await delete_records(cluster, "t", {0: 1}, is_dry=False)
        assert isinstance(behind.clock, ManualClock)
        behind.clock.advance(AGE_S + 1)
        await behind.seal("t")
        assert not behind.tables.doubts
        assert behind.state.partition("t", 0).sealed_end == 2
        assert await read_values(behind, offset=1) == ["b"]


async def test_a_seal_of_another_broker_after_the_table_was_read_is_no_damage() -> None:
    """The view applies that seal before the sealer has planned its own."""

    inner = MemoryStore()
    log_a, log_b = await opened(inner, MANUAL), await opened(inner, MANUAL)
    async with closing(log_a, log_b):
        await log_a.create_topic("t", 1, {})
        await append(log_a, "a", "b")
        await log_b.refresh()
        real = log_a.tables.checked

        async def then_another_seals(topic: Any) -> Table:
            table = await real(topic)
            assert await log_b.seal("t") == 2
            await log_a.refresh()
            return table

        log_a.tables.checked = then_another_seals  # type: ignore[method-assign]
        assert await log_a.seal("t") == 0
        assert not log_a.sealer.damaged
        assert log_a.state.partition("t", 0).sealed_end == 2
