"""Wall time within a minute of the store's, and reads that are repeated after a suspension."""

import pytest

from tests.support.clock import ManualClock
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SKEW_MS_MAX
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.store_time import StoreTime
from tidelog.storage.wal.view_age import READS_MAX, Freshness

YEAR_MS = 365 * 86_400_000


def of(skew_ms: int, *, is_answered: bool = True) -> tuple[StoreTime, MemoryStore, ManualClock]:
    clock = ManualClock()
    store = MemoryStore(now_ms=clock.now_ms() if is_answered else 0)
    clock.skew_ms = skew_ms
    return StoreTime(store, clock), store, clock


@pytest.mark.parametrize(
    ("skew_ms", "left_ms"),
    [
        (0, 0),
        (59_000, 59_000),
        (-SKEW_MS_MAX, -SKEW_MS_MAX),
        (SKEW_MS_MAX + 1, SKEW_MS_MAX),
        (YEAR_MS, SKEW_MS_MAX),
        (-YEAR_MS, -SKEW_MS_MAX),
    ],
)
def test_a_wrong_clock_is_moved_to_within_a_minute(skew_ms: int, left_ms: int) -> None:
    time, store, clock = of(skew_ms)
    assert time.skew_ms() == skew_ms
    assert time.now_ms() == store.now_ms + left_ms
    # The store says nothing for an hour: the boot clock goes on from its last answer.
    clock.advance(3600)
    assert time.skew_ms() == skew_ms
    assert time.now_ms() == store.now_ms + 3_600_000 + left_ms
    store.now_ms += 3_600_000
    assert time.skew_ms() == skew_ms


def test_before_the_stores_first_answer_the_machines_clock_counts() -> None:
    time, store, clock = of(YEAR_MS, is_answered=False)
    assert (time.skew_ms(), time.now_ms()) == (0, clock.now_ms())
    store.now_ms = clock.now_ms() - YEAR_MS
    assert time.skew_ms() == YEAR_MS


def test_a_clock_that_is_set_counts_at_once() -> None:
    time, _, clock = of(YEAR_MS)
    assert time.skew_ms() == YEAR_MS
    clock.skew_ms = -5000
    assert time.skew_ms() == -5000
    assert time.now_ms() == clock.now_ms()


def test_a_pause_that_boot_time_misses_ends_with_the_stores_next_answer() -> None:
    time, store, clock = of(0)
    assert time.skew_ms() == 0
    clock.skew_ms = 3_600_000  # its wall clock is right after the pause, its boot clock is not
    assert time.now_ms() == store.now_ms + SKEW_MS_MAX
    store.now_ms += 3_600_000
    assert (time.skew_ms(), time.now_ms()) == (0, store.now_ms)


# -- reads that are repeated after a suspension


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
    clock, store, call_count = ManualClock(), MemoryStore(now_ms=1), 0
    freshness = Freshness(store, clock)

    async def read() -> int:
        nonlocal call_count
        call_count += 1
        clock.advance(takes_s if has_boot_time else 0.0)
        store.now_ms += round(takes_s * 1000)
        if call_count <= damaged:
            raise Corrupt("wal/1", "is gone")
        return call_count

    if calls > damaged:
        assert await freshness.retry_after_suspend(read, PAUSE_S) == calls
    else:
        with pytest.raises(Corrupt):
            await freshness.retry_after_suspend(read, PAUSE_S)
    assert call_count == calls
