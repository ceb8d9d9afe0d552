"""The last commit of one table is damaged. All other topics are cared for as before."""

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.support.broker_log import BrokerLog, open_log
from tests.support.foreign_engines import caring
from tidelog.compaction.collect import collect, plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.retention import delete_records, retain
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.compaction.session import MaintenanceSession
from tidelog.service.server.maintenance import maintain_once
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.broker import Broker, LogSettings
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore

NOW = Grace(wal_ms=0, table_ms=0)
CUT_BYTES = 40
DAMAGED, WHOLE = "a", "b"
"""Two topics; the care of topics comes to the damaged one first."""


def filled(root: Path) -> None:
    """Two topics, each with two segments and a tail, whose records are past their retention."""
    broker = BrokerLog(root)
    for topic in (DAMAGED, WHOLE):
        broker.create(topic, 1)
        for _ in range(2):
            broker.append(topic, {0: [b"x", b"y"]})
            broker.seal(topic)
        broker.append(topic, {0: [b"z"]})
    broker.close()


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
        assert (await log.fetch(WHOLE, 0, 0, bytes_max=100)).pieces
        with pytest.raises(Corrupt):
            await log.fetch(DAMAGED, 0, 0, bytes_max=100)
    finally:
        await log.close()
        await log.store.close()
