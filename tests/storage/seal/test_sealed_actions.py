"""The actions of seals use the entries of other requests."""

import asyncio

import pytest

from tests.support.logs import append, closing, opened
from tidelog.storage.broker import Broker
from tidelog.storage.core.log_settings import LogSettings, SealerSettings
from tidelog.storage.seal.sealed_actions import SEALS_MAX
from tidelog.storage.store.memory import MemoryStore

WAIT_S = 50.0
SEALING = LogSettings(sealer=SealerSettings(check_interval_s=1.0, sealed_wait_s=WAIT_S))
AT_ONCE_S = 3.0
"""Time in which tails that are due are in their tables."""


async def filled(log: Broker, topics: int) -> list[str]:
    names = [f"t{number}" for number in range(topics)]
    for name in names:
        await log.topics.create(name, 1, {"segment.ms": "1000"})
        await append(log, "a", topic=name)
    return names


def unsealed(log: Broker) -> int:
    return sum(bool(partition.tail) for _, _, partition in log.state.partitions())


async def test_actions_go_into_the_entry_of_the_next_request() -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await filled(log, 3)
        await log.topics.create("other", 1, {"segment.ms": "1000000"})
        await asyncio.sleep(AT_ONCE_S)
        seq = log.state.seq
        assert unsealed(log) == 3
        assert log._log.sealer.counters.failures == 0
        await append(log, "b", topic="other")
        assert log.state.seq == seq + 1
        assert unsealed(log) == 1


async def test_actions_wait_no_longer_than_their_time_and_share_an_entry() -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await filled(log, 3)
        await asyncio.sleep(AT_ONCE_S)
        seq = log.state.seq
        await asyncio.sleep(WAIT_S)
        assert unsealed(log) == 0
        assert log.state.seq == seq + 1


@pytest.mark.parametrize("topics", [SEALS_MAX, 4 * SEALS_MAX])
async def test_many_seals_do_not_wait(topics: int) -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await filled(log, topics)
        seq = log.state.seq
        await asyncio.sleep(AT_ONCE_S)
        assert unsealed(log) == 0
        assert log.state.seq <= seq + topics // SEALS_MAX


async def test_a_deleted_topic_refuses_only_its_own_actions() -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await filled(log, 3)
        await asyncio.sleep(AT_ONCE_S)
        await log.topics.delete("t1")
        assert unsealed(log) == 0
        await asyncio.sleep(AT_ONCE_S)
        assert log._log.sealer.counters.failures == 1


async def test_a_seal_on_request_does_not_wait() -> None:
    async with closing(await opened(MemoryStore(), SEALING)) as log:
        await filled(log, 1)
        async with asyncio.timeout(WAIT_S / 2):
            assert await log.records.seal("t0") == 1


async def test_a_broker_that_stops_sends_the_actions() -> None:
    store = MemoryStore()
    log = await opened(store, SEALING)
    await filled(log, 2)
    await asyncio.sleep(AT_ONCE_S)
    assert unsealed(log) == 2
    await log.close()
    async with closing(await opened(store)) as later:
        assert unsealed(later) == 0
