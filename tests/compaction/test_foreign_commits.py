"""Another program commits to the table of a topic, and the log goes on with that table."""

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import deltalake
import polars as pl
import pyarrow.parquet as pq
import pytest

from tests.support.broker_log import BrokerLog, open_log
from tests.support.foreign_engines import caring
from tests.support.logs import COLD, append, read_values
from tests.support.loop_brokers import broker, collected, given
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.compaction.upgrade import raise_level
from tidelog.service.server.maintenance import maintain_once
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker, LogSettings
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

SEGMENTS = 3
DAYS_S = 2 * 86_400.0


def optimize(folder: Path) -> None:
    deltalake.DeltaTable(str(folder)).optimize.compact()


def delete(folder: Path) -> None:
    deltalake.DeltaTable(str(folder)).delete("offset = 1 and partition = 0")


def insert(folder: Path) -> None:
    rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table().slice(0, 1)
    deltalake.write_deltalake(str(folder), rows, mode="append")


def overwrite(folder: Path) -> None:
    rows = deltalake.DeltaTable(str(folder)).to_pyarrow_table()
    deltalake.write_deltalake(str(folder), rows, mode="overwrite")


def restore(folder: Path) -> None:
    table = deltalake.DeltaTable(str(folder))
    table.restore(table.version() - 1)


def forget(folder: Path) -> None:
    """No commit, but the loss of all of them."""
    shutil.rmtree(folder / "_delta_log")


def segments_in(folder: Path) -> set[Path]:
    return set(folder.glob("partition=*/*.parquet"))


def make_old(folder: Path) -> None:
    days_ago = time.time() - DAYS_S
    for path in folder.glob("**/*"):
        os.utime(path, (days_ago, days_ago))


async def two_topics(root: Path) -> Broker:
    """Topics `t` and `u`, each with two partitions and old records in three segments of each."""
    log = await broker(FolderStore(root), SystemClock())
    for topic in ("t", "u"):
        await log.topics.create(topic, 2, {"retention.ms": "-1"})
        for number in range(SEGMENTS):
            for partition in range(2):
                await append(log, f"v{number}", topic=topic, partition=partition)
            await log.records.seal(topic)
    return log


@contextlib.asynccontextmanager
async def reopened(
    root: Path, log: Broker, foreign: Callable[[Path], None]
) -> AsyncIterator[Broker]:
    """A broker that starts after the other program has changed the table of `t`."""
    folder = root / log.state.topic("t").prefix
    await log.close()
    await log._log.store.close()
    foreign(folder)
    later = await broker(FolderStore(root), SystemClock(), "later")
    try:
        yield later
    finally:
        await later.close()
        await later._log.store.close()


@pytest.mark.parametrize("foreign", [optimize, delete, insert, overwrite, restore])
async def test_doubted_table_is_not_sealed(tmp_path: Path, foreign: Callable[[Path], None]) -> None:
    async with reopened(tmp_path, await two_topics(tmp_path), foreign) as log:
        await append(log, "new")
        with contextlib.suppress(LogError):
            await log.records.seal("t")
        assert log.state.partition("t", 0).tail


@pytest.mark.parametrize("foreign", [optimize, insert, overwrite])
async def test_other_topics_are_retained(tmp_path: Path, foreign: Callable[[Path], None]) -> None:
    async with reopened(tmp_path, await two_topics(tmp_path), foreign) as log:
        await log.topics.alter("u", {"retention.ms": "1000"})
        cluster = await MaintenanceSession.open(log._log.store, SystemClock())
        with contextlib.suppress(LogError):
            await retain(cluster, None, is_dry=False)
        await cluster.close()
        await log._log.wal.refresh()
        assert log.state.partition("u", 0).log_start_offset == SEGMENTS


@pytest.mark.parametrize("foreign", [optimize, delete, overwrite, restore, forget])
async def test_collection_leaves_originals(tmp_path: Path, foreign: Callable[[Path], None]) -> None:
    log = await two_topics(tmp_path)
    originals = segments_in(tmp_path / log.state.topic("t").prefix)
    given(len(originals) == 2 * SEGMENTS, "all records are in segments")
    async with reopened(tmp_path, log, foreign) as log:
        make_old(tmp_path / "topics")
        await collected(log._log.store, SystemClock(), Grace())
        assert originals <= segments_in(tmp_path / log.state.topic("t").prefix)


@pytest.mark.parametrize(("foreign", "offset"), [(delete, 1), (restore, SEGMENTS - 1)])
async def test_a_lost_offset_is_damage_and_not_out_of_range(
    tmp_path: Path, foreign: Callable[[Path], None], offset: int
) -> None:
    async with reopened(tmp_path, await two_topics(tmp_path), foreign) as log:
        with pytest.raises(Corrupt):
            await log.records.fetch("t", 0, offset, bytes_max=1000)


# -- a damaged last commit: all other topics are cared for


NOW = Grace(wal_ms=0, table_ms=0)
CUT_BYTES = 40
DAMAGED, WHOLE = "a", "b"
"""Two topics; the care of topics comes to the damaged one first."""


def filled(root: Path) -> None:
    """Two topics, each with two segments and a tail, whose records are past their retention."""
    with BrokerLog(root) as broker:
        for topic in (DAMAGED, WHOLE):
            broker.create(topic, 1)
            for _ in range(2):
                broker.append(topic, {0: [b"x", b"y"]})
                broker.seal(topic)
            broker.append(topic, {0: [b"z"]})


def damage(root: Path) -> None:
    """Cut some bytes off the last commit of one table."""
    *_, last = sorted(root.glob(f"topics/{DAMAGED}-*/_delta_log/*.json"))
    last.write_bytes(last.read_bytes()[:-CUT_BYTES])


def log_start(root: Path, topic: str) -> int:
    async def start(cluster: MaintenanceSession) -> int:
        return cluster.state.partition(topic, 0).log_start_offset

    return caring(root, start)


def test_retain_goes_on_with_the_other_topics(tmp_path: Path) -> None:
    filled(tmp_path)
    damage(tmp_path)
    with contextlib.suppress(LogError):
        caring(tmp_path, lambda cluster: retain(cluster, None, is_dry=False))
    assert log_start(tmp_path, WHOLE) == 4


async def test_the_duty_of_a_broker_goes_on_with_the_other_topics(tmp_path: Path) -> None:
    await asyncio.to_thread(filled, tmp_path)
    damage(tmp_path)
    store = FolderStore(tmp_path)
    log = await Broker.open(store, LogSettings(is_sealing=False), clock=SystemClock())
    with contextlib.suppress(LogError):
        await maintain_once(Settings(store=str(tmp_path)), log, MaintenanceCounters())
    await log.close()
    await store.close()
    assert await asyncio.to_thread(log_start, tmp_path, WHOLE) == 4


def test_collect_goes_on_with_the_other_topics(tmp_path: Path) -> None:
    async def cut(cluster: MaintenanceSession) -> None:
        await delete_records(cluster, WHOLE, {0: 4}, is_dry=False)

    async def collect_all(cluster: MaintenanceSession) -> None:
        await collect(cluster, await plan(cluster, NOW))

    def segments() -> int:
        return len(list(tmp_path.glob(f"topics/{WHOLE}-*/partition=0/*.parquet")))

    filled(tmp_path)
    caring(tmp_path, cut)
    damage(tmp_path)
    assert segments() == 2
    with contextlib.suppress(LogError):
        caring(tmp_path, collect_all)
    assert segments() == 0


def test_scrub_reports_a_damaged_table_and_all_other_damage(tmp_path: Path) -> None:
    async def scrubbed(cluster: MaintenanceSession) -> ScrubReport:
        return await scrub(cluster, None, Grace())

    filled(tmp_path)
    damage(tmp_path)
    segment = min(tmp_path.glob(f"topics/{WHOLE}-*/partition=0/*.parquet"))
    segment.unlink()
    texts = [f"{finding.where} {finding.what}" for finding in caring(tmp_path, scrubbed).findings]
    assert any(segment.name in text for text in texts)
    assert any(f"topics/{DAMAGED}-" in text or f"{DAMAGED}-0" in text for text in texts)


async def test_a_read_of_a_damaged_table_says_that_it_is_damaged(tmp_path: Path) -> None:
    await asyncio.to_thread(filled, tmp_path)
    damage(tmp_path)
    log = await open_log(FolderStore(tmp_path))
    try:
        assert (await log.records.fetch(WHOLE, 0, 0, bytes_max=100)).pieces
        with pytest.raises(Corrupt):
            await log.records.fetch(DAMAGED, 0, 0, bytes_max=100)
    finally:
        await log.close()
        await log._log.store.close()


def ids_in(path: Path) -> list[int]:
    fields = pq.ParquetFile(path).schema_arrow
    return [int((field.metadata or {}).get(b"PARQUET:field_id", -1)) for field in fields]


async def test_segments_with_and_without_field_ids_are_one_table(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    await store.create("cluster.json", [b'{"format":1,"cluster_id":"c0ffee","created_ms":1}'])
    log = await Broker.open(store, COLD, clock=SystemClock(), name="b")
    await log.topics.create("t", 1, {})
    root = tmp_path / log.state.topic("t").prefix
    paths = root / "partition=0"
    path_levels = []
    for level, value in ((1, "a"), (1, "b"), (2, "c"), (2, "d")):
        await raise_level(log._log.wal, level)
        await append(log, value)
        await log.records.seal("t")
        (new,) = set(paths.iterdir()) - {path for path, _ in path_levels}
        path_levels.append((new, level))
    assert [ids_in(path) for path, _ in path_levels] == [[-1] * 5] * 2 + [[1, 2, 3, 4, 5]] * 2
    assert await read_values(log) == ["a", "b", "c", "d"]

    def values_of_others() -> list[list[bytes]]:
        table = deltalake.DeltaTable(root)
        by_arrow = table.to_pyarrow_table(columns=["offset", "value"]).sort_by("offset")
        by_polars = pl.read_delta(str(root)).sort("offset")
        return [by_arrow["value"].to_pylist(), by_polars["value"].to_list()]

    assert values_of_others() == [[b"a", b"b", b"c", b"d"]] * 2
    cluster = await MaintenanceSession.open(store, SystemClock())
    (merged,) = await compact(cluster, None, is_dry=False)
    assert (merged.segments, merged.segments_after, merged.rows_after) == (4, 1, 4)
    await cluster.close()
    (new,) = set(paths.iterdir()) - {path for path, _ in path_levels}
    assert ids_in(new) == [1, 2, 3, 4, 5]
    assert values_of_others() == [[b"a", b"b", b"c", b"d"]] * 2
    await log.close()
    fresh = await Broker.open(store, COLD, clock=SystemClock(), name="fresh")
    assert await read_values(fresh) == ["a", "b", "c", "d"]
    await fresh.close()
    await store.close()
