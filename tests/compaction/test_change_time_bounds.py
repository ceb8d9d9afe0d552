"""The bounds of a cluster, changed beside its brokers."""

import pytest

from tests.support.logs import MANUAL, closing, opened
from tests.support.maintenance import caring
from tests.support.records import found_cluster
from tidelog.compaction.change_time_bounds import BoundState, bounds_of, change_bounds
from tidelog.compaction.collect import plan
from tidelog.compaction.garbage import Grace
from tidelog.compaction.upgrade import raise_level
from tidelog.storage.core import format_levels
from tidelog.storage.core.actions import SetBounds
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.elapsed_time import STEP_MS_MAX
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.wal_objects import WalSettings

HOUR_MS = 3_600_000
USUAL = MANUAL._replace(wal=WalSettings())


async def test_brokers_obey_change_of_bounds(inner: MemoryStore) -> None:
    broker = await opened(inner, USUAL)
    async with caring(inner) as cluster:
        planned = await change_bounds(cluster, SetBounds(1_200_000, 7_200_000), is_dry=True)
        assert [bound_state.in_effect for bound_state in planned] == [
            1_200_000,
            7_200_000,
            24 * HOUR_MS,
        ]
        assert cluster.state.bounds.now == Bounds()
        changed = await change_bounds(cluster, SetBounds(1_200_000, 7_200_000), is_dry=False)
        assert changed == planned
    assert broker._log.wal.view_age_max_s == 600
    await broker._log.wal.refresh()
    assert broker._log.wal.view_age_max_s == 1200
    await broker._log.wal.checkpoint()
    later = await opened(inner, USUAL)
    async with closing(broker, later):
        assert later._log.wal.view_age_max_s == 1200


async def test_a_lowered_grace_is_shown_as_waiting_and_is_obeyed_later(inner: MemoryStore) -> None:
    broker = await opened(inner, USUAL)
    await broker.topics.create("t", 1, {})
    async with closing(broker), caring(inner) as cluster:
        bound_states = await change_bounds(cluster, SetBounds(file_grace_ms=HOUR_MS), is_dry=False)
        wait_ms = 24 * HOUR_MS + STEP_MS_MAX
        assert bound_states[2] == BoundState("file_grace_ms", 24 * HOUR_MS, HOUR_MS, wait_ms)
        for _ in range(wait_ms // STEP_MS_MAX):
            assert cluster.state.bounds.now.file_grace_ms == 24 * HOUR_MS
            broker.clock.advance(STEP_MS_MAX / 1000)
            await broker.topics.alter("t", {"retention.ms": "1"})
        assert (await bounds_of(cluster))[2][1:] == (HOUR_MS, HOUR_MS, 0)


async def test_a_change_that_is_refused_says_why_and_changes_nothing(inner: MemoryStore) -> None:
    broker = await opened(inner, USUAL)
    async with closing(broker), caring(inner) as cluster:
        old_seq = cluster.state.seq
        for is_dry in (True, False):
            with pytest.raises(InvalidRequest, match="view_age_ms must be 60000 to"):
                await change_bounds(cluster, SetBounds(59_999), is_dry=is_dry)
        await cluster.refresh()
        assert cluster.state.seq == old_seq


async def test_at_level_1_no_entry_has_the_change(inner: MemoryStore) -> None:
    await found_cluster(inner, format_levels.FIRST)
    async with caring(inner) as cluster:
        with pytest.raises(InvalidRequest, match="run `tidelog upgrade` first"):
            await change_bounds(cluster, SetBounds(120_000), is_dry=False)
        assert cluster.state.seq == 0
        await raise_level(cluster.wal, 2)
        bound_states = await change_bounds(cluster, SetBounds(120_000), is_dry=False)
        assert bound_states[0] == BoundState("view_age_ms", 120_000, 120_000, 0)


async def test_collection_obeys_bounds(inner: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """And reads the store's clock before it learns them."""
    broker = await opened(inner, USUAL)
    async with closing(broker), caring(inner) as cluster:
        read = cluster.store_now_ms
        raised = SetBounds(wal_retention_ms=4 * HOUR_MS, file_grace_ms=48 * HOUR_MS)

        async def now_ms() -> int:
            result = await read()
            async with caring(inner) as other:
                await change_bounds(other, raised, is_dry=False)
            return result

        obeyed: list[Grace] = []
        real = Grace.obeying

        def obeying(grace: Grace, bounds: Bounds) -> Grace:
            obeyed.append(real(grace, bounds))
            return obeyed[-1]

        monkeypatch.setattr(cluster, "store_now_ms", now_ms)
        monkeypatch.setattr(Grace, "obeying", obeying)
        await plan(cluster, Grace())
        assert obeyed == [Grace(4 * HOUR_MS, 48 * HOUR_MS)]
