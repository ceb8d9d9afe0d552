"""Which tails a broker seals: due ones, old ones of the same topic, those that leave memory."""

import pytest

from tests.storage.read.test_tail_cache import batch_of
from tests.support.logs import closing, opened
from tests.support.records import TIME_MS
from tests.support.vloop import run
from tidelog.storage.core.actions import LoseRecords
from tidelog.storage.core.chunk import Rows
from tidelog.storage.io.memory import MemoryStore
from tidelog.storage.log import Log
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.write import due_tails
from tidelog.storage.write.due_tails import TAKEOVER_FACTOR, DueTails

SEGMENT_MS = 100_000


async def fill(log: Log, number: int, committed_ms: int, *, nbytes: int = 10) -> None:
    """One chunk in the tail of a partition, as if it were committed at that time."""
    rows = Rows([TIME_MS], [None], [b"v" * nbytes])
    await log.append(log.state.topic("t"), [(number, rows)], size=nbytes, is_json=False)
    log.state.partition("t", number).tail[0].committed_ms = committed_ms


def due(log: Log, now_ms: int, *, is_own: bool = True, cache: TailCache | None = None) -> list[int]:
    rules = DueTails(lambda: now_ms, 10_000, 200_000, lambda _: is_own, cache or TailCache(1 << 20))
    ((_, numbers),) = rules.of(log.state)
    return numbers


def test_old_tails_of_a_topic_go_along_with_a_tail_that_is_due() -> None:
    async def main() -> None:
        log = await opened(MemoryStore())
        async with closing(log):
            await log.create_topic("t", 5, {"segment.ms": str(SEGMENT_MS)})
            now_ms = TIME_MS + 10 * SEGMENT_MS
            for number, age_ms in enumerate((SEGMENT_MS - 1, SEGMENT_MS // 4, SEGMENT_MS // 4 - 1)):
                await fill(log, number, now_ms - age_ms)
            await fill(log, 3, now_ms - SEGMENT_MS // 2)
            assert due(log, now_ms) == []
            assert due(log, now_ms + 1) == [0, 1, 2, 3]
            log.state.partition("t", 2).tail[0].committed_ms += 2
            assert due(log, now_ms + 1) == [0, 1, 3]
            assert due(log, now_ms + 1, is_own=False) == []
            late_ms = now_ms + 1 + (TAKEOVER_FACTOR - 1) * SEGMENT_MS
            assert due(log, late_ms, is_own=False) == [0, 1, 2, 3]

    run(main)


def test_lost_records_alone_are_not_due_and_go_along_with_nothing() -> None:
    async def main() -> None:
        log = await opened(MemoryStore())
        async with closing(log):
            await log.create_topic("t", 2, {"segment.ms": str(SEGMENT_MS)})
            for number in range(2):
                await fill(log, number, TIME_MS)
            await log.submit(LoseRecords(log.state.topic("t").topic_id, 1, 0, 1))
            assert due(log, TIME_MS + SEGMENT_MS) == [0]
            await log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 0, 1))
            assert due(log, TIME_MS + SEGMENT_MS) == []

    run(main)


def test_a_tail_is_due_before_the_cache_evicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(due_tails, "EVICTION_BYTES_MIN", 10_000)

    async def main() -> None:
        log = await opened(MemoryStore())
        async with closing(log):
            await log.create_topic("t", 2, {"segment.ms": str(SEGMENT_MS)})
            await fill(log, 0, TIME_MS, nbytes=12_000)
            await fill(log, 1, TIME_MS, nbytes=500)  # too small for a segment of its own
            topic_id, cache = log.state.topic("t").topic_id, TailCache(100_000)
            for number in range(2):
                cache.add((topic_id, number), 0, batch_of(0, 1), is_json=False, nbytes=2000)
            assert due(log, TIME_MS, cache=cache) == []
            cache.add(("another", 0), 0, batch_of(0, 1), is_json=False, nbytes=48_000)
            assert due(log, TIME_MS, cache=cache) == [0]
            assert due(log, TIME_MS, cache=cache, is_own=False) == []

    run(main)
