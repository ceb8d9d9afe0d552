"""The engine in process: keys that do not fit its memory, and what happens while it works."""

import itertools
import random
from collections.abc import Awaitable, Callable

import pytest

from tests.compaction.test_compact import (
    Record,
    assert_clean,
    compacting,
    latest_of,
    records,
    segments_of,
    write,
)
from tests.support.logs import closing, read_values
from tests.support.maintenance import caring, log_with
from tidelog.compaction.compact import MERGE, SKIP, compact
from tidelog.compaction.engine import InProcess
from tidelog.compaction.retention import delete_records
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.store.memory import MemoryStore


@pytest.mark.parametrize("keys_bytes_max", [400, 4000])
async def test_more_keys_than_memory_are_looked_at_share_by_share(keys_bytes_max: int) -> None:
    inner = MemoryStore()
    log = await compacting(inner)
    draws = random.Random(1)
    async with closing(log):
        everything: list = []
        for _ in range(3):
            part: list[Record] = [
                (b"k%d" % draws.randrange(80) if i % 9 else None, b"%d" % i) for i in range(90)
            ]
            first = len(everything)
            everything += [(first + i, key, value) for i, (key, value) in enumerate(part)]
            await write(log, part)
        async with caring(inner) as cluster:
            engine = InProcess(cluster.store, cluster.clock, keys_bytes_max)
            await compact(cluster, None, is_dry=False, engine=engine)
        assert await records(log) == latest_of(everything)
        await assert_clean(inner)


async def test_a_partition_with_damage_keeps_no_other_from_its_turn(inner: MemoryStore) -> None:
    log = await log_with(inner, [[f"{i}a", f"{i}b"] for i in range(6)], partitions=3)
    async with closing(log), caring(inner) as cluster:
        topic = log.state.topic("t")
        table = await cluster.table(topic)
        damaged = (await table.segments(1))[2]
        body = bytearray(await inner.get(f"{topic.prefix}/{damaged.path}"))
        body[40] ^= 1
        await inner.put(f"{topic.prefix}/{damaged.path}", [bytes(body)])
        told = await compact(cluster, None, is_dry=False)
        assert [(result.what, result.is_damaged) for result in told] == [
            (MERGE, False),
            (SKIP, True),
            (MERGE, False),
        ]
        assert damaged.path in told[1].why
        await table.refresh()
        assert [len(await table.segments(number)) for number in range(3)] == [1, 6, 1]


class Overtaken(InProcess):
    """Something happens between the writing and the commit."""

    def __init__(
        self, cluster: MaintenanceSession, meanwhile: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(cluster.store, cluster.clock)
        self._meanwhile = meanwhile

    async def write(self, tasks, on_rows) -> list[SegmentFile]:
        files = await super().write(tasks, on_rows)
        await self._meanwhile()
        return files


@pytest.mark.parametrize(("start", "is_lost"), [(0, False), (2, False), (4, True)])
async def test_a_retention_of_other_segments_costs_no_work(start: int, is_lost: bool) -> None:
    """The first segment is large: it is none of those that are merged."""

    inner = MemoryStore()
    draws = random.Random(1)
    large = ["".join(chr(draws.randrange(32, 127)) for _ in range(3000)) for _ in range(2)]
    values = [large, *([f"{i}a", f"{i}b"] for i in range(6))]
    log = await log_with(inner, values, retention_ms="-1", target_segment_bytes="9000")
    async with closing(log), caring(inner) as cluster:

        async def retained() -> None:
            async with caring(inner) as other:
                await delete_records(other, "t", {0: start}, is_dry=False)

        engine = Overtaken(cluster, retained)
        (told,) = await compact(cluster, None, is_dry=False, engine=engine)
        assert (told.segments, told.is_lost) == (6, is_lost)
        await segments_of(log)
        await log.wal.refresh()
        log_values = await read_values(log, offset=start)
        assert log_values == [*itertools.chain(*values)][start:]
        await assert_clean(inner)
