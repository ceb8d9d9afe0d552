"""Reads that are repeated, because the process may have been suspended meanwhile."""

import pytest

from tests.support.clock import ManualClock
from tests.support.vloop import run
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.read.reader import READS_MAX, retry_after_suspend

PAUSE_S = 10.0


@pytest.mark.parametrize(
    ("takes_s", "damaged", "calls"),
    [
        (1.0, 0, 1),
        (1.0, 1, 1),
        (11.0, 1, 2),
        (11.0, READS_MAX - 1, READS_MAX),
        (11.0, READS_MAX, READS_MAX),
    ],
)
def test_a_read_is_repeated_only_if_it_took_long_and_not_for_ever(
    takes_s: float, damaged: int, calls: int
) -> None:
    clock, made = ManualClock(), 0

    async def read() -> int:
        nonlocal made
        made += 1
        clock.advance(takes_s)
        if made <= damaged:
            raise Corrupt("wal/1", "is gone")
        return made

    async def main() -> None:
        if calls > damaged:
            assert await retry_after_suspend(clock, PAUSE_S, read) == calls
        else:
            with pytest.raises(Corrupt):
                await retry_after_suspend(clock, PAUSE_S, read)
        assert made == calls

    run(main)
