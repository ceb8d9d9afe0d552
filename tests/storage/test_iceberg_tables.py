"""The Iceberg tables of brokers: what a load writes, and that brokers make the same snapshots."""

import asyncio
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.faults import FaultyStore
from tests.support.logs import (
    MANUAL,
    append,
    closing,
    kill_while_sealing,
    opened,
    read_values,
    store_of,
    with_topic,
)
from tidelog.storage import iceberg_tables
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import UnknownTopic
from tidelog.storage.core.log_settings import IcebergSettings
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.tables import iceberg, iceberg_avro
from tidelog.storage.tables.iceberg_avro import DELETED
from tidelog.storage.tables.manifest import SegmentColumns

EAGER = MANUAL._replace(iceberg=IcebergSettings(refresh_s=0))


@pytest.fixture
def inner() -> MemoryStore:
    return MemoryStore(now_ms=1_700_000_000_000)


async def keys_of(log: Broker) -> list[str]:
    folder = iceberg.folder(log.state.topic("t").prefix)
    return [info.key async for info in log._log.store.list(folder)]


async def seal(log: Broker, *values: str) -> None:
    await append(log, *values)
    await log.records.seal("t")


async def load(log: Broker) -> dict[str, Any]:
    return (await log.iceberg.load(log.state.topic("t"))).metadata


async def offsets_of(log: Broker, metadata: dict[str, Any]) -> list[tuple[int, int]]:
    """The offset ranges of the newest snapshot, read from its objects."""
    (newest,) = [
        snapshot
        for snapshot in metadata["snapshots"]
        if snapshot["snapshot-id"] == metadata["current-snapshot-id"]
    ]
    root = log._log.store.url

    async def read(uri: str) -> list[dict[str, Any]]:
        body = await log._log.store.get(uri.removeprefix(root))
        return iceberg_avro._records(body, uri)[1]

    entries = [
        entry
        for row in await read(newest["manifest-list"])
        for entry in await read(row["manifest_path"])
    ]
    paths = [entry["data_file"]["file_path"] for entry in entries if entry["status"] != DELETED]
    names = [path.rpartition("/")[2].split("-") for path in paths]
    return sorted((int(base), int(end)) for base, end, _ in names)


async def test_nothing_is_written_until_somebody_loads(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        for number in range(5):
            await seal(log, f"v{number}")
        await log.iceberg.load_planned(log.state.topic("t"))
        await log.iceberg.plan(log.state.topic("t"), None, None, 0, 10)
        assert await keys_of(log) == []
        metadata = await load(log)
        assert len(await keys_of(log)) == 2, "however many seals there were"
        assert await offsets_of(log, metadata) == [(n, n + 1) for n in range(5)]


async def test_loads_for_plans_compute_once_a_version(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions: list[int] = []
    real = iceberg.list_name

    def list_name(version: int, files: SegmentColumns, location: str) -> str:
        versions.append(version)
        return real(version, files, location)

    monkeypatch.setattr(iceberg, "list_name", list_name)
    async with closing(await with_topic(inner, EAGER)) as log:
        for number in range(2):
            await seal(log, f"v{number}")
            tables = [await log.iceberg.load_planned(log.state.topic("t")) for _ in range(3)]
            assert len(versions) == number + 1
            assert tables[0] == tables[2]
            assert tables[0].metadata["current-snapshot-id"] == versions[-1] + 1


async def test_unsealed_topic_has_empty_table(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        assert (await load(log))["current-snapshot-id"] == -1
        await append(log, "a")
        assert (await load(log))["snapshots"] == []
        planned = await log.iceberg.plan(log.state.topic("t"), None, None, 0, 10)
        assert planned is not None
        assert planned.files == []
        assert await keys_of(log) == []


async def test_loads_of_one_version_write_once(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        await seal(log, "a")
        first, *others = await asyncio.gather(*(load(log) for _ in range(5)))
        assert all(metadata == first for metadata in others)
        assert len(await keys_of(log)) == 2


async def test_loads_within_refresh_time_get_last_snapshot(inner: MemoryStore) -> None:
    settings = MANUAL._replace(iceberg=IcebergSettings(refresh_s=10))
    async with closing(await with_topic(inner, settings)) as log:
        await seal(log, "a")
        first = await load(log)
        await seal(log, "b")
        await asyncio.sleep(9)
        assert await load(log) == first
        assert len(await keys_of(log)) == 2
        await asyncio.sleep(1)
        assert (await load(log))["current-snapshot-id"] > first["current-snapshot-id"]
        assert len(await keys_of(log)) == 4


async def test_other_broker_and_next_one_continue_chain(inner: MemoryStore) -> None:
    log = await with_topic(inner, EAGER)
    other = await opened(inner, EAGER)
    async with closing(log, other):
        await seal(log, "a")
        first = await load(log)
        await other.refresh()
        assert await load(other) == first
        assert len(await keys_of(log)) == 2, "the other broker found them"
        await seal(log, "b")
        await asyncio.sleep(1)
        second = await load(other)
        assert [one["snapshot-id"] for one in second["snapshots"]] == [2, 3]
        assert second["snapshots"][1]["parent-snapshot-id"] == 2
        assert await load(log) == second
        assert len(await keys_of(log)) == 4
    async with closing(await opened(inner, EAGER)) as log:
        assert await load(log) == second
        await seal(log, "c")
        assert await offsets_of(log, await load(log)) == [(0, 1), (1, 2), (2, 3)]


async def test_brokers_that_load_at_once_agree(inner: MemoryStore) -> None:
    log = await with_topic(inner, EAGER)
    other = await opened(inner, EAGER)
    async with closing(log, other):
        await seal(log, "a", "b")
        await other.refresh()
        store_of(log).latency = store_of(other).latency = lambda _: 0.05
        left, right = await asyncio.gather(load(log), load(other))
        assert left == right
        assert len(await keys_of(log)) == 2


async def test_stale_broker_follows_newer_snapshot(inner: MemoryStore) -> None:
    """A broker whose manifest is older than a stored snapshot loads it again."""
    log = await with_topic(inner, EAGER)
    stale = await opened(inner, MANUAL)
    async with closing(log, stale):
        await seal(log, "a")
        await stale.refresh()
        await stale._log.tables.of(stale.state.topic("t"), age_max_s=0)
        await seal(log, "b")
        newest = await load(log)
        assert await load(stale) == newest
        assert len(await keys_of(log)) == 2


async def test_crash_before_manifest_list_leaves_no_snapshot(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        await seal(log, "a")
        first = await load(log)
        await seal(log, "b")
        real = FaultyStore.create

        async def dies(self: FaultyStore, key: str, parts: Any) -> Any:
            if "/snap-" in key:
                raise asyncio.CancelledError
            return await real(self, key, parts)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FaultyStore, "create", dies)
            with pytest.raises(asyncio.CancelledError):
                await load(log)
        assert len(await keys_of(log)) == 3
    async with closing(await opened(inner, EAGER)) as log:
        metadata = await load(log)
        assert len(metadata["snapshots"]) == len(first["snapshots"]) + 1
        assert len(await keys_of(log)) == 4, "the manifest has the same name again"
        assert await offsets_of(log, metadata) == [(0, 1), (1, 2)]


async def test_unreadable_manifest_begins_again(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        await seal(log, "a")
        await load(log)
    for key in [info.key async for info in inner.list("topics/")]:
        if "/iceberg/manifest-" in key:
            await inner.delete([key])
    async with closing(await opened(inner, EAGER)) as log:
        await seal(log, "b")
        metadata = await load(log)
        assert len(metadata["snapshots"]) == 1
        assert await offsets_of(log, metadata) == [(0, 1), (1, 2)]
        assert await read_values(log) == ["a", "b"]


async def test_time_of_snapshot_is_that_of_commit(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        await seal(log, "a")
        committed_ms = inner.now_ms
        inner.now_ms += 5_000_000
        (snapshot,) = (await load(log))["snapshots"]
        assert snapshot["timestamp-ms"] == committed_ms


async def test_plan_of_older_snapshot(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        topic = log.state.topic("t")
        for value in "abc":
            await seal(log, value)
        for snapshot_id, count in ((2, 1), (3, 2), (4, 3), (None, 3)):
            planned = await log.iceberg.plan(topic, snapshot_id, None, 0, 10)
            assert planned is not None
            assert len(planned.files) == count
        for unknown in (5, 0, -1, 2**62):
            assert await log.iceberg.plan(topic, unknown, None, 0, 10) is None
        page = await log.iceberg.plan(topic, None, None, 1, 1)
        assert page is not None
        assert ([file.base_offset for file in page.files], page.has_more) == ([1], True)


async def test_deleted_topic_is_forgotten(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, EAGER)) as log:
        await seal(log, "a")
        await load(log)
        await log.topics.delete("t")
        with pytest.raises(UnknownTopic):
            log.state.topic("t")
        await log.topics.create("u", 1, {})
        await log.iceberg.load(log.state.topic("u"))
        assert list(log.iceberg._tables) == [log.state.topic("u").topic_id]


# -- with the tail

ACKED = MANUAL._replace(iceberg=IcebergSettings(refresh_s=0, has_tail=True))


async def rows_of(log: Broker, metadata: dict[str, Any]) -> list[tuple[int, int]]:
    """Partition and offset of each record of the newest snapshot, from its objects."""
    newest = metadata["snapshots"][-1]
    assert newest["snapshot-id"] == metadata["current-snapshot-id"]
    root = log._log.store.url

    async def get(uri: str) -> bytes:
        return await log._log.store.get(uri.removeprefix(root))

    rows: list[tuple[int, int]] = []
    for row in iceberg_avro._records(await get(newest["manifest-list"]), "list")[1]:
        for entry in iceberg_avro._records(await get(row["manifest_path"]), "manifest")[1]:
            if entry["status"] == DELETED:
                continue
            data = entry["data_file"]
            body = await get(data["file_path"])
            assert len(body) == data["file_size_in_bytes"]
            records = pq.ParquetFile(pa.BufferReader(body)).read()
            assert records.num_rows == data["record_count"]
            offsets = records.column("offset").to_pylist()
            if row["partition_spec_id"] == 0:
                partitions = [data["partition"]["partition"]] * len(offsets)
            else:
                partitions = records.column("partition").to_pylist()
            rows += zip(partitions, offsets, strict=True)
    assert newest["summary"]["total-records"] == str(len(rows))
    return sorted(rows)


async def test_load_has_records_up_to_last_ack(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, ACKED, partitions=3)) as log:
        expected: list[tuple[int, int]] = []
        ends = [0, 0, 0]
        for number in range(12):
            partition = number % 2
            await append(log, "a", "b", partition=partition)
            expected += [(partition, ends[partition]), (partition, ends[partition] + 1)]
            ends[partition] += 2
            if number in (3, 7):
                await log.records.seal("t", [number % 4 // 3])
            await asyncio.sleep(1)
            assert await rows_of(log, await load(log)) == sorted(expected), number
        await log.records.seal("t")
        metadata = await load(log)
        assert await rows_of(log, metadata) == sorted(expected)
        assert metadata["current-snapshot-id"] < 2**62, "there is no tail"


async def test_tail_of_unsealed_topic_and_no_second_write(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, ACKED)) as log:
        assert (await load(log))["snapshots"] == []
        await append(log, "a", "b")
        metadata = await load(log)
        assert await rows_of(log, metadata) == [(0, 0), (0, 1)]
        (snapshot,) = metadata["snapshots"]
        assert snapshot["timestamp-ms"] == inner.now_ms
        assert len(await keys_of(log)) == 3
        assert await load(log) == metadata
        await log.topics.create("u", 1, {})  # another number of the WAL, the same tail
        assert await load(log) == metadata
        assert len(await keys_of(log)) == 3


async def test_tail_while_table_is_ahead_of_wal_has_no_record_twice(inner: MemoryStore) -> None:
    log = await with_topic(inner, ACKED)
    await append(log, "a", "b")
    await kill_while_sealing(log)
    await append(log, "c")
    async with closing(log):
        assert log.state.topic("t").partitions[0].sealed_end == 0
        assert await rows_of(log, await load(log)) == [(0, 0), (0, 1), (0, 2)]


async def test_large_tail_is_sealed_instead(
    inner: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with closing(await with_topic(inner, ACKED)) as log:
        await append(log, "a" * 1000, "b" * 1000)
        for limit in (1500, 10):
            monkeypatch.setattr(iceberg_tables, "TAIL_BYTES_MAX", limit)
            await append(log, "c" * 1000, "d" * 1000)
            metadata = await load(log)
            assert (
                len(await rows_of(log, metadata)) == log.state.topic("t").partitions[0].sealed_end
            )
            assert not [key for key in await keys_of(log) if "/tail-" in key]
