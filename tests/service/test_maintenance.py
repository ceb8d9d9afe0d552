"""Retention and collection as a duty of brokers, and marks that are forgotten with their files."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import append, until
from tests.support.records import rows
from tidelog.service.server.maintenance import maintain_once, run_maintenance
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.metrics import HttpCounters, Telemetry
from tidelog.storage.broker import Broker
from tidelog.storage.core.bounds import Bounds
from tidelog.storage.core.errors import StoreUnfit, Unavailable
from tidelog.storage.core.model import Acks
from tidelog.storage.log import Log, LogSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.wal.wal_objects import WalSettings

YOUNG: dict[str, Any] = {
    "wal_view_age_max_ms": 1000,
    "wal_retention_ms": 4000,
    "test_bounds": True,
}
QUIET = LogSettings(wal=WalSettings(Bounds(1000, 4000)), poll_interval_s=3600.0, is_sealing=False)


async def sealed_log(folder: Path, hot_dir: Path | None = None) -> Log:
    """`t` with three segments of records that are years old, in a folder."""
    log = await Broker.open(
        FolderStore(folder), QUIET, clock=SystemClock(), name="broker-1", hot_dir=hot_dir
    )
    await log.create_topic("t", 1, {"retention.ms": "-1"})
    for value in (b"a", b"b", b"c"):
        await append(log, value)
        await log.seal("t")
    return log


async def test_a_round_retains_and_collects(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    log = await sealed_log(folder)
    settings = Settings(store=folder.as_uri(), **YOUNG)
    await maintain_once(settings, log, MaintenanceCounters())
    assert (await log.offsets("t", 0)).log_start_offset == 0
    await log.alter_topic("t", {"retention.ms": "86400000"})
    await maintain_once(settings, log, MaintenanceCounters())
    assert (await log.offsets("t", 0)).log_start_offset == 3
    assert list((folder / "checkpoints").iterdir())
    await log.close()
    await log.store.close()


async def test_a_round_says_what_it_found_and_what_it_took(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    log = await sealed_log(folder)
    settings = Settings(store=folder.as_uri(), **YOUNG)
    counters = MaintenanceCounters()

    async def gauges() -> dict[str, float]:
        text = (await Telemetry(log, HttpCounters(), "1", counters).text()).decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    segments = sum(path.stat().st_size for path in folder.glob("topics/*/partition=0/*"))
    await log.alter_topic("t", {"retention.ms": "86400000"})
    await maintain_once(settings, log, counters)
    assert (await gauges())["tidelog_garbage_waiting_bytes"] == segments  # no checkpoint counts yet
    for hour in range(3):
        await append(log, b"%d" % hour)
        for path in [*folder.glob("wal/*"), *folder.glob("checkpoints/*")]:
            age(path, hours=2)
        await maintain_once(settings, log, counters)
    metrics = await gauges()
    assert metrics["tidelog_garbage_objects_total"] > 3
    assert metrics["tidelog_garbage_bytes_total"] > 0
    assert metrics["tidelog_garbage_due_bytes"] == 0
    assert metrics["tidelog_garbage_waiting_bytes"] >= segments
    assert metrics["tidelog_garbage_oldest_seconds"] == 0
    await log.close()
    await log.store.close()


def age(path: Path, *, hours: int) -> None:
    before = path.stat().st_mtime - hours * 3600
    os.utime(path, (before, before))


async def unreachable(self: FolderStore, *_: object, **__: object) -> AsyncIterator[ObjectInfo]:
    raise Unavailable("the store cannot be listed")
    yield


async def test_the_duty_goes_on_after_a_round_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(store=(tmp_path / "store").as_uri(), retention_check_interval_ms=20)
    log = await sealed_log(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "list", unreachable)
        duty = asyncio.create_task(run_maintenance(settings, log, MaintenanceCounters()))
        await until(lambda: len(caplog.records) >= 2)
    assert not duty.done()
    await log.alter_topic("t", {"retention.ms": "86400000"})
    await until(lambda: log.state.partition("t", 0).log_start_offset == 3, 240)
    duty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await duty
    await log.close()
    await log.store.close()
    assert {record.levelname for record in caplog.records} <= {"WARNING", "INFO"}


async def test_h6_a_round_of_retention_loads_no_cluster_again(tmp_path: Path) -> None:
    log = await sealed_log(tmp_path / "store")
    await log.alter_topic("t", {"retention.ms": "86400000"})
    before = log.wal.counters.gets
    elsewhere = Settings(store="file:///nowhere")  # what a second view would read
    await maintain_once(elsewhere, log, MaintenanceCounters(), is_collecting=False)
    assert log.state.partition("t", 0).log_start_offset == 3
    assert log.wal.counters.gets - before <= 2
    await log.close()
    await log.store.close()


async def test_stores_in_memory_and_disabled_maintenance_are_skipped(log: Broker) -> None:
    for settings in (
        Settings(store="memory://"),
        Settings(store="file:///nowhere", retention_check_interval_ms=0),
    ):
        await asyncio.wait_for(run_maintenance(settings, log, MaintenanceCounters()), 240)
    with pytest.raises(StoreUnfit):
        await maintain_once(Settings(store="/dev/null/none"), log, MaintenanceCounters())


async def test_a_log_that_is_closed_leaves_no_mark(tmp_path: Path) -> None:
    hot = tmp_path / "hot"
    log = await sealed_log(tmp_path / "store", hot)
    for value in ("d", "e"):
        topic = log.state.topic("t")
        await log.append(topic, [(0, rows(value))], size=1, is_json=False, acks=Acks.LOCAL)
    await until(lambda: log.state.partition("t", 0).high_watermark == 5)
    assert len(log.state.hot_logs) == 1
    await log.close()
    await log.store.close()
    assert list(hot.glob("*.hot")) == []
    again = await sealed_log_of(tmp_path / "store")
    assert again.state.hot_logs == {}
    assert again.state.partition("t", 0).high_watermark == 5
    await again.close()
    await again.store.close()


async def sealed_log_of(folder: Path) -> Log:
    return await Broker.open(FolderStore(folder), QUIET, clock=SystemClock(), name="broker-2")
