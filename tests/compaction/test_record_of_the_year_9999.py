"""One record is stamped far in the future. Retention takes what is old behind it."""

from tests.support.logs import COLD, append, closing, opened
from tests.support.maintenance import caring
from tests.support.records import TIME_MS
from tidelog.compaction.retention import retain
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore

YEAR_9999_MS = 253_402_300_799_999
HOUR_MS = 3_600_000
OLD_MS = TIME_MS - 1000 * HOUR_MS


async def test_one_record_of_the_year_9999_does_not_stop_retention() -> None:
    inner = MemoryStore(now_ms=TIME_MS)
    async with closing(await opened(inner, COLD)) as log:
        await log.create_topic("t", 1, {"retention.ms": str(HOUR_MS)})
        try:
            await append(log, "future", timestamps=[YEAR_9999_MS])
        except LogError:
            return  # a broker that refuses such a record is as good
        await log.seal("t")
        for _ in range(3):
            await append(log, "old", timestamps=[OLD_MS])
            await log.seal("t")
        async with caring(inner) as cluster:
            await retain(cluster, None, is_dry=False)
            assert cluster.state.partition("t", 0).log_start_offset == 4
