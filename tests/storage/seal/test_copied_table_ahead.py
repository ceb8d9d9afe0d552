"""A copy of a log has a table that is ahead of its WAL, and a seal replaces acked records."""

import contextlib
import shutil
from pathlib import Path

from tests.support.loop_brokers import Acked, broker, given, produce, served
from tidelog.compaction.garbage import Grace
from tidelog.compaction.scrub import ScrubReport
from tidelog.compaction.scrub import scrub as look
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.core.errors import LogError
from tidelog.storage.log import Log
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore


async def copied(root: Path) -> tuple[FolderStore, Acked]:
    """A copy whose WAL was copied before three records and their seal, and its tables after."""
    log, copy = root / "log", root / "copy"
    original = await broker(FolderStore(log), SystemClock())
    await original.create_topic("t", 1, {})
    acked: Acked = {}
    for number in range(3):
        await produce(original, f"r{number}", acked)
    copy.mkdir()
    shutil.copy(log / "cluster.json", copy)
    shutil.copytree(log / "wal", copy / "wal")
    for number in range(3, 6):
        await produce(original, f"r{number}", acked)
    given(await original.seal("t") == len(acked) == 6, "the table is ahead of the copied WAL")
    shutil.copytree(log / "topics", copy / "topics")
    await original.close()
    await original.store.close()
    return FolderStore(copy), acked


async def scrubbed(store: FolderStore) -> ScrubReport:
    cluster = await MaintenanceSession.open(store, SystemClock())
    try:
        return await look(cluster, None, Grace())
    finally:
        await cluster.close()


async def sealed(log: Log) -> None:
    """A seal; a sealer may refuse a table that it does not trust."""
    with contextlib.suppress(LogError):
        await log.seal("t")


async def test_a_scrub_names_a_table_beyond_the_high_watermark(tmp_path: Path) -> None:
    store, _ = await copied(tmp_path)
    report = await scrubbed(store)
    await store.close()
    assert not report.is_whole


async def test_a_seal_never_replaces_acknowledged_records(tmp_path: Path) -> None:
    store, _ = await copied(tmp_path)
    log = await broker(store, SystemClock())
    try:
        await sealed(log)
        acked: Acked = {}
        for number in range(5):
            await produce(log, f"new{number}", acked)
        before = await served(log)
        given({offset: before[offset] for offset in acked} == acked, "the log has what it acked")
        await sealed(log)
        after = await served(log)
        assert {offset: after.get(offset) for offset in before} == before
    finally:
        await log.close()
        await store.close()


async def test_a_scrub_names_records_that_are_not_those_of_the_wal(tmp_path: Path) -> None:
    store, _ = await copied(tmp_path)
    log = await broker(store, SystemClock())
    try:
        acked: Acked = {}
        for number in range(5):
            await produce(log, f"new{number}", acked)
        await sealed(log)
        records = await served(log)
        is_whole = (await scrubbed(store)).is_whole
        assert not is_whole or {offset: records.get(offset) for offset in acked} == acked
    finally:
        await log.close()
        await store.close()
