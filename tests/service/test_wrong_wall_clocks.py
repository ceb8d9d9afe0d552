"""One broker with a wrong wall clock changes what all brokers remember, seal and retain."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.service.conftest import http_client, post, routed
from tests.support.clock import ManualClock
from tests.support.loop_brokers import LoopStore, broker, ending, given, loop_clock, produce, way
from tests.support.records import rows
from tests.support.vloop import run
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.service.server.app import build_app
from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.store.memory import MemoryStore

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


class Clocks(NamedTuple):
    """A broker whose clock is right, one whose clock a test sets, and that clock."""

    right: Broker
    other: Broker
    wrong: ManualClock


def on_two_brokers(test: Callable[[Clocks], Awaitable[None]]) -> None:
    async def main() -> None:
        store, wrong = LoopStore(), loop_clock(2)
        right = await broker(store, loop_clock(1), "right")
        other = await broker(store, wrong, "wrong")
        await right.topics.create("t", 1, {"segment.ms": "1000"})
        await other._log.wal.refresh()
        async with ending(right, other):
            await test(Clocks(right, other, wrong))

    run(main)


async def keyed(log: Broker) -> int:
    """Produce with an idempotency key; where the record lies."""
    topic = log.state.topic("t")
    key = IdempotencyKey("k1", b"f" * 16, 1)
    placed = await log.records.append(topic, [(0, rows("once"))], size=4, is_json=False, key=key)
    given(placed, "the broker answers where the record lies")
    return placed[0].base_offset if placed else -1


async def commit_ahead(log: Broker, clock: ManualClock, *ahead_ms: int) -> None:
    """The broker commits a record with each of these errors of its clock; it may refuse."""
    for skew_ms in ahead_ms:
        clock.skew_ms = skew_ms
        await produce(log, "x", {})
    clock.skew_ms = 0


def test_clock_ahead_forgets_no_idempotency_key() -> None:
    async def test(clocks: Clocks) -> None:
        right, other, wrong = clocks
        first = await keyed(right)
        await other._log.wal.refresh()
        await commit_ahead(other, wrong, 2 * HOUR_MS)
        await right._log.wal.refresh()
        assert await keyed(right) == first

    on_two_brokers(test)


def test_clock_ahead_forgets_no_offset_of_group() -> None:
    async def test(clocks: Clocks) -> None:
        right, other, wrong = clocks
        await produce(right, "x", {})
        offset = GroupOffset(right.state.topic("t").topic_id, 0, 1)
        await right._log.submit(CommitOffsets("g", -1, [offset]))
        given(right.groups.committed_offsets("g"), "the group has an offset")
        await other._log.wal.refresh()
        await commit_ahead(other, wrong, 15 * DAY_MS, 16 * DAY_MS)
        await right._log.wal.refresh()
        offsets = right.groups.committed_offsets("g")
        assert list(offsets) == [TopicPartition("t", 0)]

    on_two_brokers(test)


def test_after_clock_was_ahead_tails_are_sealed_by_their_age() -> None:
    async def test(clocks: Clocks) -> None:
        right, other, wrong = clocks
        await commit_ahead(other, wrong, 400 * DAY_MS)
        await right._log.wal.refresh()
        if right.state.partition("t", 0).tail:
            await right.records.seal("t")
        await produce(right, "y", {})
        await asyncio.sleep(2.5)
        topic = right.state.topic("t")
        assert right._log.sealer.due(right.state) == {topic.topic_id: [0]}

    on_two_brokers(test)


async def test_clock_behind_stamps_no_record_that_retention_deletes() -> None:
    clock = ManualClock(1)
    store = MemoryStore(now_ms=clock.now_ms())
    log = await broker(store, clock)
    try:
        await log.topics.create("t", 1, {})
        clock.skew_ms = 10**9 - clock.now_ms()
        is_acked = False
        async with http_client(routed(build_app(log))) as http:
            with contextlib.suppress(LogError):
                answer = await post(http, [{"value": 1}, {"value": 2}])
                is_acked = answer.status_code == 200
        clock.skew_ms = 0
        if is_acked:
            await log.records.seal("t")
        cluster = await MaintenanceSession.open(way(store), ManualClock(2))
        await retain(cluster, None, is_dry=False)
        await cluster.close()
        await log._log.wal.refresh()
        assert log.state.partition("t", 0).log_start_offset == 0
    finally:
        await log.close()
