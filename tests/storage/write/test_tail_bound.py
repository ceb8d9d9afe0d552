"""Records above the bound of the chunks in all tails: refused before a flush, until a seal."""

import pytest

from tests.support.logs import closing, with_topic
from tests.support.records import TIME_MS
from tidelog.storage.codec.chunk import Rows
from tidelog.storage.core.errors import BoundReached
from tidelog.storage.log import Log
from tidelog.storage.state import shares as rules
from tidelog.storage.state import tail_chunks
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.requests import AppendRequest, part_rows

SHARE = 3
ROWS = Rows([TIME_MS], [None], [b"v"])


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_chunks, "CHUNKS_MAX", SHARE * rules.PARTS)


async def append(log: Log, topic: str, number: int) -> None:
    await log.append(log.state.topic(topic), [(number, ROWS)], size=1, is_json=False)


async def transact(log: Log) -> None:
    """Append to both topics in one request."""
    parts = [(log.state.topic(name), 0, ROWS) for name in "tu"]
    await log.transact(parts, [], size=2, is_json=False)


def ends(log: Log) -> list[int]:
    return [partition.high_watermark for _, _, partition in log.state.partitions()]


async def test_a_request_is_refused_whole_and_takes_no_memory() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        await log.create_topic("u", 1, {})
        for _ in range(SHARE):
            await append(log, "u", 0)
        with pytest.raises(BoundReached, match="the topic 'u' has 3 of its 3 chunks"):
            await transact(log)
        assert (ends(log), log.writer.buffered_bytes) == ([0, SHARE], 0)
        await append(log, "t", 0)
        await log.seal("u")
        await transact(log)
        assert ends(log) == [2, SHARE + 1]


async def test_records_that_were_acknowledged_are_committed_above_the_bound() -> None:
    """Those of a hot log, which a broker finds at its start."""

    async with closing(await with_topic(MemoryStore())) as log:
        topic = log.state.topic("t")
        for _ in range(2 * SHARE):
            request = AppendRequest([part_rows(topic, 0, ROWS)], 1, topic_id=topic.topic_id)
            (waiter,) = log.writer.recover([request])
            await waiter
        assert ends(log) == [2 * SHARE]
        with pytest.raises(BoundReached):
            await append(log, "t", 0)
        await log.seal("t")
        await append(log, "t", 0)
