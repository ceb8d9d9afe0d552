"""Damaged objects of the WAL: which records are lost, and what a repair does (DESIGN 8)."""

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from tests.support.broker import tidelog
from tests.support.instances import joined, read, started
from tests.support.logs import (
    COLD,
    append,
    closing,
    kill,
    kill_while_sealing,
    opened,
    read_table,
    read_values,
    store_of,
    with_topic,
)
from tests.support.loop_brokers import Acked, broker, given, held, produce
from tests.support.maintenance import caring
from tests.support.records import found_cluster
from tests.support.views import flip
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.repair_wal import damage_of, delete_strays, drop_after, lost_records, strays
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.compaction.scrub_checks import FindingKind
from tidelog.compaction.upgrade import raise_level
from tidelog.storage.broker import Broker
from tidelog.storage.cluster.liveness import MembershipSettings
from tidelog.storage.codec.entry import header_length
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import (
    Corrupt,
    DamagedRecords,
    InvalidRequest,
    LogError,
    Unavailable,
)
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore

PARTITIONS = 2
BROKERS = MembershipSettings()


async def scrubbed(inner: MemoryStore) -> ScrubReport:
    async with caring(inner, report_damage=False) as cluster:
        return await scrub(cluster, None, Grace())


async def written(inner: MemoryStore, *, requests: int = 4) -> Broker:
    """Topic `t` with a tail in each partition: one chunk for each request."""
    log = await with_topic(inner, COLD, partitions=PARTITIONS)
    for number in range(requests):
        for partition in range(PARTITIONS):
            await append(log, f"a{number}" * 9, f"b{number}" * 9, partition=partition)
    return log


async def spoil_chunk(inner: MemoryStore, log: Broker, *numbers: int, partition: int = 0) -> None:
    for number in numbers:
        run_ = log.state.partition("t", partition).tail[number]
        body = await inner.get(run_.object_key)
        await inner.put(run_.object_key, [flip(body, run_.position + run_.size - 3)])


async def spoil_entry(inner: MemoryStore, seq: int) -> None:
    """Both copies of its header are damaged."""
    body = await inner.get(object_keys.wal(seq))
    copy = len(body) - 12 - header_length(body, object_keys.wal(seq))
    await inner.put(object_keys.wal(seq), [flip(flip(body, 40), copy + 40)])


async def offsets(log: Broker, partition: int = 0, first: int = 0) -> list[int]:
    table: pa.Table = await read_table(log, partition=partition, offset=first)
    return table.column("offset").to_pylist()


async def test_a_fetch_at_damage_names_the_offsets_and_where_to_go_on(inner: MemoryStore) -> None:
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 1)
        for offset in (2, 3):
            with pytest.raises(DamagedRecords, match=r"offsets 2 to 3 of t-0 .* from 4 on") as it:
                await log.records.fetch("t", 0, offset, bytes_max=1000)
            assert (it.value.offset, it.value.end_offset) == (2, 4)
        assert await offsets(log, first=4) == [4, 5, 6, 7]
        fetched = await log.records.fetch("t", 0, 0, bytes_max=10_000)
        assert [
            offset for piece in fetched.pieces for offset in piece.batch["offset"].to_pylist()
        ] == [0, 1]
        assert fetched.next_offset == 2


async def test_seal_ends_at_damage_until_repair(inner: MemoryStore) -> None:
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 1)
        for _ in range(2):
            with pytest.raises(DamagedRecords):
                await log.records.seal("t")
            ends = [partition.sealed_end for partition in log.state.topic("t").partitions]
            assert ends == [2, 8]
        assert not (await scrubbed(inner)).is_whole
        async with caring(inner) as cluster:
            for is_dry in (True, False):
                lost_ranges = await lost_records(cluster, None, is_dry=is_dry)
                assert [lost_range[:4] for lost_range in lost_ranges] == [("t", 0, 2, 4)]
            assert await lost_records(cluster, None, is_dry=True) == []
        await log.refresh()
        assert await offsets(log) == [0, 1, 4, 5, 6, 7]
        report = await scrubbed(inner)
        assert report.is_whole
        assert [
            finding.where for finding in report.findings if finding.kind == FindingKind.LOST
        ] == ["t-0"]
        assert await log.records.seal("t") == 4
        assert log.state.partition("t", 0).sealed_end == 8
        assert await offsets(log) == [0, 1, 4, 5, 6, 7]
        assert (await scrubbed(inner)).is_whole
        async with closing(await opened(inner, COLD)) as other:
            assert await offsets(other) == [0, 1, 4, 5, 6, 7]
            assert (await other.records.fetch("t", 0, 3, bytes_max=1)).next_offset == 5


async def test_damaged_tail_is_named_until_it_is_sealed(inner: MemoryStore) -> None:
    """After delete-records beyond the damage, the partition is sealed."""
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 1)
        assert log.stored.damaged_tails() == {}
        with pytest.raises(DamagedRecords):
            await log.records.seal("t")
        ((topic_partition, why),) = log.stored.damaged_tails().items()
        assert topic_partition == ("t", 0)
        assert log.state.partition("t", 0).tail[0].object_key in why
        async with caring(inner) as cluster:
            await delete_records(cluster, "t", {0: 8}, is_dry=False)
        await log.refresh()
        await append(log, "after")
        await log.records.seal("t")
        assert log.stored.damaged_tails() == {}
        assert log.state.partition("t", 0).sealed_end == 9
        assert await read_values(log, offset=8) == ["after"]


async def test_lost_records_at_end_are_sealed_with_next_ones(inner: MemoryStore) -> None:
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 0, 1, 2, 3)
        async with caring(inner) as cluster:
            lost_ranges = await lost_records(cluster, ["t"], is_dry=False)
        ranges = [(lost_range.offset, lost_range.end_offset) for lost_range in lost_ranges]
        assert ranges == [(0, 2), (2, 4), (4, 6), (6, 8)]
        await log.refresh()
        fetched = await log.records.fetch("t", 0, 3, bytes_max=1000)
        assert (fetched.pieces, fetched.next_offset) == ([], 8)
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 0
        assert not log._log.sealer.due(log.state)
        await append(log, "next")
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 9
        assert await offsets(log) == [8]
        assert (await scrubbed(inner)).is_whole


async def test_killed_seal_is_followed_over_lost_records(inner: MemoryStore) -> None:
    log = await written(inner)
    await spoil_chunk(inner, log, 1)
    async with caring(inner) as cluster:
        await lost_records(cluster, None, is_dry=False)
    await log.refresh()
    await kill_while_sealing(log)
    await kill(log)
    assert (await scrubbed(inner)).is_whole
    async with closing(await opened(inner, COLD)) as other:
        assert other.state.partition("t", 0).sealed_end == 0
        await other.records.seal("t")
        assert other.state.partition("t", 0).sealed_end == 8
        assert await offsets(other) == [0, 1, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("lost", "expected_offsets"), [(1, [0, 1, 4, 5, 6, 7]), (3, [0, 1, 2, 3, 4, 5])]
)
async def test_damaged_tail_of_killed_seal(lost: int, expected_offsets: list[int]) -> None:
    inner = MemoryStore()
    log = await written(inner)
    await kill_while_sealing(log)
    await spoil_chunk(inner, log, lost)
    await kill(log)
    async with closing(await opened(inner, COLD)) as other:
        with pytest.raises(DamagedRecords):
            await other.records.seal("t")
        assert [partition.sealed_end for partition in other.state.topic("t").partitions] == [0, 8]
        async with caring(inner) as cluster:
            await lost_records(cluster, None, is_dry=False)
        await other.refresh()
        await other.records.seal("t")
        assert other.state.partition("t", 0).sealed_end == 8
        assert await offsets(other) == expected_offsets
        assert (await scrubbed(inner)).is_whole


async def test_damage_below_the_log_start_is_sealed_around(inner: MemoryStore) -> None:
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 0, 1)
        async with caring(inner) as cluster:
            await delete_records(cluster, "t", {0: 5}, is_dry=False)
        await log.refresh()
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 8
        assert await offsets(log, first=5) == [5, 6, 7]
        assert (await scrubbed(inner)).is_whole


async def test_lost_records_in_memory_are_not_served(inner: MemoryStore) -> None:
    async with closing(await with_topic(inner, partitions=PARTITIONS)) as log:
        await append(log, "a" * 30)
        await append(log, "b" * 30)
        await spoil_chunk(inner, log, 0)
        async with caring(inner) as cluster:
            await lost_records(cluster, None, is_dry=False)
        assert await offsets(log) == [0, 1]
        await log.refresh()
        assert await offsets(log) == [1]
        await log.records.seal("t")
        assert log.state.partition("t", 0).sealed_end == 2


async def test_below_level_2_no_record_is_given_up(inner: MemoryStore) -> None:
    await found_cluster(inner, format_levels.FIRST)
    async with closing(await written(inner)) as log:
        assert log.state.level == format_levels.FIRST
        await spoil_chunk(inner, log, 1)
        async with caring(inner) as cluster:
            with pytest.raises(InvalidRequest, match="tidelog upgrade"):
                await lost_records(cluster, None, is_dry=False)
            await raise_level(cluster.wal, 2)
            await lost_records(cluster, None, is_dry=False)
        await log.refresh()
        assert await offsets(log) == [0, 1, 4, 5, 6, 7]


async def test_damage_in_one_partition_fails_no_other_reads(inner: MemoryStore) -> None:
    async with closing(await written(inner)) as log:
        await spoil_chunk(inner, log, 1)
        consumers = await started(log)
        await joined(consumers, "x")
        got: list[str] = []
        for number in range(6):
            got += await read(consumers, "x", bytes_max=60)
            await append(log, f"n{number}", partition=1)
            got += await read(consumers, "x", wait_s=1.0)
        assert {f"n{number}" for number in range(6)} <= set(got)
        assert "a1" * 9 in got, "of the other partition"
        assert got.count("a0" * 9) == 2, "what lies before the damage"
        assert "a2" * 9 in got
        assert got.count("a2" * 9) == 1, "what lies behind it waits"
        async with caring(inner) as cluster:
            await lost_records(cluster, None, is_dry=False)
        await log.refresh()
        assert (await read(consumers, "x")).count("a2" * 9) == 1
        await consumers.close()


# -- entries


@pytest.mark.parametrize("how", ["damaged", "missing", "two of them"])
async def test_a_drop_continues_after_the_last_readable_entry(inner: MemoryStore, how: str) -> None:
    log = await written(inner)
    newest = log.state.seq
    await kill(log)
    for seq in (newest - 2, newest) if how == "two of them" else (newest - 2,):
        await (
            inner.delete([object_keys.wal(seq)]) if how == "missing" else spoil_entry(inner, seq)
        )
    with pytest.raises(Corrupt):
        await opened(inner)
    async with caring(inner, report_damage=False) as cluster:
        damage = await damage_of(cluster)
        assert damage is not None
        assert (damage.readable_to, damage.newest) == (newest - 3, newest)
        unread = {"damaged": [7], "missing": [], "two of them": [7, 9]}[how]
        assert damage.unread == unread
        assert damage.lost[0][:4] == ("t", 0, 6, 8), "of entry 8, which can be read"
        for wrong in (newest - 4, newest - 2):
            with pytest.raises(InvalidRequest, match=f"--drop-after {newest - 3}"):
                await drop_after(cluster, wrong, BROKERS)
        dropped = await drop_after(cluster, newest - 3, BROKERS)
        assert dropped == damage
        assert await damage_of(cluster) is None
        with pytest.raises(InvalidRequest, match="can be read to its end"):
            await drop_after(cluster, newest - 3, BROKERS)
    async with closing(await opened(inner, COLD)) as other:
        assert [len(await offsets(other, number)) for number in range(PARTITIONS)] == [6, 4]
        await append(other, "again")
        assert await offsets(other) == list(range(7))
    async with closing(await opened(inner, COLD)) as other:
        assert await offsets(other) == list(range(7))


async def test_producer_ids_of_dropped_entries_are_not_reused(inner: MemoryStore) -> None:
    log = await written(inner)
    readable = log.state.seq
    await append(log, "dropped")
    ids = [await log.kafka.reserve_producer_id() for _ in range(3)]
    await kill(log)
    await spoil_entry(inner, readable + 1)
    async with caring(inner, report_damage=False) as cluster:
        await drop_after(cluster, readable, BROKERS)
    async with closing(await opened(inner, COLD)) as other:
        ids += [await other.kafka.reserve_producer_id() for _ in range(3)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("how", ["damaged", "missing"])
async def test_broker_suspended_during_drop_commits_nothing(inner: MemoryStore, how: str) -> None:
    """It has applied what was dropped. The number after its newest entry is taken."""
    sleeper = await written(inner)
    half = await opened(inner)  # a view from the middle
    newest = sleeper.state.seq
    await asyncio.sleep(0.1)
    await inner.delete([key for key in inner._objects if key.startswith(object_keys.CHECKPOINTS)])
    async with closing(half):
        await append(sleeper, "last")
        seq = sleeper.state.seq
        if how == "missing":
            await inner.delete([object_keys.wal(newest)])
        else:
            await spoil_entry(inner, newest)
        async with caring(inner, report_damage=False) as cluster:
            await drop_after(cluster, newest - 1, BROKERS)
        old_keys = {key for key in inner._objects if key.startswith(object_keys.WAL)}
        for log in (sleeper, half):
            with pytest.raises(LogError):
                await append(log, "of another history")
        assert {key for key in inner._objects if key.startswith(object_keys.WAL)} == old_keys
        assert seq == newest + 1
        async with closing(await opened(inner, COLD)) as other:
            assert await offsets(other) == list(range(8))
            assert await offsets(other, 1) == list(range(6))
        await kill(sleeper)


async def test_a_drop_that_is_killed_at_any_write_can_be_repeated() -> None:
    for writes in range(1, 6):
        inner = MemoryStore()
        log = await written(inner)
        newest = log.state.seq
        await kill(log)
        await inner.delete([object_keys.wal(newest - 3), object_keys.wal(newest - 1)])
        async with caring(inner, report_damage=False) as cluster:
            if not await cut_off(cluster, newest - 4, writes):
                assert writes > 3, "two holes, the new number, the checkpoint"
                return
        async with caring(inner, report_damage=False) as cluster:
            if await damage_of(cluster) is not None:
                await drop_after(cluster, newest - 4, BROKERS)
        async with closing(await opened(inner, COLD)) as other:
            assert await offsets(other) == list(range(4))
            await append(other, "again")
            assert await offsets(other) == list(range(5))
    raise AssertionError("it never came to its end")


async def cut_off(cluster: MaintenanceSession, number: int, writes: int) -> bool:
    """Whether the process was killed at that write."""
    real, remaining_writes = cluster.store.create, writes

    async def create(key: str, parts):
        nonlocal remaining_writes
        remaining_writes -= 1
        if not remaining_writes:
            raise asyncio.CancelledError
        return await real(key, parts)

    cluster.store.create = create  # type: ignore[method-assign]
    with contextlib.suppress(asyncio.CancelledError):
        await drop_after(cluster, number, BROKERS)
    return remaining_writes <= 0


async def test_no_drop_while_a_broker_is_live(inner: MemoryStore) -> None:
    log = await written(inner)
    newest = log.state.seq
    await kill(log)
    await spoil_entry(inner, newest)

    async def beats() -> None:
        for number in itertools.count():
            await inner.put(object_keys.broker("x"), [b"{}" + b" " * number])
            await asyncio.sleep(1)

    beating = asyncio.create_task(beats())
    wal = {key for key in inner._objects if key.startswith(object_keys.WAL)}
    async with caring(inner, report_damage=False) as cluster:
        with pytest.raises(Unavailable, match="live"):
            await drop_after(cluster, newest - 1, BROKERS)
        assert {key for key in inner._objects if key.startswith(object_keys.WAL)} == wal
        beating.cancel()
        await drop_after(cluster, newest - 1, BROKERS)  # its object is left, as after a kill


# -- strays


@pytest.mark.parametrize("body", [b"", b"TIDEWAL1 and then something else"])
async def test_stray_is_passed_over_and_deleted(inner: MemoryStore, body: bytes) -> None:
    async with closing(await written(inner)) as log:
        stray = object_keys.wal(log.state.seq + 1000)
        await inner.put(stray, [body])
        await inner.put("wal/notes.txt", [body])
        async with closing(await opened(inner, COLD)) as other:
            await append(other, "after")
            assert other.state.partition("t", 0).high_watermark == 9
        report = await scrubbed(inner)
        assert report.is_whole
        assert {finding.where for finding in report.findings} == {stray, "wal/notes.txt"}
        async with caring(inner) as cluster:
            stray_infos = await strays(cluster)
            assert [info.key for info in stray_infos] == [stray]
            await delete_strays(cluster, stray_infos)
            assert await strays(cluster) == []
        assert stray not in inner._objects
        assert store_of(log) is log._log.store


@pytest.mark.parametrize("how", ["near", "an entry", "behind an entry"])
async def test_what_may_be_an_entry_behind_a_hole_is_no_stray(inner: MemoryStore, how: str) -> None:
    log = await written(inner)
    newest = log.state.seq
    await kill(log)
    body = await inner.get(object_keys.wal(newest))
    await inner.delete([object_keys.wal(newest)])
    if how == "near":
        await inner.put(object_keys.wal(newest + 99), [b""])
    else:
        await inner.put(object_keys.wal(newest), [body])
        await inner.delete([object_keys.wal(newest - 1)])
        if how == "behind an entry":
            await inner.put(object_keys.wal(newest + 1), [b""])
    with pytest.raises(Corrupt, match="see tidelog repair"):
        await opened(inner)
    async with caring(inner, report_damage=False) as cluster:
        assert await strays(cluster) == []


# -- logs on a folder


FOLDER_RECORDS = 4


async def written_on_a_folder(root: Path) -> tuple[Acked, int]:
    """The acknowledged records of a log whose broker was killed, and its newest entry's number.

    That entry and the one before hold a record.
    """
    running = root.with_name("running")
    log = await broker(FolderStore(running), SystemClock())
    await log.topics.create("t", 1, {})
    acked: Acked = {}
    for number in range(FOLDER_RECORDS):
        await produce(log, f"v{number}", acked)
    given(len(acked) == FOLDER_RECORDS, "all records are acknowledged")
    newest = log.state.seq
    shutil.copytree(running, root, dirs_exist_ok=True)
    await log.close()
    await log._log.store.close()
    return acked, newest


def flip_in_both_headers(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[40] ^= 1
    body[len(body) - 12 - header_length(body, path.name) + 40] ^= 1
    path.write_bytes(body)


async def held_in(root: Path) -> Acked:
    store = FolderStore(root)
    try:
        return await held(store, SystemClock())
    finally:
        await store.close()


async def test_a_stop_leaves_a_checkpoint(tmp_path: Path) -> None:
    _, newest = await written_on_a_folder(tmp_path / "killed")
    checkpoints = sorted((tmp_path / "running/checkpoints").glob("*"))
    assert checkpoints
    assert int(checkpoints[-1].name) >= newest


@pytest.mark.parametrize("damage", [flip_in_both_headers, Path.unlink])
async def test_command_drops_damaged_entry(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    root = tmp_path / "killed"
    acked, newest = await written_on_a_folder(root)
    damage(root / object_keys.wal(newest - 1))
    dropped_after = str(newest - 2)
    tidelog("repair", "--drop-after", dropped_after, "--yes", "--store", str(root))
    remaining_records = {
        offset: value for offset, value in acked.items() if offset < FOLDER_RECORDS - 2
    }
    assert await held_in(root) == remaining_records
