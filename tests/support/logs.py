"""Whole logs on a store in memory: opened, killed, read to the end."""

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa
import pytest

from tests.support.clock import ManualClock
from tests.support.faults import FaultyStore, Seeded
from tests.support.records import rows
from tidelog.storage.broker import Broker
from tidelog.storage.codec import segment as segments
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.log_settings import LogSettings
from tidelog.storage.core.model import Acks, AppendedRange, SegmentFile
from tidelog.storage.core.time_bounds import Bounds
from tidelog.storage.read.reader import ReaderSettings
from tidelog.storage.state.partition import TailChunk
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.manifest import seal_app_id
from tidelog.storage.wal.wal_objects import WalSettings

WAL = WalSettings(Bounds(file_grace_ms=0))
"""A collection by a test chooses its grace."""

MANUAL = LogSettings(is_sealing=False, is_coordinating=False, wal=WAL)
"""Nothing is sealed but by the test."""

COLD = LogSettings(
    wal=WAL,
    is_sealing=False,
    is_coordinating=False,
    tail_cache_bytes=0,
    reader=ReaderSettings(0, 0, 0, 0),
)
"""Every read goes to the store."""

CHECKPOINTING = LogSettings(
    is_sealing=False,
    is_coordinating=False,
    wal=WAL._replace(checkpoint_entries=7, checkpoint_interval_s=0.0),
)

_numbers = itertools.count(1)


class Unopened(NamedTuple):
    """A broker that is not open yet: what goes wrong while it opens can be planned."""

    store: FaultyStore
    clock: ManualClock
    settings: LogSettings
    hot_dir: Path | None

    async def open(self, cluster_id: str | None = None) -> Broker:
        return await Broker.open(
            self.store,
            self.settings,
            clock=self.clock,
            name=f"b{self.clock.name}",
            cluster_id=cluster_id,
            hot_dir=self.hot_dir,
        )


def made(
    inner: ObjectStore, settings: LogSettings = MANUAL, *, hot_dir: Path | None = None
) -> Unopened:
    """A broker, not open yet, over a faulty way of its own; its clock is the loop's."""
    clock = ManualClock(next(_numbers), loop_time=asyncio.get_running_loop().time)
    return Unopened(FaultyStore(inner), clock, settings, hot_dir)


async def opened(
    inner: ObjectStore, settings: LogSettings = MANUAL, *, hot_dir: Path | None = None
) -> Broker:
    return await made(inner, settings, hot_dir=hot_dir).open("c0ffee")


def store_of(log: Broker | Unopened) -> FaultyStore:
    store = log.store if isinstance(log, Unopened) else log._log.store
    assert isinstance(store, FaultyStore)
    return store


async def kill(log: Broker) -> None:
    """The process ends here and now: no call of it has an effect any more, its locks are free."""
    store_of(log).kill()
    await log.release()


def spoil(log: Broker, draw: random.Random) -> None:
    """From now on its store fails now and then, and takes its time."""
    store_of(log).plan = Seeded(draw.randrange(2**32), 0.15)
    store_of(log).latency = lambda _: draw.choice([0.005, 0.05, 0.2])


async def with_topic(
    inner: ObjectStore,
    settings: LogSettings = MANUAL,
    *,
    partitions: int = 1,
    configs: Mapping[str, str] = MappingProxyType({}),
    hot_dir: Path | None = None,
) -> Broker:
    """A broker that made topic `t`."""
    log = await opened(inner, settings, hot_dir=hot_dir)
    await log.topics.create("t", partitions, dict(configs))
    return log


async def spoil_chunk(inner: MemoryStore, chunk: TailChunk, position: int = 0) -> None:
    """Flip a bit at a position of a chunk's bytes."""
    body = bytearray(await inner.get(chunk.object_key))
    body[chunk.position + position] ^= 1
    await inner.put(chunk.object_key, [bytes(body)])


async def kill_while_sealing(log: Broker) -> None:
    """Seal `t`; the sealer is killed between its commit to the table and its action in the WAL."""

    async def killed(*_: object, **__: object) -> None:
        raise Unavailable("killed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log._log.writer, "append", killed)
        with pytest.raises(Unavailable, match="killed"):
            await log.records.seal("t")


@contextlib.asynccontextmanager
async def closing(*logs: Broker) -> AsyncIterator[Broker]:
    """The first of the brokers; all are closed at the end of the block."""
    try:
        yield logs[0]
    finally:
        for log in logs:
            await log.close()


async def append(
    log: Broker,
    *values: str,
    partition: int = 0,
    timestamps: list[int] | None = None,
    topic: str = "t",
    acks: Acks = Acks.ALL,
) -> list[AppendedRange] | None:
    """One request to one partition."""
    part = rows(*values, timestamps=timestamps)
    size = sum(map(len, values))
    return await log.records.append(
        log.state.topic(topic), [(partition, part)], size=size, is_json=False, acks=acks
    )


async def read_table(
    log: Broker, *, partition: int = 0, offset: int = 0, bytes_max: int = 1 << 20, topic: str = "t"
) -> pa.Table:
    """Everything from `offset` on, fetch by fetch, until an answer is empty."""
    pieces: list[pa.RecordBatch] = []
    while True:
        fetched = await log.records.fetch(topic, partition, offset, bytes_max=bytes_max)
        if not fetched.pieces:
            # Further on than asked only where a compaction took all that was left.
            assert fetched.next_offset == fetched.high_watermark
            break
        pieces += [piece.batch for piece in fetched.pieces]
        assert fetched.next_offset > offset
        offset = fetched.next_offset
    return pa.Table.from_batches(pieces) if pieces else pa.table({"offset": [], "value": []})


async def read_values(log: Broker, **selection) -> list[str]:
    """The values of `read_table`; their offsets must be dense."""
    table = await read_table(log, **selection)
    offsets = table.column("offset").to_pylist()
    first = selection.get("offset", 0)
    assert offsets == list(range(first, first + len(offsets)))
    return [str(value or b"", "utf-8") for value in table.column("value").to_pylist()]


async def segments_of(log: Broker, partition: int = 0) -> list[SegmentFile]:
    table = await log._log.tables.of(log.state.topic("t"))
    await table.refresh()
    return list(await table.segments(partition))


async def rewrite(log: Broker, offsets: list[int]) -> None:
    """The one segment of `t`-0 without the other offsets, as a compaction commits it."""
    (file,) = await segments_of(log)
    prefix = log.state.topic("t").prefix
    batch = (await read_table(log)).take(offsets).combine_chunks().to_batches()
    written = segments.write(batch, codec="zstd", is_json=False)
    path = object_keys.segment(0, 0, 10, "abc")
    await log._log.store.create(f"{prefix}/{path}", [memoryview(written.body)])
    commits = store_of(log).tables[prefix]
    new = file._replace(path=path, size=written.size, rows=len(offsets))
    commits[1] = commits[1]._replace(files=(new,))
    assert commits[1].transactions == {seal_app_id(0): 10}
    log._log.tables.forget(log.state.topic("t").topic_id)  # the next read loads the manifest
