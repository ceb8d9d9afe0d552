"""The objects of tails are read in parts, once for all readers, and nothing wrong gets through."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import Fault, FaultyStore
from tests.support.vloop import run
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.core.errors import Corrupt, ObjectNotFound, Unavailable
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal.tail_objects import (
    BLOCK_BYTES,
    PART_BYTES,
    PART_OVERHEAD,
    STORE_READS_MAX,
    TailObjects,
)

KEY = "wal/00000000000000000001"
MIB = 1024 * 1024


def body_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class Objects:
    """A store with objects, and the parts of them that a broker reads."""

    def __init__(self, bytes_max: int = 64 * MIB, zone: "Zone | None" = None) -> None:
        self.inner = MemoryStore()
        self.store = FaultyStore(self.inner, latency=lambda _: 0.03)
        self.bodies: dict[str, bytes] = {}
        self.tails = (
            TailObjects(self.store, bytes_max)
            if zone is None
            else TailObjects(self.store, bytes_max, zone)
        )

    async def put(self, key: str, body: bytes) -> None:
        self.bodies[key] = body
        await self.inner.put(key, [body])

    async def read(self, key: str, position: int, size: int) -> bytes:
        chunk = self.bodies[key][position : position + size]
        read_bytes = await self.tails.read(key, position, size, crc32c(chunk))
        assert read_bytes == chunk
        return read_bytes

    @property
    def gets(self) -> int:
        return self.store.count("get_range", "")


class Zone:
    """A zone whose owner answers with the bytes of `answers`."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.asked = 0
        self.distrusted: list[str] = []

    async def read(self, key: str, start: int, length: int) -> bytes | None:
        self.asked += 1
        body = self.answers.get(key)
        return None if body is None else body[start : start + length]

    def distrust(self, key: str) -> None:
        self.distrusted.append(key)


async def test_chunks_that_are_read_together_cost_one_get() -> None:
    objects = Objects()
    await objects.put(KEY, body_of(2 * MIB))
    await asyncio.gather(*(objects.read(KEY, 2000 * nth, 2000) for nth in range(1000)))
    assert objects.gets == 1
    await objects.read(KEY, MIB, MIB)
    assert objects.gets == 1


async def test_chunks_that_are_read_one_by_one_cost_two_gets_and_then_one() -> None:
    objects = Objects()
    for number in range(10):
        key = f"wal/{number:020d}"
        await objects.put(key, body_of(2 * MIB))
        old_gets = objects.gets
        for nth in range(0, 1000, 10):
            await objects.read(key, 2000 * nth, 2000)
        assert objects.gets - old_gets == (2 if number == 0 else 1)


async def test_a_reader_of_one_partition_gets_little_more_than_its_chunks() -> None:
    objects = Objects()
    for number in range(10):
        key = f"wal/{number:020d}"
        await objects.put(key, body_of(2 * MIB))
        await objects.read(key, MIB, 2000)
    assert objects.gets == 10
    assert objects.tails.bytes <= 10 * (BLOCK_BYTES + PART_OVERHEAD)


async def test_announced_bytes_need_no_get_and_only_with_their_checksum() -> None:
    objects = Objects(bytes_max=2 * PART_OVERHEAD)
    tails = objects.tails
    tails.add("wal/1", 100, b"hello")
    assert tails.peek("wal/1", 101, 4, crc32c(b"ello")) == b"ello"
    assert tails.peek("wal/1", 101, 4, crc32c(b"hell")) is None
    assert tails.peek("wal/1", 99, 4, crc32c(b"hell")) is None
    assert tails.peek("wal/1", 103, 9, 0) is None
    assert await tails.read("wal/1", 101, 4, crc32c(b"ello")) == b"ello"
    assert objects.gets == 0
    tails.add("wal/2", 0, b"123456")
    assert tails.peek("wal/1", 101, 4, crc32c(b"ello")) is None
    assert tails.bytes == PART_OVERHEAD + 6


@pytest.mark.parametrize("size", [1, BLOCK_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
async def test_a_chunk_may_be_as_large_as_the_object(size: int) -> None:
    objects = Objects()
    await objects.put(KEY, body_of(size))
    await objects.read(KEY, 0, size)
    await objects.read(KEY, size - 1, 1)
    assert objects.gets <= 2 * (1 + size // PART_BYTES)


async def test_memory_is_bounded() -> None:
    objects = Objects(bytes_max=PART_BYTES + 2 * PART_OVERHEAD)
    keys = [f"wal/{number:020d}" for number in range(6)]
    for key in keys:
        await objects.put(key, body_of(PART_BYTES + 5))
    reads = [objects.read(key, position, 900) for key in keys for position in (0, MIB, 3 * MIB)]
    await asyncio.gather(*reads)
    assert objects.tails.bytes <= objects.tails.bytes_max
    for number in range(50):
        with pytest.raises(ObjectNotFound):
            await objects.tails.read(f"wal/9{number:019d}", 0, 5, 0)
    assert objects.tails.bytes <= objects.tails.bytes_max
    assert len(objects.tails._parts) <= objects.tails.bytes_max // PART_OVERHEAD


async def test_few_parts_are_read_at_the_same_time() -> None:
    objects = Objects()
    reading = highest = 0

    async def get_range(key: str, start: int, length: int) -> bytes:
        nonlocal reading, highest
        reading += 1
        highest = max(highest, reading)
        await asyncio.sleep(0.03)
        reading -= 1
        return objects.bodies[key][start : start + length]

    objects.store.get_range = get_range  # type: ignore[method-assign]
    for number in range(40):
        objects.bodies[f"wal/{number}"] = body_of(100)
    await asyncio.gather(*(objects.read(f"wal/{number}", 0, 100) for number in range(40)))
    assert highest == STORE_READS_MAX


async def test_a_failed_get_fails_its_readers_and_the_next_read_tries_again() -> None:
    objects = Objects()
    await objects.put(KEY, body_of(1000))
    objects.store.plan = lambda _: Fault.UNAVAILABLE
    results = await asyncio.gather(
        *(objects.read(KEY, nth, 10) for nth in range(3)), return_exceptions=True
    )
    assert [type(result) for result in results] == [Unavailable] * 3
    objects.store.plan = lambda _: None
    await objects.read(KEY, 0, 10)


async def test_a_cancelled_reader_does_not_fail_the_others() -> None:
    objects = Objects()
    await objects.put(KEY, body_of(1000))
    first, second = (asyncio.create_task(objects.read(KEY, nth, 10)) for nth in range(2))
    await asyncio.sleep(0.01)
    first.cancel()
    assert len(await second) == 10
    assert objects.gets == 1


async def test_an_object_that_is_cut_off_is_corrupt() -> None:
    objects = Objects()
    await objects.put(KEY, body_of(1000))
    with pytest.raises(Corrupt, match="cut off"):
        await objects.tails.read(KEY, 990, 20, 0)


async def test_the_owner_of_the_zone_saves_the_get() -> None:
    zone = Zone()
    objects = Objects(zone=zone)
    await objects.put(KEY, body_of(2 * MIB))
    zone.answers[KEY] = objects.bodies[KEY]
    await asyncio.gather(*(objects.read(KEY, 2000 * nth, 2000) for nth in range(1000)))
    assert (objects.gets, zone.asked) == (0, 1)
    assert objects.tails.counters.zone_reads == 1


@pytest.mark.parametrize("answer", ["other bytes", "cut off", "nothing", "too few"])
async def test_what_the_zone_answers_wrongly_comes_from_the_store(answer: str) -> None:
    zone = Zone()
    objects = Objects(zone=zone)
    await objects.put(KEY, body_of(2 * MIB))
    zone.answers[KEY] = {
        "other bytes": body_of(2 * MIB, seed=2),
        "cut off": objects.bodies[KEY][: MIB - 10],
        "nothing": b"",
        "too few": objects.bodies[KEY][1:],
    }[answer]
    await objects.read(KEY, MIB, 2000)
    assert zone.distrusted == [KEY]
    zone.answers.clear()
    await asyncio.gather(*(objects.read(KEY, 2000 * nth, 2000) for nth in range(1000)))
    assert objects.gets <= 3
    assert objects.tails.counters.wrong == 1


async def test_a_question_of_another_broker_is_not_passed_on() -> None:
    zone = Zone()
    objects = Objects(zone=zone)
    await objects.put(KEY, body_of(1000))
    zone.answers[KEY] = b"of a third broker"
    assert await objects.tails.serve(KEY, 0, PART_BYTES) == objects.bodies[KEY]
    assert await objects.tails.serve(KEY, 990, 100) == objects.bodies[KEY][990:]
    assert (objects.gets, zone.asked) == (1, 0)


READS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 9 * MIB), st.integers(1, 2 * MIB)),
    min_size=1,
    max_size=12,
)


@given(
    reads=READS,
    sizes=st.lists(st.integers(1, 9 * MIB), min_size=3, max_size=3),
    bytes_max=st.sampled_from([0, 300_000, 64 * MIB]),
    liars=st.sets(st.integers(0, 2)),
)
def test_each_read_has_the_bytes_of_the_store(
    reads: list[tuple[int, int, int]], sizes: list[int], bytes_max: int, liars: set[int]
) -> None:
    async def main() -> None:
        zone = Zone()
        objects = Objects(bytes_max, zone)
        for number, size in enumerate(sizes):
            await objects.put(f"wal/{number}", body_of(size, number))
            if number in liars:
                zone.answers[f"wal/{number}"] = body_of(size, number + 9)
        waiting = []
        for number, start, length in reads:
            size = sizes[number]
            position = start % size
            read = objects.read(f"wal/{number}", position, min(length, size - position))
            waiting.append(asyncio.create_task(read))
            await asyncio.sleep(0.01)
        await asyncio.gather(*waiting)
        assert objects.tails.bytes <= bytes_max
        assert objects.tails.bytes == sum(part.nbytes for part in objects.tails._parts.values())

    run(main)
