"""Each process has a WAL retention and a view age of its own, and another one's log is lost."""

import asyncio
import contextlib

from tests.support.clock import ManualClock
from tests.support.logs import store_of
from tests.support.loop_brokers import (
    Acked,
    LoopStore,
    assert_kept,
    broker,
    collected,
    ending,
    given,
    held,
    loop_clock,
    produce,
    served,
    way,
)
from tests.support.records import TIME_MS
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core.errors import LogError

SHORT = Grace(wal_ms=4000)
SHORT_VIEW_S = 1.0


async def test_a_collection_with_another_retention_loses_no_record_of_a_stopped_broker() -> None:
    store = LoopStore()
    a, b = await broker(store, loop_clock(1), "a"), await broker(store, loop_clock(2), "b")
    async with ending(a, b):
        await a.topics.create("t", 1, {})
        await b._log.wal.refresh()
        acked: Acked = {}
        await produce(b, "b0", acked)
        given(acked, "the broker is at work")
        store_of(b).freeze()
        await a._log.wal.refresh()
        for value in ("a1", "a2", "a3"):
            await produce(a, value, acked)
        await a.records.seal("t")
        for number in range(4):
            await collected(store, loop_clock(10 + number), SHORT)
            await produce(a, f"m{number}", acked)
            await a.records.seal("t")
            await asyncio.sleep(4.5)
        store_of(b).thaw()
        of_b: Acked = {}
        for number in range(3):
            await produce(b, f"b{number + 1}", of_b)
        records = await held(store, loop_clock(20))
        assert_kept(acked, records)
        assert_kept(of_b, records)
        await a._log.wal.refresh()
        assert await served(a) == records


async def test_a_command_that_stands_still_does_nothing_that_is_not_in_the_log() -> None:
    store = LoopStore()
    a = await broker(store, loop_clock(1), "a", view_age_max_s=SHORT_VIEW_S)
    async with ending(a):
        await a.topics.create("t", 1, {})
        acked: Acked = {}
        for number in range(4):
            await produce(a, f"v{number}", acked)
            await a.records.seal("t")
        command = await MaintenanceSession.open(way(store), loop_clock(2))
        for number in range(4):
            await produce(a, f"m{number}", acked)
            await a.records.seal("t")
            await asyncio.sleep(4.3)
            await collected(store, loop_clock(10 + number), SHORT)
        start = 0
        with contextlib.suppress(LogError):
            (result,) = await delete_records(command, "t", {0: 2}, is_dry=False)
            start = result.log_start_offset
        await command.close()
        fresh = await broker(store, loop_clock(20))
        async with ending(fresh):
            assert fresh.state.partition("t", 0).log_start_offset == start
            records = await served(fresh)
        assert_kept({offset: acked[offset] for offset in acked if offset >= start}, records)


class GuestClock(ManualClock):
    """The clock of a guest: the time of a pause is missing in its boot time.

    Its wall time is right again as soon as the guest runs.
    """

    def __init__(self, name: int) -> None:
        super().__init__(name, start_ms=TIME_MS, loop_time=asyncio.get_running_loop().time)
        self.missing_s = 0.0

    def boot_s(self) -> float:
        return super().boot_s() - self.missing_s

    def now_ms(self) -> int:
        return TIME_MS + int(asyncio.get_running_loop().time() * 1000)


async def test_a_guest_that_was_paused_acknowledges_no_lost_record() -> None:
    store = LoopStore()
    guest_clock = GuestClock(2)
    a = await broker(store, loop_clock(1), "a", view_age_max_s=1.0)
    guest = await broker(store, guest_clock, "guest", view_age_max_s=1.0)
    async with ending(a, guest):
        await a.topics.create("t", 1, {})
        await guest._log.wal.refresh()
        acked: Acked = {}
        await produce(guest, "before", acked)
        given(acked, "the guest is at work")
        paused_s = asyncio.get_running_loop().time()
        deleted = 0
        for number in range(5):
            await a._log.wal.refresh()
            await produce(a, f"a{number}", acked)
            await a.records.seal("t")
            await asyncio.sleep(4.6)
            deleted += await collected(store, loop_clock(10 + number), Grace(wal_ms=4000))
        given(deleted, "entries are collected during the pause")
        guest_clock.missing_s = asyncio.get_running_loop().time() - paused_s
        of_guest: Acked = {}
        for value in ("late1", "late2"):
            await produce(guest, value, of_guest)
        records = await held(store, loop_clock(20))
        assert_kept(acked, records)
        assert_kept(of_guest, records)
