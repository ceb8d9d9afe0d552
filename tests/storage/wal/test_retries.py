"""Reads that are repeated, because the process may have been suspended meanwhile."""

import pytest

from tests.support.clock import ManualClock
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.clocks import READS_MAX, Freshness

PAUSE_S = 10.0


@pytest.mark.parametrize("has_boot_time", [True, False])
@pytest.mark.parametrize(
    ("takes_s", "damaged", "calls"),
    [
        (1.0, 0, 1),
        (1.0, 1, 1),
        (12.0, 1, 2),
        (12.0, READS_MAX - 1, READS_MAX),
        (12.0, READS_MAX, READS_MAX),
    ],
)
async def test_a_read_is_repeated_only_if_it_took_long_and_not_for_ever(
    takes_s: float, damaged: int, calls: int, has_boot_time: bool
) -> None:
    """The boot clock may stop while a host pauses the machine. The store's clock then shows it."""
    clock, store, made = ManualClock(), MemoryStore(now_ms=1), 0
    freshness = Freshness(store, clock)

    async def read() -> int:
        nonlocal made
        made += 1
        clock.advance(takes_s if has_boot_time else 0.0)
        store.now_ms += round(takes_s * 1000)
        if made <= damaged:
            raise Corrupt("wal/1", "is gone")
        return made

    if calls > damaged:
        assert await freshness.retry_after_suspend(read, PAUSE_S) == calls
    else:
        with pytest.raises(Corrupt):
            await freshness.retry_after_suspend(read, PAUSE_S)
    assert made == calls
