"""The cluster in the store of the settings, opened for maintenance by a broker or a command."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidelog.compaction.maintenance_session import MaintenanceSession, check_exists
from tidelog.service.settings.store import StoreSettings
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.metered import MeteredStore, StoreCounters
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.read_only import open_to_read


@asynccontextmanager
async def opened_store(
    settings: StoreSettings, *, is_reading: bool = False, counters: StoreCounters | None = None
) -> AsyncIterator[ObjectStore]:
    """Open the store of the settings; close it at the end of the block.

    If `is_reading` is set, nothing is written, and the store may be read-only. Requests are counted
    in `counters`, if there are any.
    """
    open_it = open_to_read if is_reading else open_store
    store: ObjectStore = await open_it(settings.store, s3=settings.s3)
    if counters is not None:
        store = MeteredStore(store, SystemClock(), counters=counters)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened_cluster(
    settings: StoreSettings,
    *,
    report_damage: bool = True,
    is_reading: bool = False,
    counters: StoreCounters | None = None,
) -> AsyncIterator[MaintenanceSession]:
    """Open the cluster in the store of the settings, as `opened_store` opens the store.

    Close both at the end of the block.
    """
    async with opened_store(settings, is_reading=is_reading, counters=counters) as store:
        cluster = await MaintenanceSession.open(
            store, SystemClock(), report_damage=report_damage, is_reading=is_reading
        )
        try:
            yield cluster
        finally:
            await cluster.close()


async def check_cluster(settings: StoreSettings) -> None:
    """Raise StoreUnfit if the store of the settings has no cluster. Writes nothing."""
    async with opened_store(settings, is_reading=True) as store:
        await check_exists(store, SystemClock())
