"""Levels of the format in the objects that a view loads (FORMAT 8)."""

import msgspec
import pytest

from tests.support.records import entries_of
from tests.support.views import CLUSTER_ID, one, opened, with_topic
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core import levels, object_keys
from tidelog.storage.core.errors import Corrupt, NewerLevel
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal import wal_objects


def cluster_file(level: int) -> bytes:
    return b'{"format":%d,"cluster_id":"%s","created_ms":1}' % (level, CLUSTER_ID.encode())


async def test_a_cluster_of_a_newer_level_is_refused() -> None:
    inner = MemoryStore()
    await inner.create(object_keys.CLUSTER, [cluster_file(levels.NEWEST + 1)])
    with pytest.raises(NewerLevel) as caught:
        await opened(inner)
    assert str(caught.value) == (
        f"object cluster.json has level {levels.NEWEST + 1} of the format, "
        f"this version reads up to {levels.NEWEST}: "
        "it needs a newer tidelog"
    )
    inner = MemoryStore()
    await inner.create(object_keys.CLUSTER, [cluster_file(0)])
    with pytest.raises(Corrupt, match="it has level 0 of the format; the first is 1"):
        await opened(inner)


@pytest.mark.parametrize("level", [levels.FIRST, levels.NEWEST])
async def test_the_wal_begins_at_the_level_of_the_cluster_file(level: int) -> None:
    inner = MemoryStore()
    await inner.create(object_keys.CLUSTER, [cluster_file(level)])
    wal = await with_topic(inner)
    await wal.commit(one(wal, "a"))
    assert [decoded.entry.level for _, decoded in await entries_of(inner)] == [level, level]
    for _ in range(2):
        late = await opened(inner)
        assert (late.state.level, late.state.encode()) == (level, wal.state.encode())
        await wal.checkpoint()


async def test_new_clusters_begin_at_the_newest_level(inner: MemoryStore) -> None:
    wal = await with_topic(inner)
    assert wal.cluster.format == wal.state.level == levels.NEWEST
    assert b'"format":%d' % levels.NEWEST in await inner.get(object_keys.CLUSTER)


@pytest.mark.parametrize("is_collected", [False, True])
async def test_a_checkpoint_of_a_newer_level_is_not_passed_over(is_collected: bool) -> None:
    """It is not damaged, and the entries before it may be gone."""

    inner = MemoryStore()
    wal = await with_topic(inner)
    await wal.checkpoint()
    await wal.commit(one(wal, "a"))
    payload = msgspec.msgpack.encode([levels.NEWEST + 1, {"all": "new"}])
    head = wal_objects.CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little")
    await inner.create(object_keys.checkpoint(2), [head, payload])
    if is_collected:
        await inner.delete([object_keys.wal(1)])
    message = f"{object_keys.checkpoint(2)} has level {levels.NEWEST + 1}"
    with pytest.raises(NewerLevel, match=message):
        await opened(inner)
