"""Reads on which a seal moves: no record is skipped, whichever tier it lies in by then (I2, I7)."""

import asyncio

from tests.support.logs import COLD, append, closing, store_of, with_topic
from tidelog.storage.log import FetchResult
from tidelog.storage.store.memory import MemoryStore


def offsets(fetched: FetchResult) -> list[int]:
    return [
        offset for piece in fetched.pieces for offset in piece.batch.column("offset").to_pylist()
    ]


async def test_i2_a_read_of_the_table_goes_on_where_it_ended_though_more_was_sealed() -> None:
    inner = MemoryStore()
    async with closing(await with_topic(inner, COLD)) as log:
        await append(log, "a", "b", "c")
        await log.seal("t")
        await append(log, "d", "e")
        (segment,) = [info.key async for info in inner.list("topics/")]
        gate = store_of(log).hold("get_range", segment)
        reading = asyncio.create_task(log.fetch("t", 0, 0, bytes_max=1000))
        await gate.reached.wait()
        await log.seal("t")
        await append(log, "f")
        gate.opened.set()
        fetched = await reading
        read = offsets(fetched)
        assert read == list(range(len(read)))
        assert fetched.next_offset == len(read)
        rest = await log.fetch("t", 0, fetched.next_offset, bytes_max=1000)
        assert [*read, *offsets(rest)] == [0, 1, 2, 3, 4, 5]


async def test_i2_a_read_of_the_tail_ends_where_it_is_sealed_meanwhile(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, COLD)) as log:
        for value in "abc":
            await append(log, value)
        entry = [info.key async for info in inner.list("wal/")][1]
        gate = store_of(log).hold("get_range", entry)
        reading = asyncio.create_task(log.fetch("t", 0, 0, bytes_max=1000))
        await gate.reached.wait()
        await append(log, "d")
        sealing = asyncio.create_task(log.seal("t"))
        await asyncio.sleep(1)
        gate.opened.set()
        fetched = await reading
        await sealing
        read = offsets(fetched)
        rest = await log.fetch("t", 0, fetched.next_offset, bytes_max=1000)
        assert [*read, *offsets(rest)] == [0, 1, 2, 3]
