"""The bounds of a cluster: in `cluster.json`, safe together, the same for all processes."""

import msgspec
import pytest

from tests.support.clock import ManualClock
from tests.support.maintenance import caring
from tests.support.views import CLUSTER_ID, opened, wal_on
from tidelog.compaction.garbage import Grace
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import ObjectNotFound, StoreUnfit
from tidelog.storage.core.time_bounds import LEAST, Bounds, check
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.wal_objects import WalObjects, WalSettings

LONG = Bounds(1_200_000, 7_200_000)


def with_bounds(level: int, **bounds: int) -> bytes:
    identity = {"format": level, "cluster_id": CLUSTER_ID, "created_ms": 1, "bounds": bounds}
    return msgspec.json.encode(identity if bounds else {**identity, "bounds": {}})


@pytest.mark.parametrize(
    ("bounds", "is_allowed"),
    [
        (Bounds(), True),
        (LEAST, True),
        (Bounds(1000, 4000), True),
        (Bounds(1000, 3999), False),
        (Bounds(0, 4000), False),
        (Bounds(-1, 0), False),
        (Bounds(file_grace_ms=0), True),
        (Bounds(file_grace_ms=-1), False),
    ],
)
def test_a_retention_is_at_least_four_view_ages(bounds: Bounds, is_allowed: bool) -> None:
    assert (check(bounds) is None) == is_allowed


@pytest.mark.parametrize(
    ("bounds", "is_test"),
    [
        (Bounds(), False),
        (LEAST, False),
        (LONG, False),
        (Bounds(59_999, 3_600_000), True),
        (Bounds(60_000, 3_599_999), True),
        (Bounds(file_grace_ms=3_599_999), True),
    ],
)
def test_shorter_ones_are_those_of_a_test(bounds: Bounds, is_test: bool) -> None:
    assert bounds.is_test == is_test


async def test_bounds_of_first_process_are_obeyed_by_others(inner: MemoryStore) -> None:
    first = await opened(inner, settings=WalSettings(LONG))
    stored = msgspec.json.decode(await inner.get(object_keys.CLUSTER))
    assert (stored["format"], stored["bounds"]) == (format_levels.NEWEST, msgspec.to_builtins(LONG))
    for settings in (WalSettings(), WalSettings(Bounds(1, 4))):
        other = await opened(inner, settings=settings)
        assert other.cluster == first.cluster
        assert other.view_age_max_s == LONG.view_age_ms / 1000
    async with caring(inner) as care:
        assert care.wal.cluster.bounds == LONG
        assert care.wal.view_age_max_s == LONG.view_age_ms / 1000
    assert msgspec.json.decode(await inner.get(object_keys.CLUSTER)) == stored


def test_a_collection_may_keep_longer_and_never_shorter() -> None:
    assert Grace(wal_ms=1).obeying(LONG).wal_ms == LONG.wal_retention_ms
    assert Grace(wal_ms=10**9).obeying(LONG).wal_ms == 10**9
    assert Grace(table_ms=5).obeying(LONG).table_ms == LONG.file_grace_ms
    assert Grace(table_ms=10**9).obeying(LONG).table_ms == 10**9


@pytest.mark.parametrize("level", [1, 2])
async def test_cluster_without_bounds_has_those_of_0_1(inner: MemoryStore, level: int) -> None:
    body = b'{"format":%d,"cluster_id":"%s","created_ms":1}' % (level, CLUSTER_ID.encode())
    await inner.create(object_keys.CLUSTER, [body])
    wal = await opened(inner, settings=WalSettings(LONG))
    assert wal.cluster.bounds == Bounds(600_000, 3_600_000)
    assert await inner.get(object_keys.CLUSTER) == body


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (with_bounds(2, view_age_ms=1000, wal_retention_ms=3999), "at least 4 times the age"),
        (with_bounds(2, view_age_ms=0), "at least 4 times the age"),
        (with_bounds(2, wal_retention_ms=2_000_000), "at least 4 times the age"),
    ],
)
async def test_unsafe_bounds_are_unfit(inner: MemoryStore, body: bytes, why: str) -> None:
    await inner.create(object_keys.CLUSTER, [body])
    with pytest.raises(StoreUnfit, match=why):
        await opened(inner)


async def test_no_cluster_is_created_with_unsafe_bounds(inner: MemoryStore) -> None:
    with pytest.raises(StoreUnfit, match=r"gets no cluster: the WAL retention \(3999 ms\)"):
        await wal_on(inner, settings=WalSettings(Bounds(1000, 3999))).open()
    with pytest.raises(ObjectNotFound):
        await inner.get(object_keys.CLUSTER)


async def test_one_of_two_that_create_it_at_once_decides(inner: MemoryStore) -> None:
    chain = WalObjects(inner, ManualClock())
    first = await chain.open_cluster(None, is_creating=True, bounds=LONG)
    second = await chain.open_cluster(None, is_creating=True, bounds=Bounds())
    assert first == second
