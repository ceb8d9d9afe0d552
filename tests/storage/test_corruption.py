"""One flipped bit in a stored object: each reader finds it and never serves it.

Small objects byte by byte, one bit of each; pure decoders bit by bit. A reader raises Corrupt, by
the object's name, or gives exactly what was written: if no reader uses the bit.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from tests.support.faults import _catalogs
from tests.support.logs import COLD, append, closing, opened, read_table, with_topic
from tidelog.storage.broker import Broker
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import record_columns
from tidelog.storage.codec import segment as segments
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.read.plan import SegmentRange, TailRange
from tidelog.storage.read.split_reader import SliceReader
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.wal import wal_objects

Read = Callable[[], Awaitable[Any]]
VALUES = ["a", "bb", '{"c":3}', "d" * 20]


class Flipping(MemoryStore):
    """The objects of `inner` as they are read from a disk on which one bit of one is wrong."""

    def __init__(self, inner: MemoryStore) -> None:
        super().__init__(now_ms=inner.now_ms)
        self._objects = inner._objects
        _catalogs[self] = _catalogs.setdefault(inner, {})
        self.key = ""
        self.byte = 0

    async def get(self, key: str) -> bytes:
        return self._as_read(key, await super().get(key), 0)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._as_read(key, await super().get_range(key, start, length), start)

    def _as_read(self, key: str, body: bytes, start: int) -> bytes:
        position = self.byte - start
        if key != self.key or not 0 <= position < len(body):
            return body
        return flipped(body, position * 8 + self.byte % 8)

    async def outcomes(self, key: str, read: Read, every: Iterable[int]) -> dict[int, Any]:
        """Return the outcome of `read` with each of these bytes of `key` wrong."""
        outcome_by_byte: dict[int, Any] = {}
        self.key = key
        for self.byte in every:
            try:
                outcome_by_byte[self.byte] = await read()
            except LogError as error:
                outcome_by_byte[self.byte] = error
        self.key = ""
        return outcome_by_byte


def flipped(body: bytes, bit: int) -> bytes:
    """One bit of it is wrong."""
    position = bit // 8
    return body[:position] + bytes([body[position] ^ 1 << bit % 8]) + body[position + 1 :]


def each_bit(body: bytes) -> Iterator[bytes]:
    return (flipped(body, bit) for bit in range(8 * len(body)))


async def with_both_tiers(inner: MemoryStore) -> tuple[str, Any]:
    """A topic of two partitions, a segment and two runs; the segment's key, partition 0's run."""
    async with closing(await with_topic(inner, partitions=2)) as log:
        await append(log, *VALUES)
        await log.records.seal("t", [0])
        await append(log, *VALUES)
        await append(log, *VALUES, partition=1)
        await log._log.wal.checkpoint()
        topic = log.state.topic("t")
        (key,) = [key for key in inner._objects if key.endswith(".parquet")]
        return key, topic.partitions[0].tail[0]


def size_of(store: MemoryStore, key: str) -> int:
    return len(store._objects[key][0])


def check_all(
    outcome_by_byte: dict[int, Any], key: str, right: Any, unread: Iterable[int] = ()
) -> None:
    """Corrupt with the place; or right, in bytes that no reader uses."""
    for byte, outcome in outcome_by_byte.items():
        if isinstance(outcome, Corrupt):
            assert outcome.key == key, byte
        else:
            assert byte in unread, byte
            assert outcome == right, byte


def unread_of(body: bytes, key: str) -> set[int]:
    """The bytes of a segment that no reader uses: its first magic, and the page index."""
    footer = segments.read_footer(body, len(body), key)
    covered = set(range(len(body) - segments.footer_length(body, key), len(body)))
    for group in footer.groups:
        covered.update(range(group.start, group.start + group.length))
    return set(range(len(body))) - covered


@pytest.mark.parametrize("is_sealed", [True, False])
async def test_flipped_bit_is_not_served(inner: MemoryStore, is_sealed: bool) -> None:
    key, tail_run = await with_both_tiers(inner)
    unread: Iterable[int] = ()
    places = range(tail_run.position, tail_run.position + tail_run.size)
    if is_sealed:
        body = inner._objects[key][0]
        places, unread = range(len(body)), unread_of(body, key)
    else:
        key = tail_run.object_key
    store = Flipping(inner)
    async with closing(await opened(store, COLD)) as cold:

        async def read() -> pa.Table:
            return await read_table(cold)

        right = await read()
        assert right.num_rows == 2 * len(VALUES)
        check_all(await store.outcomes(key, read, places), key, right, unread)
        await others_go_on(store, cold, key)


async def others_go_on(store: Flipping, log: Broker, key: str) -> None:
    """Partition 1 has nothing in the object, and is read."""
    store.key, store.byte = key, size_of(store, key) // 2
    with pytest.raises(Corrupt):
        await read_table(log)
    assert (await read_table(log, partition=1)).num_rows == len(VALUES)
    store.key = ""


async def test_sparks_reader_serves_no_flipped_bit(inner: MemoryStore) -> None:
    """The data source's executors read slices of segments and runs by themselves."""
    key, tail_run = await with_both_tiers(inner)
    store = Flipping(inner)
    columns = ["offset", "key", "value", "timestamp"]
    size, count = size_of(inner, key), len(VALUES)
    segment = SegmentRange("t", 0, False, key, size, 0, count, size)
    tail = TailRange(
        "t", 0, False, tail_run, tail_run.base_offset, tail_run.end_offset, tail_run.size
    )

    def reading(record_slice: Any) -> Read:
        async def read() -> list[dict[str, Any]]:
            fetched = await SliceReader(store).fetch(record_slice)
            return [row for batch in fetched.batches(columns) for row in batch.to_pylist()]

        return read

    right = await reading(segment)()
    assert [row["value"] for row in right] == [value.encode() for value in VALUES]
    body = inner._objects[key][0]
    outcome_by_byte = await store.outcomes(key, reading(segment), range(size))
    check_all(outcome_by_byte, key, right, unread_of(body, key))
    chunk = range(tail_run.position, tail_run.position + tail_run.size)
    outcome_by_byte = await store.outcomes(tail_run.object_key, reading(tail), chunk)
    check_all(outcome_by_byte, tail_run.object_key, await reading(tail)())


async def test_an_entry_with_a_flipped_bit_is_not_replayed(inner: MemoryStore) -> None:
    """Neither applied, nor taken for the end of the log: that would be to lose all after it.

    The copy of the header is used; without one, as at level 1, the entry is damaged.
    """
    await with_both_tiers(inner)
    numbers = [seq for key in inner._objects if (seq := object_keys.seq_of(key)) is not None]
    store = Flipping(inner)

    async def replay() -> bytes:
        for key in [key for key in inner._objects if key.startswith(object_keys.CHECKPOINTS)]:
            await inner.delete([key])
        async with closing(await opened(store, COLD)) as log:
            return log.state.encode()

    right = await replay()
    for seq in (1, 2, max(numbers)):
        key = object_keys.wal(seq)
        header = entries.header_length(inner._objects[key][0], key)
        outcome_by_byte = await store.outcomes(key, replay, range(header))
        check_all(outcome_by_byte, key, right, range(header))
        body = await inner.get(key)
        assert body[-12 - header : -12] == body[:header]
        await inner.put(key, [body[: -12 - header]])
        assert await replay() == right
        check_all(await store.outcomes(key, replay, range(header)), key, right)


async def test_a_checkpoint_with_a_flipped_bit_is_passed_over(inner: MemoryStore) -> None:
    await with_both_tiers(inner)
    store = Flipping(inner)

    async def load() -> bytes:
        async with closing(await opened(store, COLD)) as log:
            return log.state.encode()

    right = await load()
    key = max(key for key in inner._objects if key.startswith(object_keys.CHECKPOINTS))
    outcome_by_byte = await store.outcomes(key, load, range(0, size_of(inner, key), 7))
    assert all(outcome == right for outcome in outcome_by_byte.values())


# -- bit by bit


@pytest.fixture
async def both_tiers(inner: MemoryStore) -> MemoryStore:
    await with_both_tiers(inner)
    return inner


async def test_every_bit_of_a_checkpoint_counts(both_tiers: MemoryStore) -> None:
    key = max(key for key in both_tiers._objects if key.startswith(object_keys.CHECKPOINTS))
    body = both_tiers._objects[key][0]
    state = wal_objects.decode_checkpoint(body, key, "c0ffee")
    assert state.topics
    for wrong in each_bit(body):
        with pytest.raises(Corrupt):
            wal_objects.decode_checkpoint(wrong, key, "c0ffee")


async def test_every_bit_of_a_chunk_counts(both_tiers: MemoryStore) -> None:
    key = max(key for key in both_tiers._objects if key.startswith(object_keys.CHECKPOINTS))
    state = wal_objects.decode_checkpoint(both_tiers._objects[key][0], key, "c0ffee")
    tail_run = state.topic("t").partitions[0].tail[0]
    body = both_tiers._objects[tail_run.object_key][0][
        tail_run.position : tail_run.position + tail_run.size
    ]
    assert tail_run.decode(body).num_rows == tail_run.rows
    for wrong in each_bit(body):
        with pytest.raises(Corrupt):
            tail_run.decode(wrong)


def test_every_bit_of_a_segment_s_footer_counts() -> None:
    """Its statistics and places of pages with it: all that readers use of a footer."""
    rows = record_columns.Rows([5, 6], [b"k", None], [b"v", b"w"])
    batch = chunks.with_offsets(record_columns.batch_of_rows([rows]), 3)
    body = segments.write([batch], codec="zstd", is_json=False).body.to_pybytes()
    tail = body[-segments.footer_length(body, "s") :]
    for wrong in each_bit(tail):
        with pytest.raises(Corrupt):
            segments.read_footer(wrong, len(body), "s")
