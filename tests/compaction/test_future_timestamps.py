"""D15: a segment that is stamped in the future is as old as its commit: nothing waits behind it."""

import pytest

from tests.support.logs import COLD, append, closing, opened
from tests.support.maintenance import caring
from tests.support.records import TIME_MS
from tidelog.compaction import plan
from tidelog.compaction.retention import retain
from tidelog.storage.core import object_keys
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.core.topic_configs import effective
from tidelog.storage.state.partition import Partition
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.manifest import SegmentColumns

YEAR_9999_MS = 253_402_300_799_999
HOUR_MS = 3_600_000


async def test_retention_goes_on_behind_a_record_of_the_year_9999() -> None:
    inner = MemoryStore(now_ms=TIME_MS)
    async with closing(await opened(inner, COLD)) as log:
        configs = {
            "retention.ms": str(HOUR_MS),
            "message.timestamp.after.max.ms": str(2**63 - 1),
        }
        await log.create_topic("t", 1, configs)
        await append(log, "future", timestamps=[YEAR_9999_MS])
        await log.seal("t")
        for _ in range(3):
            await append(log, "old", timestamps=[TIME_MS - 1000 * HOUR_MS])
            await log.seal("t")
        async with caring(inner) as cluster:
            for wait_ms, start in ((0, 0), (HOUR_MS // 2, 0), (HOUR_MS, 4)):
                inner.now_ms += wait_ms
                await retain(cluster, None, is_dry=False)
                await cluster.refresh()
                assert cluster.state.partition("t", 0).log_start_offset == start


@pytest.mark.parametrize(
    ("committed_ms", "start"), [(TIME_MS - HOUR_MS, 10), (TIME_MS - 10, 0), (None, 0)]
)
def test_a_segment_of_the_future_counts_by_its_commit_if_that_is_known(
    committed_ms: int | None, start: int
) -> None:
    path = object_keys.segment(0, 0, 10, "a")
    file = SegmentFile(path, 0, 0, 10, 1000, 10, TIME_MS, TIME_MS + 10 * HOUR_MS)
    commit_times_ms = None if committed_ms is None else [committed_ms]
    config = effective({"retention.ms": str(HOUR_MS // 2)})
    cut = plan.retention(
        SegmentColumns.of([file], commit_times_ms), Partition(0, 10, 10), config, TIME_MS
    )
    assert (0 if cut is None else cut.log_start_offset) == start


def test_compaction_goes_on_behind_a_record_of_the_future() -> None:
    files = [
        SegmentFile(object_keys.segment(0, 0, 10, "a"), 0, 0, 10, 1000, 10, TIME_MS, YEAR_9999_MS),
        SegmentFile(
            object_keys.segment(0, 10, 20, "b"), 0, 10, 20, 1000, 10, 0, TIME_MS - 2 * HOUR_MS
        ),
    ]
    columns = SegmentColumns.of(files, [TIME_MS - 2 * HOUR_MS] * 2)
    config = effective({"cleanup.policy": "compact", "min.compaction.lag.ms": str(HOUR_MS)})
    cleanable_range = plan.cleanable(columns, Partition(0, 20, 20), config, 0, TIME_MS)
    assert (cleanable_range.first, cleanable_range.last) == (0, 2)
