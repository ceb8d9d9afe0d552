"""Raising the level of a cluster's format while brokers write (FORMAT.md, levels; I2, I4, I6)."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from tests.support.cluster import SETTINGS, Cluster
from tests.support.faults import Call, Fault, Script
from tests.support.logs import append, closing, kill, opened, read_values
from tests.support.maintenance import caring
from tests.support.records import creating, entries_of, found_cluster
from tests.support.views import one, store_of, values_of, with_topic
from tests.support.views import opened as opened_view
from tidelog.compaction.upgrade import LevelChange, upgrade
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import Commit, Entry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import Chunk, DeleteTopic
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    InvalidConfig,
    NewerLevel,
    Unavailable,
)
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.view import WalView

MEMBERS = SETTINGS.membership
TIMEOUT_S = MEMBERS.member_timeout_s
OLD_KEY = "brokers/old.json"

NEWEST = format_levels.NEWEST
LEVELS = list(range(format_levels.FIRST, NEWEST + 1))


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """A cluster of level 1."""
    async with Cluster() as cluster:
        await found_cluster(cluster.store, format_levels.FIRST)
        yield cluster


async def levels_in(store: ObjectStore) -> list[int]:
    """The level of each entry."""
    return [decoded.entry.level for _, decoded in await entries_of(store)]


def old_member(beat: int = 0, **fields: object) -> bytes:
    """The liveness object of a broker of version 0.1."""
    member = Member("0ld", "old-broker", "http://old", "token", 1, beat=beat)
    member_fields: dict[str, Any] = msgspec.to_builtins(member)
    del member_fields["level"]
    return msgspec.json.encode(member_fields | fields)


async def beating(store: ObjectStore, body: Callable[[int], bytes], key: str = OLD_KEY) -> None:
    """A broker that lives until this is cancelled."""
    beat = 0
    while True:
        beat += 1
        await store.put(key, [body(beat)])
        await asyncio.sleep(MEMBERS.heartbeat_interval_s)


async def upgraded(store: ObjectStore, *, is_dry: bool = False) -> LevelChange:
    async with caring(store) as cluster:
        return await upgrade(cluster, is_dry=is_dry, settings=MEMBERS)


# -- the command


async def test_a_dry_run_changes_nothing(inner: MemoryStore) -> None:
    await found_cluster(inner, format_levels.FIRST)
    wal = await with_topic(inner)
    old_infos = [info async for info in inner.list("")]
    assert await upgraded(inner, is_dry=True) == LevelChange(1, NEWEST)
    assert [info async for info in inner.list("")] == old_infos
    assert await upgraded(inner) == LevelChange(1, NEWEST)
    await wal.refresh()
    assert wal.state.level == NEWEST
    assert await levels_in(inner) == LEVELS


@pytest.mark.parametrize("is_dry", [False, True])
async def test_a_cluster_that_has_the_level_is_left_alone(inner: MemoryStore, is_dry: bool) -> None:
    await with_topic(inner)  # at the newest level
    other = asyncio.create_task(beating(inner, old_member))
    await asyncio.sleep(0.1)
    old_keys = [info.key async for info in inner.list("wal/")]
    assert await upgraded(inner, is_dry=is_dry) == LevelChange(NEWEST, NEWEST)
    assert [info.key async for info in inner.list("wal/")] == old_keys
    other.cancel()


@pytest.mark.parametrize("faults", [[], [Fault.STORED], [Fault.LATE], [Fault.ABSENT, Fault.LATE]])
async def test_two_upgrades_raise_level_once(inner: MemoryStore, faults: list[Fault]) -> None:
    await found_cluster(inner, format_levels.FIRST)
    wal = await with_topic(inner)
    async with caring(inner) as first, caring(inner) as second:
        for cluster in (first, second):
            way = cluster.store
            way.latency = lambda _: 0.02  # type: ignore[attr-defined]
        first.store.plan = Script("create", object_keys.WAL, faults)  # type: ignore[attr-defined]
        both = await asyncio.gather(
            *(upgrade(session, is_dry=False, settings=MEMBERS) for session in (first, second))
        )
        assert both == [LevelChange(1, NEWEST)] * 2
        assert (first.state.level, second.state.level) == (NEWEST, NEWEST)
    await asyncio.sleep(1.0)
    assert await levels_in(inner) == LEVELS
    await wal.commit(one(wal, "a"))
    assert await levels_in(inner) == [*LEVELS, NEWEST]


async def test_defaults_of_topics_need_an_upgrade() -> None:
    """From level 3, whose brokers would not decode the action; a broker that starts has them."""
    async with Cluster() as cluster:
        await found_cluster(cluster.store, 3)
        log = await cluster.start()
        await log.topics.create("t", 1, {})
        with pytest.raises(InvalidConfig, match="has level 3: run tidelog upgrade"):
            await log.topics.set_defaults({"log.roll.ms": "7000"})
        assert await upgraded(cluster.store) == LevelChange(3, NEWEST)
        await log.refresh()
        assert log.state.topic("t").config.segment_ms == 600_000
        await log.topics.set_defaults({"log.roll.ms": "7000"})
        await log._log.wal.checkpoint()
        other = await cluster.start()
        assert other.state.topic("t").config.segment_ms == 7000


# -- live brokers


@pytest.mark.parametrize("is_dry", [False, True])
@pytest.mark.parametrize("fields", [{}, {"level": 1}], ids=["version 0.1", "level 1"])
async def test_old_broker_is_named(cluster: Cluster, fields: dict[str, int], is_dry: bool) -> None:
    log = await cluster.start()
    old = asyncio.create_task(beating(cluster.store, lambda beat: old_member(beat, **fields)))
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable) as caught:
        await upgraded(cluster.store, is_dry=is_dry)
    assert str(caught.value) == (
        f"live brokers do not know level {NEWEST} of the format: old-broker; "
        "upgrade or stop them first"
    )
    await log._log.wal.refresh()
    assert (log.state.level, await levels_in(cluster.store)) == (1, [])
    old.cancel()


async def test_killed_broker_blocks_until_member_timeout(cluster: Cluster) -> None:
    loop = asyncio.get_running_loop()
    await cluster.start()
    old = asyncio.create_task(beating(cluster.store, old_member))
    await asyncio.sleep(0.1)
    old.cancel()
    started_s = loop.time()
    assert await upgraded(cluster.store) == LevelChange(1, NEWEST)
    assert TIMEOUT_S <= loop.time() - started_s <= TIMEOUT_S + 2
    # One that is old at first sight does not block at all.
    started_s = loop.time()
    assert await upgraded(cluster.store) == LevelChange(NEWEST, NEWEST)
    assert loop.time() - started_s < 1


async def test_a_broker_that_stops_meanwhile_does_not_block(cluster: Cluster) -> None:
    await cluster.start()
    old = asyncio.create_task(beating(cluster.store, old_member))
    await asyncio.sleep(0.1)
    raising = asyncio.create_task(upgraded(cluster.store))
    await asyncio.sleep(1.5)
    assert not raising.done()
    old.cancel()
    await cluster.store.delete([OLD_KEY])
    assert await raising == LevelChange(1, NEWEST)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[1]", b'{"id":"x"}'])
async def test_undecodable_member_refuses_by_key(cluster: Cluster, body: bytes) -> None:
    await cluster.start()
    strange = asyncio.create_task(beating(cluster.store, lambda _: body))
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match=f"level {NEWEST} of the format: {OLD_KEY};"):
        await upgraded(cluster.store)
    strange.cancel()
    assert await upgraded(cluster.store) == LevelChange(1, NEWEST)


async def test_brokers_of_this_version_do_not_block(cluster: Cluster) -> None:
    loop = asyncio.get_running_loop()
    brokers = [await cluster.start() for _ in range(3)]
    await cluster.settled()
    started_s = loop.time()
    assert await upgraded(cluster.store) == LevelChange(1, NEWEST)
    assert loop.time() - started_s < 1
    await brokers[0].topics.create("t", 1, {})
    await asyncio.sleep(2)
    assert [log.state.level for log in brokers] == [NEWEST] * 3
    assert len({log.state.encode() for log in brokers}) == 1


# -- commits in flight


@pytest.mark.parametrize("moment", ["before the PUT", "after the PUT", *Fault])
async def test_a_commit_in_flight_keeps_its_outcome(moment: str | Fault) -> None:
    """Another broker's entry and the one that raises the level compete for a number."""
    if moment is Fault.UNAVAILABLE:
        moment = "before the PUT"
    inner = MemoryStore()
    await found_cluster(inner, format_levels.FIRST)
    wal = await with_topic(inner)
    await wal.commit(one(wal, "a"))
    if isinstance(moment, Fault):
        store_of(wal).plan = Script("create", object_keys.WAL, [moment])
    gate = store_of(wal).hold("create", object_keys.wal(3), is_after=moment == "after the PUT")
    commit = asyncio.create_task(wal.commit(one(wal, "b")))
    await gate.reached.wait()
    assert await upgraded(inner) == LevelChange(1, NEWEST)
    gate.opened.set()
    try:
        (outcome,) = await commit
    except Unavailable:
        assert moment is Fault.REFUSED
        expected_values = ["a"]
    else:
        assert outcome.placements == [("t", 0, 1, 1)]
        expected_values = ["a", "b"]
    await wal.commit(one(wal, "c"))
    await asyncio.sleep(1.0)  # what is late lands
    assert await values_of(inner) == [*expected_values, "c"]
    entry_levels = await levels_in(inner)
    assert entry_levels == sorted(entry_levels)
    assert (entry_levels[:2], entry_levels[-1], wal.state.level) == ([1, 1], NEWEST, NEWEST)
    assert len(entry_levels) == 2 + (NEWEST - 1) + len(expected_values)


@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_and_nothing_is_twice_while_the_level_rises(seed: int) -> None:
    """Brokers that forward drafts to one of them, a network and stores that take their time."""
    draw = random.Random(seed)

    def latency(_: Call) -> float:
        return draw.choice([0.001, 0.01, 0.05])

    async with Cluster(latency=latency) as cluster:
        await found_cluster(cluster.store, format_levels.FIRST)
        brokers = [await cluster.start() for _ in range(3)]
        await brokers[0].topics.create("t", 1, {})
        await cluster.settled()
        for log in brokers:
            await log._log.wal.refresh()
        offsets: dict[int, str] = {}

        async def write(number: int) -> None:
            for count in range(25):
                value = f"{number}.{count}"
                placed = await append(brokers[number], value)
                assert placed is not None
                assert placed[0].base_offset not in offsets
                offsets[placed[0].base_offset] = value

        writing = [asyncio.create_task(write(number)) for number in range(3)]
        await asyncio.sleep(draw.uniform(0.0, 0.5))
        assert await upgraded(cluster.store) == LevelChange(1, NEWEST)
        await asyncio.gather(*writing)
        reader = draw.choice(brokers)
        assert await read_values(reader) == [offsets[offset] for offset in range(75)]
        entry_levels = await levels_in(cluster.store)
        assert entry_levels == sorted(entry_levels)
        assert set(entry_levels) == set(LEVELS)
        for log in brokers:
            await log._log.wal.refresh()
        assert len({log.state.encode() for log in brokers}) == 1


# -- brokers that start afterwards


@pytest.mark.parametrize("checkpoint", ["none", "before", "after"])
async def test_a_broker_starts_again_across_the_raise(inner: MemoryStore, checkpoint: str) -> None:
    await found_cluster(inner, format_levels.FIRST)
    log = await opened(inner)
    await log.topics.create("t", 1, {})
    await append(log, "a")
    if checkpoint == "before":
        await log._log.wal.checkpoint()
    assert await upgraded(inner) == LevelChange(1, NEWEST)
    await append(log, "b")
    if checkpoint == "after":
        newest = await log._log.wal.checkpoint()
        await inner.delete([object_keys.wal(seq) for seq in (1, 3, 4)])  # others have records
        body = await inner.get(object_keys.checkpoint(newest))
        assert msgspec.msgpack.decode(body[12:])[0] == NEWEST
    old_state = log.state.encode()
    await kill(log)
    async with closing(await opened(inner)) as again:
        assert again._log.wal.cluster.format == 1
        assert (again.state.level, again.state.encode()) == (NEWEST, old_state)
        await append(again, "c")
        assert await read_values(again) == ["a", "b", "c"]
        newest = await again._log.wal.checkpoint()
        body = await inner.get(object_keys.checkpoint(newest))
        assert msgspec.msgpack.decode(body[12:])[0] == NEWEST


# -- entries that no version writes


async def next_entry(wal: WalView, store: ObjectStore, level: int, **changed: Any) -> str:
    """Write the next entry at this level; return its key."""
    state = wal.state
    entry = Entry(level, state.seq + 1, state.hash, b"id", "other", state.time_ms, [], [])
    header, _ = entries.encode_header(msgspec.structs.replace(entry, **changed))
    await store.create(object_keys.wal(entry.seq), [header])
    return object_keys.wal(entry.seq)


@pytest.mark.parametrize(
    ("begin", "level", "changed"),
    [
        (1, 2, {"commits": [Commit(b"", [DeleteTopic("a1" * 16)])]}),
        (1, 2, {"chunks": [Chunk("a1" * 16, 0, 0, 0, 0, 0, 0, 0, True, "", 0)]}),
        (2, 1, {}),
        (2, 1, {"commits": [Commit(b"", [DeleteTopic("a1" * 16)])]}),
        (1, 3, {}),
    ],
    ids=["raises with a commit", "raises with a chunk", "lowers", "lower", "two levels"],
)
@pytest.mark.parametrize("is_announced", [False, True])
async def test_a_view_stops_at_an_entry_that_may_not_have_its_level(
    inner: MemoryStore,
    begin: int,
    level: int,
    changed: dict[str, Any],
    is_announced: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(format_levels, "NEWEST", max(level, format_levels.NEWEST))
    await found_cluster(inner, begin)
    wal = await with_topic(inner)
    old_state = wal.state.encode()
    key = await next_entry(wal, inner, level, **changed)
    why = f"{key} is corrupt: it has level {level} in a cluster of {begin}"
    if is_announced:
        wal.on_announced(2, await inner.get(key))
        await asyncio.sleep(0.5)
    for _ in range(2):
        with pytest.raises(Corrupt, match=why):
            await wal.refresh()
        with pytest.raises(Corrupt, match=why):
            await wal.commit(creating(wal.clock, "u", topic_id="b2" * 16))
    assert wal.state.encode() == old_state
    with pytest.raises(Corrupt, match=why):
        await opened_view(inner)
    assert [info.key async for info in inner.list("wal/")] == [object_keys.wal(1), key]
    await wal.close()


async def test_a_view_stops_at_a_level_that_it_does_not_know(inner: MemoryStore) -> None:
    """As version 0.1 stops at level 2: the line says that the object is not damaged."""
    log = await opened(inner)
    await log.topics.create("t", 1, {})
    key = await next_entry(log._log.wal, inner, format_levels.NEWEST + 1)
    newer = f"{key} has level {NEWEST + 1} of the format"
    why = f"{newer}, this version reads up to {NEWEST}: it needs a newer"
    for _ in range(2):
        with pytest.raises(NewerLevel, match=why):
            await log._log.wal.refresh()
    with pytest.raises(CommitUnknown, match=why):
        await append(log, "lost")
    with pytest.raises(NewerLevel, match=why):
        await opened(inner)
    assert log.state.seq == 1
    await kill(log)
