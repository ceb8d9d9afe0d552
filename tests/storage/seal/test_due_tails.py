"""Which tails a broker seals: due ones, old ones of the same topic, those that leave memory."""

import pytest

from tests.storage.read.test_tail_cache import batch_of
from tests.support.logs import closing, opened
from tests.support.records import TIME_MS
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import LoseRecords
from tidelog.storage.read.tail_cache import TailCache
from tidelog.storage.seal import sealer
from tidelog.storage.seal.sealer import TAKEOVER_FACTOR, DueTails
from tidelog.storage.state import idle_tails, tail_chunk_counts
from tidelog.storage.store.memory import MemoryStore

SEGMENT_MS = 100_000


async def fill(log: Broker, number: int, committed_ms: int, *, nbytes: int = 10) -> None:
    """One chunk in the tail of a partition, as if it were committed at that time."""
    rows = Rows([TIME_MS], [None], [b"v" * nbytes])
    await log.records.append(log.state.topic("t"), [(number, rows)], size=nbytes, is_json=False)
    log.state.partition("t", number).tail[0].committed_ms = committed_ms


def due(
    log: Broker,
    now_ms: int,
    *,
    is_own: bool = True,
    cache: TailCache | None = None,
    topic_chunks_max: int = 200_000,
) -> list[int]:
    cache = cache or TailCache(1 << 20)
    rules = DueTails(lambda: now_ms, 10_000, topic_chunks_max, lambda _: is_own, cache)
    return {topic.name: numbers for topic, numbers in rules.of(log.state)}["t"]


async def test_old_tails_of_a_topic_go_along_with_a_tail_that_is_due() -> None:
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 5, {"segment.ms": str(SEGMENT_MS)})
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


IDLE_AGES = {
    "small": (1, {}, idle_tails.IDLE_MS),
    "many chunks": (idle_tails.IDLE_CHUNKS, {}, 600_000),
    "its own segment.ms": (1, {"segment.ms": "600000"}, 600_000),
    "kept for an hour": (1, {"retention.ms": "4000000"}, 1_000_000),
    "kept for minutes": (1, {"retention.ms": "1000"}, 600_000),
    "kept without limit": (1, {"retention.ms": "-1"}, idle_tails.IDLE_MS),
}


@pytest.mark.parametrize("case", IDLE_AGES)
async def test_a_nearly_idle_tail_waits_for_hours(case: str) -> None:
    chunks, configs, age_ms = IDLE_AGES[case]
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 1, configs)
        for _ in range(chunks):
            await fill(log, 0, TIME_MS)
        assert due(log, TIME_MS + age_ms - 1) == []
        assert due(log, TIME_MS + age_ms) == [0]
        topic = log.state.topic("t")
        assert idle_tails.due_ms(topic, 0) == TIME_MS + age_ms
        assert due(log, TIME_MS + TAKEOVER_FACTOR * age_ms - 1, is_own=False) == []
        assert due(log, TIME_MS + TAKEOVER_FACTOR * age_ms, is_own=False) == [0]


async def test_a_large_tail_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 1, {})
        await fill(log, 0, TIME_MS, nbytes=1000)
        assert due(log, TIME_MS + 600_000) == []
        monkeypatch.setattr(idle_tails, "IDLE_BYTES", log.state.partition("t", 0).tail_bytes)
        assert due(log, TIME_MS + 600_000) == [0]


async def test_a_default_of_the_cluster_holds_for_idle_tails_too() -> None:
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 1, {})
        await fill(log, 0, TIME_MS)
        await log.topics.set_defaults({"log.roll.ms": "700000"})
        assert due(log, TIME_MS + 699_999) == []
        assert due(log, TIME_MS + 700_000) == [0]


async def test_lost_records_alone_are_not_due_and_go_along_with_nothing() -> None:
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 2, {"segment.ms": str(SEGMENT_MS)})
        for number in range(2):
            await fill(log, number, TIME_MS)
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 1, 0, 1))
        assert due(log, TIME_MS + SEGMENT_MS) == [0]
        await log._log.submit(LoseRecords(log.state.topic("t").topic_id, 0, 0, 1))
        assert due(log, TIME_MS + SEGMENT_MS) == []


async def test_a_tail_is_due_before_the_cache_evicts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealer, "EVICTION_BYTES_MIN", 10_000)
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 2, {"segment.ms": str(SEGMENT_MS)})
        await fill(log, 0, TIME_MS, nbytes=12_000)
        await fill(log, 1, TIME_MS, nbytes=500)  # too small for a segment of its own
        topic_id, cache = log.state.topic("t").topic_id, TailCache(100_000)
        for number in range(2):
            cache.add((topic_id, number), 0, batch_of(0, 1), is_json=False, nbytes=2000)
        assert due(log, TIME_MS, cache=cache) == []
        cache.add(("another", 0), 0, batch_of(0, 1), is_json=False, nbytes=48_000)
        assert due(log, TIME_MS, cache=cache) == [0]
        assert due(log, TIME_MS, cache=cache, is_own=False) == []


async def fill_with(log: Broker, *counts: int) -> None:
    """So many chunks in each partition of `t`."""
    for number, count in enumerate(counts):
        for _ in range(count):
            await fill(log, number, TIME_MS)


async def test_the_longest_tails_are_due_if_a_topic_has_too_many_chunks() -> None:
    """Those of half of the mean: they have at least half of the chunks."""
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 5, {"segment.ms": str(SEGMENT_MS)})
        await fill_with(log, 1, 2, 6, 7)
        assert due(log, TIME_MS, topic_chunks_max=17) == []
        assert due(log, TIME_MS, topic_chunks_max=16) == [1, 2, 3]
        assert due(log, TIME_MS, topic_chunks_max=16, is_own=False) == []
        assert due(log, TIME_MS, topic_chunks_max=8, is_own=False) == [1, 2, 3]
        await log.records.seal("t", [1, 2, 3])
        assert due(log, TIME_MS, topic_chunks_max=2) == []
        assert due(log, TIME_MS, topic_chunks_max=1) == [0]


async def test_topic_is_due_if_all_topics_have_many_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bound; for a broker that does not own the seals, three quarters.

    A topic with few of the chunks is not due.
    """
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", 16)
    async with closing(await opened(MemoryStore())) as log:
        await log.topics.create("t", 3, {"segment.ms": str(SEGMENT_MS)})
        await log.topics.create("u", 9, {"segment.ms": str(SEGMENT_MS)})
        await fill_with(log, 2, 2)
        for number in range(4):
            rows = Rows([TIME_MS], [None], [b"v"])
            await log.records.append(log.state.topic("u"), [(number, rows)], size=1, is_json=False)
        assert due(log, TIME_MS) == []
        for limit, is_own in ((15, True), (10, False)):
            monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", limit)
            assert due(log, TIME_MS, is_own=is_own) == [0, 1]
        monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", 15)
        assert due(log, TIME_MS, is_own=False) == []
        await log.records.seal("t")
        await fill_with(log, 1)
        monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", 8)
        assert due(log, TIME_MS) == []
