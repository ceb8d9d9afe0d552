"""The sealer of a tail: usually one broker, any broker if that one does not seal (I7)."""

import asyncio

from tests.support import logs
from tests.support.cluster import SETTINGS, Cluster
from tests.support.logs import read_values
from tidelog.storage.seal.sealer import TAKEOVER_FACTOR

SEALING = SETTINGS._replace(is_sealing=True, sealer=SETTINGS.sealer._replace(check_interval_s=0.5))
TOPICS = 12
SEGMENT_S = 10.0


async def never(*_: object) -> None:
    """A round of a sealer that seals nothing."""


async def test_each_topic_is_sealed_by_one_broker_and_by_another_when_that_one_does_not() -> None:
    async with Cluster(SEALING, latency=lambda _: 0.01) as cluster:
        for _ in range(3):
            await cluster.start()
        await cluster.settled()
        configs = {"segment.ms": str(int(SEGMENT_S * 1000))}
        for number in range(TOPICS):
            await cluster.logs[0].create_topic(f"t{number}", 1, configs)
            await logs.append(cluster.logs[0], "a", topic=f"t{number}")
        for log in cluster.logs:
            await log.wal.refresh()
        counters = [log.sealer.counters for log in cluster.logs]
        lazy = cluster.logs[2]
        lazy.sealer._begin_due = never  # type: ignore[method-assign]
        mine = sum(
            lazy.membership.is_first_for(topic.topic_id) for topic in lazy.state.topics.values()
        )
        assert 0 < mine < TOPICS
        await asyncio.sleep(SEGMENT_S + 3)
        assert sum(sealer_counters.segments for sealer_counters in counters) == TOPICS - mine
        assert not any(sealer_counters.conflicts for sealer_counters in counters)
        await asyncio.sleep(TAKEOVER_FACTOR * SEGMENT_S)
        assert counters[2].segments == 0
        for number in range(TOPICS):
            assert await read_values(cluster.logs[1], topic=f"t{number}") == ["a"]
        for log in cluster.logs:
            await log.wal.refresh()
            assert not any(partition.tail for _, _, partition in log.state.partitions())
