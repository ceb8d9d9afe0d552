"""One damaged chunk of a tail stops the seals of its topic, and readers stay before it."""

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.logs import append
from tests.support.loop_brokers import broker, ending, given, loop_clock, way
from tidelog.compaction.retention import delete_records
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.core.errors import LogError
from tidelog.storage.log import Log
from tidelog.storage.store.memory import MemoryStore

PARTITIONS = 3
DAMAGED = 1
RECORDS = 3


@asynccontextmanager
async def damaged() -> AsyncIterator[tuple[MemoryStore, Log]]:
    """Topic `t` with three records in the tail of each partition; the second chunk of partition 1
    is damaged. The broker has none of it in memory."""
    store = MemoryStore()
    writer = await broker(store, loop_clock(1), "writer")
    await writer.create_topic("t", PARTITIONS, {})
    for number in range(RECORDS):
        for partition in range(PARTITIONS):
            await append(writer, f"v{number}" * 9, partition=partition)
    run_ = writer.state.partition("t", DAMAGED).tail[1]
    await writer.close()
    body = bytearray(await store.get(run_.object_key))
    body[run_.position + run_.size - 3] ^= 1
    await store.put(run_.object_key, [bytes(body)])
    log = await broker(store, loop_clock(2))
    async with ending(log):
        given(run_.base_offset == 1, "the damage is in the middle of the tail")
        yield store, log


async def delete_and_seal(store: MemoryStore, log: Log) -> None:
    """Delete the records of the damaged tail, append one after them, and seal."""
    cluster = await MaintenanceSession.open(way(store), loop_clock(3))
    await delete_records(cluster, "t", {DAMAGED: RECORDS}, is_dry=False)
    await cluster.close()
    await log.wal.refresh()
    await append(log, "after", partition=DAMAGED)
    await log.seal("t")


async def test_the_other_partitions_of_the_topic_are_sealed() -> None:
    async with damaged() as (_, log):
        with contextlib.suppress(LogError):
            await log.seal("t")
        ends = [partition.sealed_end for partition in log.state.topic("t").partitions]
        others = [end for number, end in enumerate(ends) if number != DAMAGED]
        assert others == [RECORDS] * (PARTITIONS - 1)


async def test_the_damaged_tail_is_named_until_it_is_sealed() -> None:
    async with damaged() as (store, log):
        assert log.damaged_tails() == {}
        with contextlib.suppress(LogError):
            await log.seal("t")
        ((topic_partition, why),) = log.damaged_tails().items()
        assert topic_partition == ("t", DAMAGED)
        assert log.state.partition("t", DAMAGED).tail[0].object_key in why
        await delete_and_seal(store, log)
        assert log.damaged_tails() == {}


async def test_after_delete_records_beyond_the_damage_the_partition_is_sealed() -> None:
    async with damaged() as (store, log):
        await delete_and_seal(store, log)
        assert log.state.partition("t", DAMAGED).sealed_end == RECORDS + 1
        fetched = await log.fetch("t", DAMAGED, RECORDS, bytes_max=1000)
        rows = [row for piece in fetched.pieces for row in piece.batch.to_pylist()]
        assert [row["value"] for row in rows] == [b"after"]


async def test_a_reader_gets_the_records_before_the_damage() -> None:
    async with damaged() as (_, log):
        fetched = await log.fetch("t", DAMAGED, 0, bytes_max=1 << 20)
        rows = [row for piece in fetched.pieces for row in piece.batch.to_pylist()]
        assert [row["offset"] for row in rows] == [0]
        assert fetched.next_offset == 1
