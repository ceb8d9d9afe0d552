"""A newer version has written what this version does not know. This version stops there; it
neither drops it nor goes on without it.

An addition of a version has a higher level than before. This version says so, and that it is no
damage. If the level is known and the elements are not, the object is Corrupt.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.support.logs import append, closing, kill, made, opened
from tests.support.records import creating
from tests.support.views import with_topic
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import Entry
from tidelog.storage.core import levels, object_keys
from tidelog.storage.core.errors import Corrupt, NewerLevel, StoreUnfit
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.wal_objects import CHECKPOINT_MAGIC

NEW = {"x": 1}
NEWER = levels.NEWEST + 1


def checkpoint_of(state: list[Any]) -> bytes:
    payload = msgspec.msgpack.encode(state)
    return CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little") + payload


async def upgraded(inner: MemoryStore, level: int, *, is_collected: bool) -> str:
    """Write the newest checkpoint as the next version does: its state has one element more.
    Return its key."""
    async with closing(await opened(inner)) as log:
        await log.create_topic("t", 1, {})
        await append(log, "a")
        seq = log.state.seq
        state = msgspec.msgpack.decode(log.state.encode())
    state = [level, *state[1:], NEW]
    await inner.put(
        object_keys.checkpoint(seq), [checkpoint_of(state)]
    )  # the broker wrote one at its end
    if is_collected:
        await inner.delete([object_keys.wal(number) for number in range(1, seq)])
        older = [info.key async for info in inner.list(object_keys.CHECKPOINTS)]
        await inner.delete([key for key in older if key != object_keys.checkpoint(seq)])
    return object_keys.checkpoint(seq)


@pytest.mark.parametrize("is_collected", [False, True])
async def test_an_older_version_never_drops_what_a_newer_one_added(is_collected: bool) -> None:
    inner = MemoryStore()
    key = await upgraded(inner, NEWER, is_collected=is_collected)
    before = [info async for info in inner.list("")]
    with pytest.raises(NewerLevel, match=f"{key} has level {NEWER}"):
        await made(inner).open("c0ffee")
    assert [info async for info in inner.list("")] == before


@pytest.mark.parametrize("is_collected", [False, True])
async def test_a_state_with_more_than_its_level_has_is_corrupt(is_collected: bool) -> None:
    """No version writes it: it is passed over, as any damaged checkpoint, if all entries exist."""

    inner = MemoryStore()
    key = await upgraded(inner, levels.NEWEST, is_collected=is_collected)
    if is_collected:
        with pytest.raises(StoreUnfit, match="no checkpoint that can be read"):
            await made(inner).open("c0ffee")
        return
    log = await made(inner).open("c0ffee")
    try:
        assert log.state.partition("t", 0).high_watermark == 1
        with pytest.raises(Corrupt, match=key):
            ClusterState.decode((await inner.get(key))[12:], key)
    finally:
        await kill(log)


def of_entry(values: list[Any]) -> list[Any]:
    return values


def of_commit(values: list[Any]) -> list[Any]:
    return values[7][0]


def of_action(values: list[Any]) -> list[Any]:
    return values[7][0][1][0]


@pytest.mark.parametrize("level", [levels.FIRST, levels.NEWEST, NEWER])
@pytest.mark.parametrize("part", [of_entry, of_commit, of_action])
async def test_an_older_version_stops_at_an_entry_that_it_does_not_know(
    inner: MemoryStore, part: Callable[[list[Any]], list[Any]], level: int
) -> None:
    wal = await with_topic(inner)
    draft = creating(wal.clock, "u", topic_id="b2" * 16)
    newer = Entry(
        level=levels.NEWEST,
        seq=wal.state.seq + 1,
        previous=wal.state.hash,
        entry_id=wal.clock.new_id(),
        writer="newer",
        at_ms=wal.state.time_ms,
        chunks=draft.chunks,
        commits=draft.commits,
    )
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(newer))
    values[0] = level
    part(values).append(NEW)
    header = msgspec.msgpack.encode(values)
    prefix = entries._PREFIX.pack(entries.MAGIC, len(header), crc32c(header))
    await inner.create(object_keys.wal(newer.seq), [prefix + header])
    corruption = pytest.raises(Corrupt, match="does not decode")
    newer_level = pytest.raises(NewerLevel, match="it needs a newer tidelog")
    before = wal.state.encode()
    with newer_level if level == NEWER else corruption:
        await wal.refresh()
    assert wal.state.encode() == before, "the entry is applied in part"
    with newer_level if level == NEWER else corruption:
        await wal.commit(draft)
    assert wal.state.encode() == before
    await wal.close()
