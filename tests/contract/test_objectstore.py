"""The guarantees of `ObjectStore`, on every implementation."""

import asyncio
import threading
from collections.abc import Iterable

import pytest

from tidelog.storage.core.errors import ObjectNotFound
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.metered import MeteredStore
from tidelog.storage.store.object_store import Created, ObjectInfo, ObjectStore

CLOCK_STEP_MS = 2000
"""Dates of answers are in seconds; the answer and the object may have two of them."""
LARGE_PARTS = [bytes([number]) * 4_000_000 for number in range(5)]


async def listed(store: ObjectStore, prefix: str = "", *, start_after: str = "") -> list[str]:
    return [info.key async for info in store.list(prefix, start_after=start_after)]


async def fill(store: ObjectStore, keys: Iterable[str]) -> None:
    """Objects of a few bytes, eight at a time."""
    remaining_keys = iter(keys)

    async def work() -> None:
        for key in remaining_keys:
            assert await store.create(key, [key.encode()]) is Created.DONE

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(work())


async def test_what_was_created_is_read(store: ObjectStore) -> None:
    assert await store.create("wal/1", [b"he", bytearray(b"ll"), memoryview(b"o")]) is Created.DONE
    assert await store.get("wal/1") == b"hello"


async def test_a_missing_object_is_not_found(store: ObjectStore) -> None:
    for read in (store.get("wal/1"), store.get_range("wal/1", 0, 1)):
        with pytest.raises(ObjectNotFound) as caught:
            await read
        assert caught.value.key == "wal/1"


async def test_a_directory_is_no_object(store: ObjectStore) -> None:
    await store.create("a/b/c", [b"1"])
    for key in ("a", "a/b", "a/b/c/d"):
        with pytest.raises(ObjectNotFound):
            await store.get(key)


async def test_an_object_may_be_empty(store: ObjectStore) -> None:
    assert await store.create("none", []) is Created.DONE
    assert await store.create("nothing", [b"", b""]) is Created.DONE
    assert [await store.get("none"), await store.get("nothing")] == [b"", b""]
    assert await store.get_range("none", 0, 10) == b""
    assert await store.create("none", [b"more"]) is Created.EXISTS
    assert [(it.key, it.size) async for it in store.list("no")] == [("none", 0), ("nothing", 0)]


async def test_create_leaves_an_existing_object_alone(store: ObjectStore) -> None:
    """I5: the number of an entry is given once."""
    assert await store.create("wal/1", [b"first"]) is Created.DONE
    assert await store.create("wal/1", [b"second, longer"]) is Created.EXISTS
    assert await store.create("wal/1", [b"first"]) is Created.EXISTS
    assert await store.get("wal/1") == b"first"


async def test_put_overwrites(store: ObjectStore) -> None:
    for body in (b"a long one", b"short", b""):
        await store.put("brokers/b1.json", [body[:2], body[2:]])
        assert await store.get("brokers/b1.json") == body
    assert await store.create("brokers/b1.json", [b"x"]) is Created.EXISTS


async def test_a_range_ends_where_the_object_ends(store: ObjectStore) -> None:
    await store.create("o", [b"0123456789"])
    ranges = [(0, 10), (0, 1), (3, 4), (9, 1), (8, 100), (10, 1), (11, 5), (1000, 1), (4, 0)]
    read = [await store.get_range("o", start, length) for start, length in ranges]
    assert read == [b"0123456789"[start : start + length] for start, length in ranges]


async def test_a_large_object_of_many_parts(store: ObjectStore) -> None:
    body = b"".join(LARGE_PARTS)
    parts = [*LARGE_PARTS[:3], *(memoryview(part)[:2_000_000] for part in LARGE_PARTS[3:4])]
    parts += [LARGE_PARTS[3][2_000_000:], LARGE_PARTS[4]]
    assert await store.create("data/large", parts) is Created.DONE
    assert await store.create("data/large", parts) is Created.EXISTS
    assert await store.get("data/large") == body
    assert await store.get_range("data/large", 3_999_999, 3) == b"\0\1\1"
    assert await store.get_range("data/large", 19_999_998, 100) == b"\4\4"
    assert [it.size async for it in store.list("data/")] == [20_000_000]


async def test_more_parts_than_one_system_call_takes(store: ObjectStore) -> None:
    parts = [b"%04d" % number for number in range(2500)]
    assert await store.create("many", parts) is Created.DONE
    assert await store.get("many") == b"".join(parts)


TREE = [
    "a",  # no directory of that name: a folder cannot have both
    "b-1/x",
    "b-a",
    "b.json",
    "b/0/deep/er",
    "b/0/deep-er",
    "b/00000000000000000001",
    "b/00000000000000000002",
    "b/1-x",
    "b/1/y",
    "b0",
    "c/partition=0/1.parquet",
    "c/partition=10/1.parquet",
    "c/partition=2/1.parquet",
    "c/~",
]


async def test_keys_are_listed_in_byte_order(store: ObjectStore) -> None:
    await fill(store, TREE)
    assert await listed(store) == sorted(TREE)
    for prefix in ("", "a", "b", "b-", "b/", "b/0", "b/0/", "b/0/deep/", "c/partition=", "d", "d/"):
        assert await listed(store, prefix) == [it for it in sorted(TREE) if it.startswith(prefix)]


async def test_a_listing_starts_after_any_string(store: ObjectStore) -> None:
    """`-` sorts before `/`, so `b-a` precedes all that is in `b/`, and `b0` follows it."""
    await fill(store, TREE)
    starts = [*TREE, "b", "b-", "b/", "b/0", "b/0/", "b/0/deep", "b/0/deep/a", "b/1", "b/1/", "c/z"]
    for start in [*starts, "0", "zz"]:
        for prefix in ("", "b", "b/", "b/0/"):
            expected_keys = [it for it in sorted(TREE) if it > start and it.startswith(prefix)]
            assert await listed(store, prefix, start_after=start) == expected_keys, (prefix, start)


@pytest.mark.parametrize(
    "store",
    # moto, without: its 1,100 creates take seconds, and its pages are those of SeaweedFS.
    ["memory", "folder", pytest.param("seaweed", marks=pytest.mark.seaweed)],
    indirect=True,
)
async def test_a_listing_has_more_than_one_page(store: ObjectStore) -> None:
    keys = [f"wal/{number:020d}" for number in range(1, 1102)]
    await fill(store, [*keys, "cluster.json", "x/1"])
    assert await listed(store, "wal/") == keys
    assert await listed(store) == ["cluster.json", *keys, "x/1"]
    assert await listed(store, "wal/", start_after=keys[1090]) == keys[1091:]
    assert await listed(store, "wal/", start_after=keys[40]) == keys[41:]


async def test_a_listing_may_be_left_early(store: ObjectStore) -> None:
    await fill(store, [f"wal/{number}" for number in range(5)])
    walk = store.list("wal/")
    async for info in walk:
        assert info.key == "wal/0"
        break
    assert await store.get("wal/4") == b"wal/4"


async def test_a_listing_has_size_and_age(store: ObjectStore) -> None:
    await store.create("wal/1", [b"12345"])
    await store.create("wal/2", [b""])
    infos: list[ObjectInfo] = [info async for info in store.list("wal/")]
    assert [(info.key, info.size) for info in infos] == [("wal/1", 5), ("wal/2", 0)]
    assert all(1_600_000_000_000 < info.modified_ms < 4_000_000_000_000 for info in infos)
    assert all(isinstance(info.modified_ms, int) for info in infos)


async def test_a_deleted_object_is_gone(store: ObjectStore) -> None:
    await fill(store, ["wal/1", "wal/2", "wal/3"])
    await store.delete(key for key in ["wal/1", "wal/3", "wal/missing", "nowhere/1"])
    assert await listed(store) == ["wal/2"]
    with pytest.raises(ObjectNotFound):
        await store.get("wal/1")
    await store.delete(["wal/1"])
    await store.delete([])
    assert await store.create("wal/1", [b"again"]) is Created.DONE


async def test_more_objects_are_deleted_than_one_request_takes(store: ObjectStore) -> None:
    await fill(store, ["a/1", "a/2", "b"])
    missing = [f"a/{number}" for number in range(3, 1500)]
    await store.delete(["a/1", *missing, "a/2"])
    assert await listed(store) == ["b"]


@pytest.mark.parametrize(
    ("store", "contenders"),
    # moto looks first and stores afterwards. SeaweedFS takes seconds with eight on one key.
    [("memory", 32), ("folder", 32), pytest.param("seaweed", 3, marks=pytest.mark.seaweed)],
    indirect=["store"],
)
async def test_one_of_many_concurrent_creates_is_done(store: ObjectStore, contenders: int) -> None:
    for number in range(5):
        key = f"wal/{number}"
        bodies = [bytes([contender]) * 1000 for contender in range(contenders)]
        outcomes = await asyncio.gather(*(store.create(key, [body]) for body in bodies))
        assert sorted(it.value for it in outcomes) == ["done"] + ["exists"] * (contenders - 1)
        assert await store.get(key) == bodies[outcomes.index(Created.DONE)]


async def test_losers_never_see_half_an_object(store: ObjectStore) -> None:
    body = b"x" * 300_000
    first = asyncio.create_task(store.create("wal/1", [body[:1000], body[1000:]]))
    while not first.done():
        try:
            assert await store.get("wal/1") == body
        except ObjectNotFound:
            await asyncio.sleep(0)
    assert await first is Created.DONE
    assert await store.get("wal/1") == body


@pytest.mark.parametrize("size", [1000, 3_000_000])
async def test_a_cancelled_create_leaves_the_store_usable(store: ObjectStore, size: int) -> None:
    body = b"x" * size
    for number, turns in enumerate((1, 2, 3, 5, 9)):
        task = asyncio.create_task(store.create(f"wal/{number}", [body]))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await store.create("after", [body]) is Created.DONE
    for number in range(5):
        try:
            assert await store.get(f"wal/{number}") == body  # whole, or not there (yet)
        except ObjectNotFound:
            continue


def threads() -> set[threading.Thread]:
    """Threads but those of `asyncio.to_thread` and of moto's server.

    moto ends its threads a moment after their connection.
    """
    return {
        thread
        for thread in threading.enumerate()
        if not thread.name.startswith("asyncio") and "process_request_thread" not in thread.name
    }


async def test_close_is_idempotent_and_leaves_no_thread(store: ObjectStore) -> None:
    old_threads = threads()
    await store.create("a", [b"1"])
    await store.close()
    await store.close()
    assert threads() <= old_threads


async def test_the_stores_time_is_that_of_its_last_answer(store: ObjectStore) -> None:
    """Of the clock that stamps objects."""
    await store.create("o", [b"1"])
    first_ms = store.seen_ms
    (info,) = [info async for info in store.list("o")]
    assert abs(first_ms - info.modified_ms) <= CLOCK_STEP_MS
    assert await store.create("o", [b"1"]) is Created.EXISTS
    assert first_ms <= store.seen_ms
    assert MeteredStore(store, SystemClock()).seen_ms == store.seen_ms
    with pytest.raises(ObjectNotFound):
        await store.get("nothing")
    assert first_ms <= store.seen_ms <= info.modified_ms + 60_000


async def test_the_url_says_where_it_is(store: ObjectStore) -> None:
    assert store.url.partition("://")[0] in {"memory", "file", "s3"}
    assert "secret" not in store.url
