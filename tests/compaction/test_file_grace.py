"""No grace that a process chooses lets it delete a file that a commit may still name."""

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from tests.support.broker import tidelog
from tests.support.clock import ManualClock
from tests.support.logs import COLD, append, closing, opened, read_values
from tests.support.maintenance import caring, log_with
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.engine import InProcess, OnRows
from tidelog.compaction.garbage import Grace
from tidelog.compaction.rewrite import Rewrite
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.log import Log
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SEGMENTS = [["a", "b"], ["c", "d"], ["e", "f"], ["g", "h"]]
VALUES = [value for values in SEGMENTS for value in values]
GRACES = [-DAY_MS, 0, 1, HOUR_MS]


async def collected(store: ObjectStore, table_ms: int) -> list[str]:
    """Another process collects now, with a grace of its own."""
    async with caring(store) as other:
        planned = await plan(other, Grace(table_ms=table_ms))
        await collect(other, planned)
        return [garbage.key for garbage in planned.garbage]


class Interrupted(InProcess):
    """Something happens between the uploads of a rewrite and its commit."""

    def __init__(
        self, cluster: MaintenanceSession, meanwhile: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(cluster.store, cluster.clock)
        self._meanwhile = meanwhile

    async def write(self, tasks: Sequence[Rewrite], on_rows: OnRows) -> list[SegmentFile]:
        files = await super().write(tasks, on_rows)
        await self._meanwhile()
        return files


@pytest.mark.parametrize("table_ms", GRACES)
async def test_a_collection_beside_a_seal_leaves_its_segments(table_ms: int) -> None:
    inner = MemoryStore()
    log = await log_with(inner, SEGMENTS)
    await append(log, "i")
    table = await log.tables.of(log.state.topic("t"))
    add = table.add

    async def late(*args: object) -> None:
        inner.now_ms += 2 * HOUR_MS
        assert await collected(inner, table_ms) == []
        await add(*args)

    table.add = late
    assert await log.seal("t") == 1
    fresh = await opened(inner, COLD)
    async with closing(log, fresh):
        assert await read_values(fresh) == [*VALUES, "i"]


@pytest.mark.parametrize("table_ms", GRACES)
async def test_a_collection_beside_a_rewrite_leaves_its_output(table_ms: int) -> None:
    inner = MemoryStore()
    log = await log_with(inner, SEGMENTS)

    async def meanwhile() -> None:
        inner.now_ms += 2 * HOUR_MS
        assert await collected(inner, table_ms) == []

    async with caring(inner) as cluster:
        engine = Interrupted(cluster, meanwhile)
        (done,) = await compact(cluster, None, is_dry=False, engine=engine)
        assert (done.segments, done.segments_after) == (4, 1)
    fresh = await opened(inner, COLD)
    async with closing(log, fresh):
        assert await read_values(fresh) == VALUES
        # The inputs are the option's to give: the commit that removed them is final.
        removed = await collected(inner, 0)
        assert len(removed) == len(SEGMENTS)
        assert await read_values(fresh) == VALUES


async def sealed_on(folder: Path) -> tuple[FolderStore, Log]:
    store = FolderStore(folder)
    log = await Broker.open(store, COLD, clock=SystemClock(), name="b")
    await log.create_topic("t", 1, {})
    for values in SEGMENTS:
        await append(log, *values)
        await log.seal("t")
    return store, log


async def test_a_collection_leaves_the_inputs_that_a_late_rewrite_puts_back(
    tmp_path: Path,
) -> None:
    store, log = await sealed_on(tmp_path)
    prefix = log.state.topic("t").prefix
    await log.close()
    clock = ManualClock(1, start_ms=time.time_ns() // 1_000_000)
    cluster = await MaintenanceSession.open(store, clock)
    table = await cluster.table(cluster.state.topic("t"))
    replace = table.replace

    async def late(
        removed: list[SegmentFile], added: list[SegmentFile], *args: object, **named: object
    ) -> None:
        """The process stands still for a day: a collection that ends now takes the output."""
        table.replace = replace
        days_ago = time.time() - 2 * DAY_MS / 1000
        for file in added:
            os.utime(tmp_path / prefix / file.path, (days_ago, days_ago))
        await replace(removed, added, *args, **named)
        other = await MaintenanceSession.open(store, SystemClock())
        beside = await plan(other, Grace(table_ms=0))
        await store.delete([f"{prefix}/{file.path}" for file in added])
        await collect(other, beside)
        await other.close()
        clock.advance(2 * DAY_MS / 1000)

    table.replace = late
    with pytest.raises(Unavailable, match="run again"):
        await compact(cluster, None, is_dry=False)
    fresh = await Broker.open(store, COLD, clock=SystemClock(), name="fresh")
    assert await read_values(fresh) == VALUES
    await fresh.close()
    await cluster.close()
    await store.close()


def test_no_value_of_the_option_takes_a_file_that_no_commit_named(tmp_path: Path) -> None:
    async def prepared() -> str:
        store, log = await sealed_on(tmp_path)
        prefix = log.state.topic("t").prefix
        await log.close()
        uploaded = f"{prefix}/{object_keys.segment(0, 8, 9, 'ab12')}"
        await store.create(uploaded, [b"a seal under way"])
        await store.close()
        return uploaded

    uploaded = asyncio.run(prepared())
    for command in ("collect", "maintain"):
        arguments = (command, "--yes", "--json", "--file-grace-ms", "0", "--store", str(tmp_path))
        collection = json.loads(tidelog(*arguments).stdout)["collected"]
        assert uploaded not in [garbage["key"] for garbage in collection["garbage"]]
    assert collection["deleted"] == len(SEGMENTS), "maintain merged them, and the merge is final"
    assert (tmp_path / uploaded).exists()
