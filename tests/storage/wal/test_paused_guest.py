"""Boot time stands still while a host pauses a guest, and an old view looks young."""

import asyncio

from tests.support.clock import ManualClock
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
)
from tests.support.records import TIME_MS
from tidelog.compaction.garbage import Grace


class GuestClock(ManualClock):
    """The clock of a guest: the time of a pause is missing in its boot time. Its wall time is
    right again as soon as the guest runs."""

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
        await a.create_topic("t", 1, {})
        await guest.wal.refresh()
        acked: Acked = {}
        await produce(guest, "before", acked)
        given(acked, "the guest is at work")
        paused_s = asyncio.get_running_loop().time()
        deleted = 0
        for number in range(5):
            await a.wal.refresh()
            await produce(a, f"a{number}", acked)
            await a.seal("t")
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
