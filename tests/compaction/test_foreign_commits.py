"""Another program commits to the table of a topic, and the log goes on with that table."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import deltalake
import pytest

from tests.support.logs import append
from tests.support.loop_brokers import broker, collected, given
from tidelog.compaction.garbage import Grace
from tidelog.compaction.retention import retain
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.log import Log
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


async def two_topics(root: Path) -> Log:
    """Topics `t` and `u`, each with two partitions and old records in three segments of each."""
    log = await broker(FolderStore(root), SystemClock())
    for topic in ("t", "u"):
        await log.create_topic(topic, 2, {"retention.ms": "-1"})
        for number in range(SEGMENTS):
            for partition in range(2):
                await append(log, f"v{number}", topic=topic, partition=partition)
            await log.seal(topic)
    return log


async def reopened(root: Path, log: Log, foreign: Callable[[Path], None]) -> Log:
    """A broker that starts after the other program has changed the table of `t`."""
    folder = root / log.state.topic("t").prefix
    await closed(log)
    foreign(folder)
    return await broker(FolderStore(root), SystemClock(), "later")


async def closed(log: Log) -> None:
    await log.close()
    await log.store.close()


@pytest.mark.parametrize("foreign", [optimize, delete, insert, overwrite, restore])
async def test_a_table_in_doubt_gets_no_new_records(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    log = await reopened(tmp_path, await two_topics(tmp_path), foreign)
    try:
        await append(log, "new")
        with contextlib.suppress(LogError):
            await log.seal("t")
        assert log.state.partition("t", 0).tail
    finally:
        await closed(log)


@pytest.mark.parametrize("foreign", [optimize, insert, overwrite])
async def test_retention_of_other_topics_goes_on(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    log = await reopened(tmp_path, await two_topics(tmp_path), foreign)
    try:
        await log.alter_topic("u", {"retention.ms": "1000"})
        cluster = await MaintenanceSession.open(log.store, SystemClock())
        with contextlib.suppress(LogError):
            await retain(cluster, None, is_dry=False)
        await cluster.close()
        await log.wal.refresh()
        assert log.state.partition("u", 0).log_start_offset == SEGMENTS
    finally:
        await closed(log)


@pytest.mark.parametrize("foreign", [optimize, delete, overwrite, restore, forget])
async def test_collection_leaves_the_originals_of_a_table_in_doubt(
    tmp_path: Path, foreign: Callable[[Path], None]
) -> None:
    log = await two_topics(tmp_path)
    originals = segments_in(tmp_path / log.state.topic("t").prefix)
    given(len(originals) == 2 * SEGMENTS, "all records are in segments")
    log = await reopened(tmp_path, log, foreign)
    try:
        make_old(tmp_path / "topics")
        await collected(log.store, SystemClock(), Grace())
        assert originals <= segments_in(tmp_path / log.state.topic("t").prefix)
    finally:
        await closed(log)


@pytest.mark.parametrize(("foreign", "offset"), [(delete, 1), (restore, SEGMENTS - 1)])
async def test_a_lost_offset_is_damage_and_not_out_of_range(
    tmp_path: Path, foreign: Callable[[Path], None], offset: int
) -> None:
    log = await reopened(tmp_path, await two_topics(tmp_path), foreign)
    try:
        with pytest.raises(Corrupt):
            await log.fetch("t", 0, offset, bytes_max=1000)
    finally:
        await closed(log)
