"""Retention and collection as a duty of brokers, and marks that are forgotten with their files."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import append, until
from tests.support.records import rows
from tidelog.service.server.maintenance import maintain_once, run_maintenance
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.metrics import Telemetry
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import StoreUnfit, Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks
from tidelog.storage.core.time_bounds import Bounds
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


@asynccontextmanager
async def log_in(folder: Path, name: str, hot_dir: Path | None = None) -> AsyncIterator[Broker]:
    store = FolderStore(folder)
    log = await Broker.open(store, QUIET, clock=SystemClock(), name=name, hot_dir=hot_dir)
    yield log
    await log.close()
    await store.close()


async def fill(log: Broker) -> None:
    """`t` with three segments of records that are years old."""
    await log.topics.create("t", 1, {"retention.ms": "-1"})
    for value in (b"a", b"b", b"c"):
        await append(log, value)
        await log.records.seal("t")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
async def sealed(folder: Path) -> AsyncIterator[Broker]:
    async with log_in(folder, "broker-1") as log:
        await fill(log)
        yield log


async def test_round_retains_and_collects(sealed: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    settings = Settings(store=folder.as_uri(), **YOUNG)
    await maintain_once(settings, sealed, MaintenanceCounters())
    assert (await sealed.records.offsets("t", 0)).log_start_offset == 0
    await sealed.topics.alter("t", {"retention.ms": "86400000"})
    await maintain_once(settings, sealed, MaintenanceCounters())
    assert (await sealed.records.offsets("t", 0)).log_start_offset == 3
    assert list((folder / "checkpoints").iterdir())


async def test_round_says_what_it_found_and_what_it_took(sealed: Broker, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    settings = Settings(store=folder.as_uri(), **YOUNG)
    counters = MaintenanceCounters()

    async def gauges() -> dict[str, float]:
        text = (await Telemetry(sealed, HttpCounters(), "1", counters).text()).decode()
        lines = [line.rpartition(" ") for line in text.splitlines() if line[:1] != "#"]
        return {name: float(value) for name, _, value in lines}

    segments = sum(path.stat().st_size for path in folder.glob("topics/*/partition=0/*"))
    await sealed.topics.alter("t", {"retention.ms": "86400000"})
    await maintain_once(settings, sealed, counters)
    assert (await gauges())["tidelog_garbage_waiting_bytes"] == segments  # no checkpoint counts yet
    for hour in range(3):
        await append(sealed, b"%d" % hour)
        for path in [*folder.glob("wal/*"), *folder.glob("checkpoints/*")]:
            age(path, hours=2)
        await maintain_once(settings, sealed, counters)
    metrics = await gauges()
    assert metrics["tidelog_garbage_objects_total"] > 3
    assert metrics["tidelog_garbage_bytes_total"] > 0
    assert metrics["tidelog_garbage_due_bytes"] == 0
    assert metrics["tidelog_garbage_waiting_bytes"] >= segments
    assert metrics["tidelog_garbage_oldest_seconds"] == 0


def age(path: Path, *, hours: int) -> None:
    before = path.stat().st_mtime - hours * 3600
    os.utime(path, (before, before))


async def unreachable(self: FolderStore, *_: object, **__: object) -> AsyncIterator[ObjectInfo]:
    raise Unavailable("the store cannot be listed")
    yield


async def test_duty_goes_on_after_round_that_fails(
    sealed: Broker, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(store=folder.as_uri(), retention_check_interval_ms=20)
    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "list", unreachable)
        duty = asyncio.create_task(run_maintenance(settings, sealed, MaintenanceCounters()))
        await until(lambda: len(caplog.records) >= 2)
    assert not duty.done()
    await sealed.topics.alter("t", {"retention.ms": "86400000"})
    await until(lambda: sealed.state.partition("t", 0).log_start_offset == 3, 240)
    duty.cancel()
    with pytest.raises(asyncio.CancelledError):
        await duty
    assert {record.levelname for record in caplog.records} <= {"WARNING", "INFO"}


async def test_h6_round_of_retention_loads_no_cluster_again(sealed: Broker) -> None:
    await sealed.topics.alter("t", {"retention.ms": "86400000"})
    before = sealed._log.wal.counters.gets
    elsewhere = Settings(store="file:///nowhere")  # what a second view would read
    await maintain_once(elsewhere, sealed, MaintenanceCounters(), is_collecting=False)
    assert sealed.state.partition("t", 0).log_start_offset == 3
    assert sealed._log.wal.counters.gets - before <= 2


async def test_stores_in_memory_and_disabled_maintenance_are_skipped(log: Broker) -> None:
    for settings in (
        Settings(store="memory://"),
        Settings(store="file:///nowhere", retention_check_interval_ms=0),
    ):
        await asyncio.wait_for(run_maintenance(settings, log, MaintenanceCounters()), 240)
    with pytest.raises(StoreUnfit):
        await maintain_once(Settings(store="/dev/null/none"), log, MaintenanceCounters())


async def test_log_that_is_closed_leaves_no_mark(folder: Path, tmp_path: Path) -> None:
    hot = tmp_path / "hot"
    async with log_in(folder, "broker-1", hot) as log:
        await fill(log)
        topic = log.state.topic("t")
        for value in ("d", "e"):
            await log.records.append(
                topic, [(0, rows(value))], size=1, is_json=False, acks=Acks.LOCAL
            )
        await until(lambda: log.state.partition("t", 0).high_watermark == 5)
        assert len(log.state.hot_logs) == 1
    assert list(hot.glob("*.hot")) == []
    async with log_in(folder, "broker-2") as log:
        assert log.state.hot_logs == {}
        assert log.state.partition("t", 0).high_watermark == 5
