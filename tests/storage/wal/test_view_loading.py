"""Loading a view: checkpoints, founding, stores that are not fit, chains that are broken."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.clock import ManualClock
from tests.support.faults import Fault, Script
from tests.support.records import creating, entries_of, found_cluster
from tests.support.views import (
    AGE_S,
    CLUSTER_ID,
    checkpoint_and_collect,
    flip,
    one,
    opened,
    store_of,
    suspend,
    wal_on,
    with_topic,
)
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import Corrupt, NewerLevel, StoreRefused, StoreUnfit, Unavailable
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.wal import wal_objects
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalSettings


class Watching:
    """A listener that records its calls."""

    def __init__(self, wal: WalView) -> None:
        self.wal = wal
        self.seqs: list[int] = []
        self.resets = 0

    def on_applied(self, entry, applied) -> None:
        self.seqs.append(self.wal.state.seq)

    def on_reset(self) -> None:
        self.resets += 1


async def test_the_listener_gets_every_entry_once_in_order(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    second = await opened(inner)
    watching = Watching(second)
    second.subscribers.append(watching)
    for i in range(40):
        await (first if i % 3 else second).commit(one(first, str(i)))
    await second.refresh()
    assert watching.seqs == list(range(2, 42))
    assert watching.resets == 0
    suspend(second, AGE_S + 1)
    await second.ensure_view()
    assert watching.resets == 1


async def test_a_broker_starts_from_the_newest_checkpoint_and_reads_on(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    for i in range(150):
        await wal.commit(one(wal, str(i)))
        if i in (40, 100):
            await wal.checkpoint()
    late = await opened(inner)
    assert late.state.encode() == wal.state.encode()
    assert late.counters.entries_applied == 49
    fresh = MemoryStore()
    for info in [info async for info in inner.list("wal/")]:
        await fresh.create(info.key, [await inner.get(info.key)])
    await fresh.create(object_keys.CLUSTER, [await inner.get(object_keys.CLUSTER)])
    folded = await opened(fresh, latency=lambda _: 0.06)
    assert folded.state.encode() == wal.state.encode()
    assert asyncio.get_running_loop().time() < 2.0  # entries are read many at once


async def test_chain_that_outlasts_view_age_is_loaded(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    for i in range(100):
        await wal.commit(one(wal, str(i)))
    slow = wal_on(inner, latency=lambda _: 20.0, settings=WalSettings(Bounds(100_000, 400_000)))
    assert (await slow.open(CLUSTER_ID)).state.encode() == wal.state.encode()


async def test_checkpoints_are_written_when_due_and_not_more_often(inner: MemoryStore) -> None:
    settings = WalSettings(
        checkpoint_entries=10, checkpoint_interval_s=5.0, checkpoint_entries_max=50
    )
    wal = await opened(inner, settings=settings)
    await wal.commit(creating(wal.clock))
    for i in range(45):
        await wal.commit(one(wal, str(i)))
    await asyncio.sleep(0)
    assert wal.counters.checkpoints == 0  # not rested yet
    for i in range(10):
        await wal.commit(one(wal, str(i)))
    await asyncio.sleep(0.1)
    assert wal.counters.checkpoints == 1  # rested or not, the bound is reached
    await asyncio.sleep(6)
    for i in range(10):
        await wal.commit(one(wal, str(i)))
    await asyncio.sleep(0.1)
    assert wal.counters.checkpoints == 2
    await wal.close()
    keys = [info.key async for info in inner.list(object_keys.CHECKPOINTS)]
    for key in keys:
        body = await inner.get(key)
        assert ClusterState.decode(body[12:], key).seq == object_keys.seq_of(key)


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.ABSENT])
async def test_checkpoint_that_fails_stops_nothing(inner: MemoryStore, fault: Fault) -> None:
    settings = WalSettings(checkpoint_entries=5, checkpoint_interval_s=0.0)
    wal = await opened(inner, Script("create", object_keys.CHECKPOINTS, [fault]), settings=settings)
    await wal.commit(creating(wal.clock))
    for i in range(20):
        await wal.commit(one(wal, str(i)))
        await asyncio.sleep(0.01)
    assert [info async for info in inner.list(object_keys.CHECKPOINTS)]


async def test_two_brokers_write_the_same_checkpoint(inner: MemoryStore) -> None:
    first = await with_topic(inner)
    second = await opened(inner)
    assert await first.checkpoint() == 1
    body = await inner.get(object_keys.checkpoint(1))
    await inner.delete([object_keys.checkpoint(1)])
    assert await second.checkpoint() == 1
    assert await inner.get(object_keys.checkpoint(1)) == body


@pytest.mark.parametrize("damage", ["magic", "checksum", "payload", "cut", "empty", "foreign"])
async def test_damaged_checkpoint_is_passed_over(inner: MemoryStore, damage: str) -> None:
    wal = await with_topic(inner)
    await wal.checkpoint()
    await wal.commit(one(wal, "a"))
    newest = await wal.checkpoint()
    await wal.commit(one(wal, "b"))
    key = object_keys.checkpoint(newest)
    body = await inner.get(key)
    other = await WalView.open(MemoryStore(), ManualClock(), "x", cluster_id="another-cluster")
    await other.checkpoint()
    damaged = {
        "magic": flip(body, 0),
        "checksum": flip(body, 9),
        "payload": flip(body, len(body) - 1),
        "cut": body[: len(body) // 2],
        "empty": b"",
        "foreign": await other.store.get(object_keys.checkpoint(0)),
    }[damage]
    await inner.put(key, [damaged])
    assert (await opened(inner)).state.encode() == wal.state.encode()


async def test_i5_older_checkpoint_is_not_taken_for_the_end(inner: MemoryStore) -> None:
    """The newest checkpoint is damaged, and the entries that it covers were collected.

    So the cluster is damaged. To go on from the older one would commit numbers twice.
    """
    wal = await with_topic(inner)
    await wal.checkpoint()
    for i in range(3):
        await wal.commit(one(wal, str(i)))
    newest = await wal.checkpoint()
    await wal.commit(one(wal, "after"))
    await inner.delete([object_keys.wal(seq) for seq in range(1, newest + 1)])
    body = await inner.get(object_keys.checkpoint(newest))
    await inner.put(object_keys.checkpoint(newest), [flip(body, 20)])
    with pytest.raises(Corrupt, match=object_keys.wal(2)):
        await opened(inner)


@pytest.mark.parametrize("has_checkpoint", [True, False])
async def test_checkpoint_changed_during_load(inner: MemoryStore, has_checkpoint: bool) -> None:
    """The only one is collected; or none is listed, and then the WAL begins behind the first."""
    wal, late = await with_topic(inner), wal_on(inner)
    if has_checkpoint:
        first = object_keys.checkpoint(await wal.checkpoint())
        gate = store_of(late).hold("get", first)
    else:
        gate = store_of(late).hold("list", object_keys.CHECKPOINTS, is_after=True)
    opening = asyncio.create_task(late.open(CLUSTER_ID))
    await gate.reached.wait()
    await wal.commit(one(wal, "a"))
    await checkpoint_and_collect(wal, inner)
    if has_checkpoint:
        await inner.delete([first])
    gate.opened.set()
    assert (await opening).state.encode() == wal.state.encode()


async def test_strange_keys_among_ours_are_passed_over(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    await wal.checkpoint()
    await inner.create("checkpoints/zzz", [b"?"])
    await inner.create("wal/zzz", [b"?"])
    await wal.commit(one(wal, "a"))
    assert (await opened(inner)).state.encode() == wal.state.encode()
    gate = store_of(wal).hold("create", object_keys.wal(3), is_after=True)
    commit = asyncio.create_task(wal.commit(one(wal, "b")))
    await gate.reached.wait()
    suspend(wal, AGE_S + 1)
    gate.opened.set()
    (outcome,) = await commit
    assert outcome.placements == [("t", 0, 1, 1)]


# -- stores that are not fit, chains that are broken


async def test_a_wal_without_its_cluster_is_refused(inner: MemoryStore) -> None:
    await with_topic(inner)
    await inner.delete([object_keys.CLUSTER])
    with pytest.raises(StoreUnfit, match=r"cluster\.json"):
        await opened(inner)


async def test_a_wal_that_begins_late_without_a_checkpoint_is_refused(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    await wal.commit(one(wal, "a"))
    await inner.delete([object_keys.wal(1)])
    with pytest.raises(StoreUnfit, match=object_keys.wal(2)):
        await opened(inner)


async def test_another_cluster_is_refused_and_left_alone(inner: MemoryStore) -> None:
    await with_topic(inner)
    wal = wal_on(inner)
    with pytest.raises(StoreUnfit, match="belongs to cluster c0ffee, not to tea"):
        await wal.open("tea")
    await wal_on(inner).open()  # without an expected id any cluster is accepted


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b"\xff", b'{"format":1}'])
async def test_a_cluster_file_that_is_not_ours_is_refused(inner: MemoryStore, body: bytes) -> None:
    await inner.create(object_keys.CLUSTER, [body])
    with pytest.raises(StoreUnfit):
        await opened(inner)


@pytest.mark.parametrize(
    "faults",
    [[Fault.ABSENT], [Fault.STORED], [Fault.OWN_412], [Fault.LATE], [Fault.ABSENT, Fault.LATE]],
)
async def test_brokers_that_found_a_cluster_at_once_found_one(inner: MemoryStore, faults) -> None:
    wals = [
        wal_on(inner, Script("create", object_keys.CLUSTER, faults), latency=lambda _: 0.02)
        for _ in range(3)
    ]
    views = await asyncio.gather(*(wal.open() for wal in wals))
    assert len({view.cluster.cluster_id for view in views}) == 1
    for wal in wals:
        await store_of(wal).land()


async def test_cluster_founded_during_load_is_no_damage(inner: MemoryStore) -> None:
    slow = wal_on(inner)
    gate = store_of(slow).hold("get", object_keys.CLUSTER, is_after=True)
    opening = asyncio.create_task(slow.open(CLUSTER_ID))
    await gate.reached.wait()
    await with_topic(inner)
    gate.opened.set()
    assert (await opening).state.seq == 1


async def test_a_refused_founding_is_unavailable() -> None:
    wal = wal_on(MemoryStore(), Script("create", object_keys.CLUSTER, [Fault.REFUSED]))
    with pytest.raises(StoreRefused):
        await wal.open()


@pytest.mark.parametrize("how", ["swapped", "damaged", "other chain", "hole"])
async def test_i2_a_broken_chain_is_not_read_past(inner: MemoryStore, how: str) -> None:
    wal = await with_topic(inner)
    for i in range(6):
        await wal.commit(one(wal, str(i)))
    key = object_keys.wal(4)
    body = await inner.get(key)
    if how == "swapped":
        await inner.put(key, [await inner.get(object_keys.wal(5))])
    elif how == "damaged":  # in both copies of the header
        copy = len(body) - 12 - entries.header_length(body, key)
        await inner.put(key, [flip(flip(body, 30), copy + 30)])
    elif how == "hole":
        await inner.delete([key])
    else:
        entry = entries.decode(body, key, seq=4, previous=None).entry
        forged = entries.Entry(entry.level, 4, bytes(32), b"id", "evil", entry.at_ms, [], [])
        await inner.put(key, [entries.encode_header(forged)[0]])
    with pytest.raises(Corrupt, match=key):
        await opened(inner)


async def test_closing_waits_for_nothing_that_matters(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    store_of(wal).latency = lambda _: 1000.0
    asking = asyncio.create_task(wal.refresh())
    await asyncio.sleep(0.01)
    await wal.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await (await opened(inner)).close()


class StaleListings(MemoryStore):
    """The next `left` listings of checkpoints name a deleted one."""

    def __init__(self) -> None:
        super().__init__()
        self.left = self.lists = 0

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in super().list(prefix, start_after=start_after):
            yield info
        if prefix == object_keys.CHECKPOINTS:
            self.lists += 1
            if self.lists <= self.left:
                yield ObjectInfo(object_keys.checkpoint(999), 1, 0)


@pytest.mark.parametrize("stale_listings", [1, 100])
async def test_listings_that_stay_stale_end_a_load(stale_listings: int) -> None:
    inner = StaleListings()
    await WalView.open(inner, ManualClock(), "a", WalSettings(), cluster_id=CLUSTER_ID)
    inner.left, inner.lists = stale_listings, 0
    opening = WalView.open(inner, ManualClock(), "b", WalSettings())
    if stale_listings == 1:
        await opening
    else:
        with pytest.raises(Unavailable, match="listings are stale"):
            await opening
        assert inner.lists == wal_objects.LISTS_MAX


# -- levels of the format (FORMAT 8)


async def test_a_cluster_of_a_newer_level_is_refused() -> None:
    inner = MemoryStore()
    await found_cluster(inner, format_levels.NEWEST + 1)
    with pytest.raises(NewerLevel) as caught:
        await opened(inner)
    assert str(caught.value) == (
        f"object cluster.json has level {format_levels.NEWEST + 1} of the format, "
        f"this version reads up to {format_levels.NEWEST}: "
        "it needs a newer tidelog"
    )
    inner = MemoryStore()
    await found_cluster(inner, 0)
    with pytest.raises(Corrupt, match="it has level 0 of the format; the first is 1"):
        await opened(inner)


@pytest.mark.parametrize("level", [format_levels.FIRST, format_levels.NEWEST])
async def test_wal_begins_at_level_of_cluster_file(inner: MemoryStore, level: int) -> None:
    await found_cluster(inner, level)
    wal = await with_topic(inner)
    await wal.commit(one(wal, "a"))
    assert [decoded.entry.level for _, decoded in await entries_of(inner)] == [level, level]
    for _ in range(2):
        late = await opened(inner)
        assert (late.state.level, late.state.encode()) == (level, wal.state.encode())
        await wal.checkpoint()


async def test_new_clusters_begin_at_the_newest_level(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    assert wal.cluster.format == wal.state.level == format_levels.NEWEST
    assert b'"format":%d' % format_levels.NEWEST in await inner.get(object_keys.CLUSTER)


@pytest.mark.parametrize("is_collected", [False, True])
async def test_newer_checkpoint_is_not_passed_over(inner: MemoryStore, is_collected: bool) -> None:
    """It is not damaged, and the entries before it may be gone."""
    wal = await with_topic(inner)
    await wal.checkpoint()
    await wal.commit(one(wal, "a"))
    payload = msgspec.msgpack.encode([format_levels.NEWEST + 1, {"all": "new"}])
    head = wal_objects.CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little")
    await inner.create(object_keys.checkpoint(2), [head, payload])
    if is_collected:
        await inner.delete([object_keys.wal(1)])
    message = f"{object_keys.checkpoint(2)} has level {format_levels.NEWEST + 1}"
    with pytest.raises(NewerLevel, match=message):
        await opened(inner)
