"""A broker is ready as long as it can write, and learns by itself that it can write again."""

import asyncio

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import Call, Fault
from tests.support.logs import append, closing, made, opened, read_values, store_of, with_topic
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import CommitUnknown, LogError, StoreRefused, Unavailable
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.writer import FAILED_FLUSHES_MAX, TRIAL_S

REASON = "the store does not accept writes: no space for wal/"


def full(call: Call) -> Fault | None:
    """A disk without space: it can be read."""
    if call.verb == "put":
        return Fault.UNAVAILABLE
    return Fault.REFUSED if call.verb == "create" else None


async def is_ready(log: Broker) -> bool:
    try:
        await log.check_ready()
    except Unavailable:
        return False
    return True


async def refused(log: Broker, times: int) -> None:
    for _ in range(times):
        with pytest.raises(StoreRefused):
            await append(log, "refused")


async def ready_after_s(log: Broker) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while not await is_ready(log):  # noqa: ASYNC110 - virtual time: polling is free
        await asyncio.sleep(0.1)
    return loop.time() - began_s


async def test_a_broker_without_requests_learns_that_writes_succeed_again() -> None:
    inner = MemoryStore()
    async with closing(await with_topic(inner)) as log:
        await append(log, "before")
        store_of(log).plan = full
        await refused(log, FAILED_FLUSHES_MAX)
        with pytest.raises(Unavailable, match=REASON):
            await log.check_ready()
        began = store_of(log).count("create")
        await asyncio.sleep(100 * TRIAL_S)
        with pytest.raises(Unavailable, match=REASON):
            await log.check_ready()
        assert 0 < store_of(log).count("create") - began <= 100, "one small PUT a trial"
        store_of(log).plan = lambda _: None
        assert await ready_after_s(log) <= TRIAL_S + 0.2
        last = log.state.seq
        await asyncio.sleep(100 * TRIAL_S)
        assert log.state.seq == last, "trials end with the failure"
        await append(log, "after")
        assert log.writer.buffered_bytes == 0
    async with closing(await opened(inner)) as again:
        assert await read_values(again) == ["before", "after"]


async def test_one_refused_flush_says_nothing_of_the_next() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        for _ in range(10):
            store_of(log).plan = full
            await refused(log, FAILED_FLUSHES_MAX - 1)
            assert await is_ready(log)
            store_of(log).plan = lambda _: None
            await append(log, "good")


async def test_requests_that_are_refused_for_their_size_leave_a_broker_ready() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        store_of(log).plan = full
        await refused(log, FAILED_FLUSHES_MAX)
        store_of(log).plan = lambda _: None  # a small entry is accepted
        assert await ready_after_s(log) <= TRIAL_S + 0.2


async def test_a_flush_without_an_outcome_is_no_write() -> None:
    unopened = made(MemoryStore())
    async with closing(await unopened.open("c0ffee")) as log:
        await log.create_topic("t", 1, {})
        store_of(log).plan = lambda call: Fault.ABSENT if call.verb == "create" else None
        timeout_s = log.settings.writer.answer_timeout_s
        with pytest.raises(CommitUnknown):
            await append(log, "late")
        await asyncio.sleep(1.0)
        with pytest.raises(Unavailable, match=r"a flush has had no outcome for 3[0-9] s"):
            await log.check_ready()
        assert asyncio.get_running_loop().time() < timeout_s + 10.0
        store_of(log).plan = lambda _: None
        assert await ready_after_s(log) <= 2.5, "the longest pause between two PUTs is 2 s"
        assert await read_values(log) == ["late"]


async def test_a_broker_that_was_never_written_to_is_not_ready_when_its_heartbeats_fail() -> None:
    async with Cluster() as cluster:
        broker, other = await cluster.start(), await cluster.start()
        await cluster.settled()
        settings = cluster.settings.membership
        store_of(broker).plan = full
        await asyncio.sleep(settings.member_timeout_s - settings.heartbeat_interval_s)
        assert await is_ready(broker), "its peers still count it as live"
        await asyncio.sleep(2 * settings.heartbeat_interval_s + 0.1)
        with pytest.raises(Unavailable, match=r"no heartbeat was written for .*: put brokers"):
            await broker.check_ready()
        assert await is_ready(other)
        store_of(broker).plan = lambda _: None
        assert await ready_after_s(broker) <= settings.heartbeat_interval_s + 0.2


async def test_a_process_that_was_suspended_is_ready_at_once() -> None:
    """It wrote no heartbeat, but none has failed."""

    async with Cluster() as cluster:
        log = await cluster.start()
        await cluster.settled()
        log.clock.advance(100.0)  # type: ignore[attr-defined]
        cluster.store.suspended_ms = 100_000
        assert await is_ready(log)


async def test_a_broker_that_shuts_down_does_not_wait_for_a_trial() -> None:
    log = await opened(MemoryStore())
    await log.create_topic("t", 1, {})
    store_of(log).plan = full
    await refused(log, FAILED_FLUSHES_MAX)
    began_s = asyncio.get_running_loop().time()
    await log.close()
    assert asyncio.get_running_loop().time() - began_s < 1.0
    with pytest.raises(LogError, match="shutting down"):
        await append(log, "late")
