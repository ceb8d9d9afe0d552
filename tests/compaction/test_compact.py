"""Merging and key compaction on whole logs, against the plainest model; crashes, races, readers."""

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.faults import FaultyStore
from tests.support.logs import (
    COLD,
    MANUAL,
    append,
    closing,
    opened,
    read_table,
    read_values,
    segments_of,
)
from tests.support.maintenance import assert_clean, caring, cluster_on, log_with, way_of
from tests.support.properties import examples
from tests.support.records import TIME_MS
from tidelog.compaction import commit_rewrites
from tidelog.compaction.compact import COMPACT, MERGE, SKIP, Compacted, compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.in_process_engine import InProcess
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.newest_per_key import Latest, of_ranks, of_shares
from tidelog.compaction.retention import retain
from tidelog.storage.broker import Broker
from tidelog.storage.codec.record_columns import RECORD_SCHEMA, Rows
from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.read.reader import REFRESH_S
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables.memory import MemoryManifest

HOUR_MS = 3_600_000
GRACE = Grace(wal_ms=HOUR_MS, table_ms=4 * HOUR_MS)

Record = tuple[bytes | None, bytes | None]


async def compacting(inner: MemoryStore, **configs: str) -> Broker:
    log = await opened(inner, COLD)
    named = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"}
    named |= {name.replace("_", "."): value for name, value in configs.items()}
    inner.now_ms = TIME_MS
    await log.topics.create("t", 1, named)
    return log


async def write(log: Broker, records: list[Record], *, is_sealed: bool = True) -> None:
    """One segment of these."""
    await log.refresh()  # the broker learns the store's time, which bounds timestamps
    stamps = [log._log.store.now_ms + i for i in range(len(records))]
    part = Rows(stamps, [key for key, _ in records], [value for _, value in records])
    await log.records.append(log.state.topic("t"), [(0, part)], size=100, is_json=False)
    if is_sealed:
        await log.records.seal("t")


async def records(log: Broker) -> list[tuple[int, bytes | None, bytes | None]]:
    await segments_of(log)  # a broker goes on with the manifest it has, as long as it can
    table = (await read_table(log)).to_pylist()
    return [(row["offset"], row["key"], row["value"]) for row in table]


async def cleaned(inner: MemoryStore, *, is_dry: bool = False) -> list[Compacted]:
    async with caring(inner) as cluster:
        return await compact(cluster, None, is_dry=is_dry)


def kv(*pairs: str) -> list[Record]:
    """`a1` is key a, value 1; `a-` a tombstone; `-1` no key."""
    return [
        (
            None if pair[0] == "-" else pair[0].encode(),
            None if pair[1:] == "-" else pair[1:].encode(),
        )
        for pair in pairs
    ]


# -- key compaction


async def test_the_newest_record_of_each_key_stays_where_it_was(inner: MemoryStore) -> None:
    async with closing(await compacting(inner)) as log:
        await write(log, kv("a1", "b1", "a2"))
        await write(log, kv("c1", "b2", "-9"))
        await write(log, kv("d1", "a3"))
        await write(log, kv("d2", "c2"), is_sealed=False)
        planned = await cleaned(inner, is_dry=True)
        assert len(await segments_of(log)) == 3
        (result,) = await cleaned(inner)
        assert planned[0].what == result.what == COMPACT
        assert (result.segments, result.rows) == (3, 8)
        assert (result.segments_after, result.rows_after) == (1, 5)
        expected = [(3, b"c", b"1"), (4, b"b", b"2"), (5, None, b"9"), (6, b"d", b"1")]
        expected += [(7, b"a", b"3"), (8, b"d", b"2"), (9, b"c", b"2")]
        assert await records(log) == expected
        (file,) = await segments_of(log)
        assert (file.base_offset, file.end_offset, file.rows) == (0, 8, 5)
        # The tail is not looked at, and nothing is new.
        assert await cleaned(inner) == []
        await assert_clean(inner, GRACE)
        await log.records.seal("t")
        (result,) = await cleaned(inner)
        assert await records(log) == [expected[1], expected[2], *expected[4:]]
        await assert_clean(inner, GRACE)


async def test_tombstone_stays_for_delete_retention_ms(inner: MemoryStore) -> None:
    async with closing(await compacting(inner, delete_retention_ms=str(24 * HOUR_MS))) as log:
        await write(log, kv("a1", "b1"))
        await write(log, kv("a-", "c1"))
        inner.now_ms += 100 * HOUR_MS  # its own age does not count
        await cleaned(inner)
        assert await records(log) == [(1, b"b", b"1"), (2, b"a", None), (3, b"c", b"1")]
        for hours, has_tombstone in ((10, True), (13, True), (1, False), (1, False)):
            inner.now_ms += hours * HOUR_MS
            await write(log, kv("c2"))
            await cleaned(inner)
            pairs = [(key, value) for _, key, value in await records(log)]
            assert ((b"a", None) in pairs) is has_tombstone, hours
            assert len(pairs) == 2 + has_tombstone
            await assert_clean(inner, GRACE)


async def test_where_nothing_would_stay_the_newest_does(inner: MemoryStore) -> None:
    async with closing(await compacting(inner, delete_retention_ms="0")) as log:
        await write(log, kv("a1", "a-"))
        await cleaned(inner)
        assert await records(log) == [(1, b"a", None)]
        await write(log, kv("b-"))
        await cleaned(inner)
        assert await records(log) == [(2, b"b", None)]
        await write(log, kv("b1"))
        await cleaned(inner)
        assert await records(log) == [(3, b"b", b"1")]
        await assert_clean(inner, GRACE)


async def test_what_is_younger_than_min_compaction_lag_ms_is_safe(inner: MemoryStore) -> None:
    async with closing(await compacting(inner, min_compaction_lag_ms=str(HOUR_MS))) as log:
        await write(log, kv("a1", "b1"))
        await write(log, kv("a2", "b2"))
        inner.now_ms += HOUR_MS // 2
        await write(log, kv("a3", "b3"))
        inner.now_ms += HOUR_MS // 2 - 100
        assert await cleaned(inner) == []
        inner.now_ms += 200
        await cleaned(inner)
        assert [offset for offset, _, _ in await records(log)] == [2, 3, 4, 5]


async def test_the_dirty_ratio_says_when(inner: MemoryStore) -> None:
    async with closing(await compacting(inner, min_cleanable_dirty_ratio="0.5")) as log:
        await write(log, [(bytes([i]), b"x" * 100) for i in range(100)])
        assert len(await cleaned(inner)) == 1
        await write(log, kv("a1"))
        assert await cleaned(inner) == []
        async with caring(inner) as cluster:
            assert len(await compact(cluster, ["t"], is_dry=True, is_forced=True)) == 1
        await write(log, [(bytes([i]), b"y" * 110) for i in range(100)])
        assert len(await cleaned(inner)) == 1
        assert len(await records(log)) == 100  # `a` is one of the hundred


async def test_a_dirty_ratio_that_equals_the_config_is_not_due(inner: MemoryStore) -> None:
    """As in Kafka's cleaner: the ratio must be over `min.cleanable.dirty.ratio`."""
    async with closing(await compacting(inner, min_cleanable_dirty_ratio="1")) as log:
        await write(log, kv("a1", "a2"))
        assert await cleaned(inner) == []
        async with caring(inner) as cluster:
            (forced,) = await compact(cluster, ["t"], is_dry=True, is_forced=True)
        assert forced.why == "dirty ratio 1.00"


@st.composite
def histories(draw: st.DrawFn) -> list[list[Record]]:
    """Segments of records of few keys."""
    key = st.sampled_from([b"a", b"b", b"c", b"d", None])
    value = st.sampled_from([b"1", b"22", None])
    return draw(
        st.lists(st.lists(st.tuples(key, value), min_size=1, max_size=6), min_size=1, max_size=7)
    )


def latest_of(everything: list[tuple[int, bytes | None, bytes | None]]) -> list:
    newest = {key: offset for offset, key, _ in everything}
    return [record for record in everything if record[1] is None or newest[record[1]] == record[0]]


@examples(60)
@given(histories(), st.sampled_from([1024, 4200, 100_000]), st.randoms())
async def test_any_history_is_its_newest_records(
    history: list[list[Record]], target: int, draws: random.Random
) -> None:
    """With compactions anywhere in between, and reads from every offset."""
    inner = MemoryStore()
    async with closing(await compacting(inner, target_segment_bytes=str(target))) as log:
        everything = []
        offset = 0
        for part in history:
            await write(log, part)
            for key, value in part:
                everything.append((offset, key, value))
                offset += 1
            if draws.random() < 0.5:
                await cleaned(inner)
        await cleaned(inner)
        expected = latest_of(everything)
        assert await records(log) == expected
        files = await segments_of(log)
        assert [file.base_offset for file in files[1:]] == [f.end_offset for f in files[:-1]]
        assert (files[0].base_offset, files[-1].end_offset) == (0, offset)
        for first in range(offset):
            offsets = (await read_table(log, offset=first)).column("offset").to_pylist()
            assert offsets == [
                record_offset for record_offset, _, _ in expected if record_offset >= first
            ]
        await assert_clean(inner, GRACE)


@examples(100)
@given(histories(), st.integers(0, 30), st.sampled_from([1, 60, 10_000]))
def test_latest_of_each_key(history: list[list[Record]], expires: int, fold_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tidelog.compaction.newest_per_key.FOLD_BYTES_MIN", fold_bytes)
        latest, parts = Latest(expires), []
        shares = [Latest(expires, share=share, shares=3) for share in range(3)]
        everything = []
        for part in history:
            first = len(everything)
            everything += [(first + i, key, value) for i, (key, value) in enumerate(part)]
            batch = pa.RecordBatch.from_pylist(
                [
                    {"offset": offset, "timestamp": 0, "key": key, "value": value}
                    for offset, key, value in everything[first:]
                ],
                schema=RECORD_SCHEMA,
            )
            for latest_keys in (latest, *shares):
                latest_keys.add(latest_keys.see(batch))
            part_of_it = Latest(expires)
            part_of_it.add(part_of_it.see(batch))
            parts.append(part_of_it.take_ranks())
        expected = [
            offset
            for offset, key, value in latest_of(everything)
            if key is None or value is not None or offset >= expires
        ]
        ranks = pa.concat_tables(parts).group_by(["key", "alone"]).aggregate([("rank", "max")])
        for kept_offsets in (
            of_shares([latest.kept()]),
            of_shares([share.kept() for share in shares]),
            of_ranks(ranks.column("rank_max").to_numpy()),
        ):
            assert kept_offsets.dtype == np.int64
            assert kept_offsets.tolist() == (expected or [everything[-1][0]])


def test_a_key_is_the_same_whatever_other_keys_come_with_it() -> None:
    """Keys of all lengths, with beginnings and ends in common, alone and in company."""
    keys = [b"x" * length + end for length in range(90) for end in (b"", b"y", b"yx")]
    draws = random.Random(1)
    latest, offset = Latest(), 0
    newest: dict[bytes, int] = {}
    schema = pa.schema({"offset": pa.int64(), "key": pa.binary()})
    for size in [1, 3, 70, len(keys), 2, 200, 1]:
        sample = draws.sample(keys, size)
        newest |= {key: offset + i for i, key in enumerate(sample)}
        rows = [{"offset": offset + i, "key": key} for i, key in enumerate(sample)]
        batch = pa.RecordBatch.from_pylist([{"offset": -1, "key": b"cut off"}, *rows], schema)
        latest.add(latest.see(batch.slice(1)))
        offset += size
    assert len(newest) == len(keys)
    assert of_shares([latest.kept()]).tolist() == sorted(newest.values())


# -- merging


async def test_small_neighbours_become_one_segment(inner: MemoryStore) -> None:
    values = [[f"{i}a", f"{i}b"] for i in range(6)]
    async with closing(await log_with(inner, values, partitions=2)) as log:
        old_table = await read_table(log)
        results = await cleaned(inner)
        assert [(result.what, result.segments, result.segments_after) for result in results] == [
            (MERGE, 6, 1)
        ] * 2
        assert [result.rows_after for result in results] == [12, 12]
        (file,) = await segments_of(log)
        assert (file.base_offset, file.end_offset, file.rows) == (0, 12, 12)
        assert (await read_table(log)).equals(old_table)
        assert await cleaned(inner) == []
        await append(log, "tail")
        await log.records.seal("t")
        assert await read_values(log) == [*itertools.chain(*values), "tail"]
        await assert_clean(inner, GRACE)


async def test_a_broker_that_has_it_all_in_memory_reads_what_is_left(inner: MemoryStore) -> None:
    """At once what it holds of the tail, and within REFRESH_S what its manifest says."""
    async with closing(await opened(inner, MANUAL)) as log:
        inner.now_ms = TIME_MS
        await log.topics.create("t", 1, {"cleanup.policy": "compact"})
        await write(log, kv("a1", "b1"))
        await write(log, kv("a2", "b2", "c1"))
        await write(log, kv("c2"), is_sealed=False)
        assert len(await read_values(log)) == 6
        await cleaned(inner)
        await asyncio.sleep(REFRESH_S + 1)
        offsets = (await read_table(log)).column("offset").to_pylist()
        assert offsets == [2, 3, 4, 5]


# -- together


async def due(inner: MemoryStore) -> tuple[Broker, list]:
    log = await compacting(inner, retention_ms="-1")
    everything = []
    for i in range(5):
        part = kv(f"a{i}", f"b{i}", f"{'cdefg'[i]}{i}")
        everything += [(3 * i + j, key, value) for j, (key, value) in enumerate(part)]
        await write(log, part)
    return log, latest_of(everything)


async def test_i7_a_reader_in_the_middle_sees_no_gap_and_nothing_twice() -> None:
    for step in range(1, 8):
        inner = MemoryStore()
        log, expected = await due(inner)
        reader = await opened(inner, COLD)
        way = reader._log.store
        assert isinstance(way, FaultyStore)
        remaining_reads = step
        gates: asyncio.Queue = asyncio.Queue()

        def plan(call, way=way, gates=gates) -> None:
            nonlocal remaining_reads
            remaining_reads -= call.verb == "get_range"
            if remaining_reads == 0 and call.verb == "get_range":
                remaining_reads -= 1
                gates.put_nowait(way.hold("get_range", call.key))

        way.plan = plan
        reading = asyncio.create_task(records(reader))
        gate = await gates.get()
        await gate.reached.wait()
        inputs = [f"{log.state.topic('t').prefix}/{f.path}" for f in await segments_of(log)]
        await cleaned(inner)
        await inner.delete(inputs)  # later than any grace
        gate.opened.set()
        rows = await reading
        offsets = [offset for offset, _, _ in rows]
        assert offsets == sorted(set(offsets))
        assert set(expected) <= set(rows)
        async with closing(log, reader):
            assert await records(reader) == expected


@pytest.mark.parametrize("seed", range(12))
async def test_compactors_and_retention_agree(inner: MemoryStore, seed: int) -> None:
    log, expected = await due(inner)
    draws = random.Random(seed)
    clusters = [await cluster_on(inner) for _ in range(4)]
    for cluster in clusters:
        way_of(cluster).latency = lambda _: draws.choice([0.001, 0.05, 0.3])

    async def later(cluster: MaintenanceSession) -> list[Compacted]:
        await asyncio.sleep(draws.uniform(0, 1))
        return await compact(cluster, None, is_dry=False)

    async with closing(log):
        results, other_results, _, _ = await asyncio.gather(
            later(clusters[0]),
            later(clusters[1]),
            delete_records(clusters[2], "t", {0: 5}, is_dry=False),
            retain(clusters[3], None, is_dry=False),
        )
        await log._log.wal.refresh()
        await cleaned(inner)
        await segments_of(log)
        offsets = (await read_table(log, offset=5)).column("offset").to_pylist()
        assert offsets == [offset for offset, _, _ in expected if offset >= 5]
        await assert_clean(inner, GRACE)
        keys = [info.key async for info in inner.list(object_keys.TOPICS)]
        if all(result.is_lost for result in (*results, *other_results)):
            assert keys
    for cluster in clusters:
        await cluster.close()


# -- old uploads and other engines


VALUES = [["a"], ["b"], ["c"], ["d"], ["e"]]


async def test_i9_old_upload_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = InProcess.write

    async def slow(self: InProcess, *arguments: Any) -> Any:
        written = await real(self, *arguments)
        await asyncio.sleep(commit_rewrites.UPLOAD_AGE_MAX_S + 1)
        return written

    monkeypatch.setattr(InProcess, "write", slow)
    inner = MemoryStore()
    log = await log_with(inner, VALUES)
    table = await log._log.tables.of(log.state.topic("t"))
    await table.refresh()
    old_version = table.version
    async with caring(inner) as cluster:
        with pytest.raises(Unavailable, match="hours"):
            await compact(cluster, None, is_dry=False)
    await table.refresh()
    assert table.version == old_version
    assert await read_values(log) == ["a", "b", "c", "d", "e"]
    await log.close()


async def test_i9_late_commit_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MemoryManifest.replace
    is_first = True

    async def late(
        self: MemoryManifest, removed: Any, added: Any, *arguments: Any, **named: Any
    ) -> Any:
        nonlocal is_first
        if is_first:  # suspended before its commit; collection runs meanwhile
            is_first = False
            await asyncio.sleep(commit_rewrites.UPLOAD_AGE_MAX_S + 1)
            prefix = self._prefix
            await inner.delete([f"{prefix}/{file.path}" for file in added])
        await real(self, removed, added, *arguments, **named)

    inner = MemoryStore()
    log = await log_with(inner, VALUES)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryManifest, "replace", late)
        async with caring(inner) as cluster:
            with pytest.raises(Unavailable, match="suspended"):
                await compact(cluster, None, is_dry=False)
    assert await read_values(log) == ["a", "b", "c", "d", "e"]
    await log.close()


@pytest.mark.parametrize("keys_bytes_max", [400, 4000])
async def test_many_keys_are_read_in_shares(inner: MemoryStore, keys_bytes_max: int) -> None:
    log = await compacting(inner)
    draws = random.Random(1)
    async with closing(log):
        everything: list = []
        for _ in range(3):
            part: list[Record] = [
                (b"k%d" % draws.randrange(80) if i % 9 else None, b"%d" % i) for i in range(90)
            ]
            first = len(everything)
            everything += [(first + i, key, value) for i, (key, value) in enumerate(part)]
            await write(log, part)
        async with caring(inner) as cluster:
            engine = InProcess(cluster.store, cluster.clock, keys_bytes_max)
            await compact(cluster, None, is_dry=False, engine=engine)
        assert await records(log) == latest_of(everything)
        await assert_clean(inner, GRACE)


async def test_a_partition_with_damage_keeps_no_other_from_its_turn(inner: MemoryStore) -> None:
    log = await log_with(inner, [[f"{i}a", f"{i}b"] for i in range(6)], partitions=3)
    async with closing(log), caring(inner) as cluster:
        topic = log.state.topic("t")
        table = await cluster.table(topic)
        damaged = (await table.segments(1))[2]
        body = bytearray(await inner.get(f"{topic.prefix}/{damaged.path}"))
        body[40] ^= 1
        await inner.put(f"{topic.prefix}/{damaged.path}", [bytes(body)])
        results = await compact(cluster, None, is_dry=False)
        assert [(result.what, result.is_damaged) for result in results] == [
            (MERGE, False),
            (SKIP, True),
            (MERGE, False),
        ]
        assert damaged.path in results[1].why
        await table.refresh()
        assert [len(await table.segments(number)) for number in range(3)] == [1, 6, 1]


class Overtaken(InProcess):
    """Something happens between the writing and the commit."""

    def __init__(
        self, cluster: MaintenanceSession, meanwhile: Callable[[], Awaitable[object]]
    ) -> None:
        super().__init__(cluster.store, cluster.clock)
        self._meanwhile = meanwhile

    async def write(self, tasks, on_rows) -> list[SegmentFile]:
        files = await super().write(tasks, on_rows)
        await self._meanwhile()
        return files


@pytest.mark.parametrize(("start", "is_lost"), [(0, False), (2, False), (4, True)])
async def test_other_retention_costs_no_work(inner: MemoryStore, start: int, is_lost: bool) -> None:
    """The first segment is large: it is none of those that are merged."""
    draws = random.Random(1)
    large = ["".join(chr(draws.randrange(32, 127)) for _ in range(3000)) for _ in range(2)]
    values = [large, *([f"{i}a", f"{i}b"] for i in range(6))]
    log = await log_with(inner, values, retention_ms="-1", target_segment_bytes="9000")
    async with closing(log), caring(inner) as cluster:

        async def retained() -> None:
            async with caring(inner) as other:
                await delete_records(other, "t", {0: start}, is_dry=False)

        engine = Overtaken(cluster, retained)
        (result,) = await compact(cluster, None, is_dry=False, engine=engine)
        assert (result.segments, result.is_lost) == (6, is_lost)
        await segments_of(log)
        await log._log.wal.refresh()
        log_values = await read_values(log, offset=start)
        assert log_values == [*itertools.chain(*values)][start:]
        await assert_clean(inner, GRACE)
