"""The guarantees of `Table`, on every implementation and every store: I7 depends on them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tidelog.storage.core import object_keys
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.manifest import ManifestConflict, Table, maintenance_app_id, seal_app_id
from tidelog.storage.tables.memory import MemoryManifest

PREFIX = object_keys.topic("orders", "0af3")
START_MS = 1_700_000_000_000

Open = Callable[[], Table]


@pytest.fixture(params=["memory", "folder"])
async def new_table(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the one table again and again, as one broker after the other would."""
    store = MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")
    yield lambda: open_table(store, PREFIX, "orders")
    await store.close()


@pytest.fixture
def opened_anywhere(store: ObjectStore) -> Open:
    """As `new_table`, on S3 too."""
    return lambda: open_table(store, PREFIX, "orders")


def file(
    partition: int,
    base: int,
    end: int,
    *,
    unique: str = "ab12",
    stamps: tuple[int, int] = (START_MS, START_MS + 999),
) -> SegmentFile:
    path = object_keys.segment(partition, base, end, unique)
    return SegmentFile(path, partition, base, end, 1000 + base, end - base, *stamps)


def seal(*ends: int) -> dict[str, int]:
    """Transactions of the seals of partitions 0, 1, ..."""
    return {seal_app_id(partition): end for partition, end in enumerate(ends)}


async def files_of(table: Table, partition: int = 0) -> list[SegmentFile]:
    return list(await table.segments(partition))


async def fresh(new_table: Open, partition: int = 0) -> list[SegmentFile]:
    """The partition's files in a table that is opened now."""
    return await files_of(new_table(), partition)


# --- reading


async def test_a_table_without_commits_is_empty(new_table: Open) -> None:
    table = new_table()
    assert table.version == -1
    index = await table.segments(3)
    assert list(index) == []
    assert index.end_offset == len(index) == 0
    assert index.at_or_after(0) is None
    assert list(index.since(0)) == []
    assert await table.transaction_version(seal_app_id(0)) is None
    await table.refresh()
    assert table.version == -1


async def test_added_files_are_found_by_every_table_object(opened_anywhere: Open) -> None:
    table, other = opened_anywhere(), opened_anywhere()
    assert await files_of(other) == []
    added = [file(0, 0, 100), file(0, 100, 250), file(1, 0, 7, stamps=(-5, 2**41))]
    await table.add(added, seal(250, 7))
    assert await files_of(table, 0) == added[:2]
    assert await files_of(table, 1) == added[2:]
    assert await files_of(table, 2) == []
    assert (await table.segments(0)).end_offset == 250
    assert await files_of(other) == [], "a view moves on refresh only"
    old_version = other.version
    await other.refresh()
    assert await files_of(other) == added[:2]
    assert other.version == table.version > old_version
    assert await fresh(opened_anywhere, 1) == added[2:]


async def test_segments_are_found_by_offset(new_table: Open) -> None:
    table = new_table()
    # As key compaction leaves it: gaps between files and inside of them.
    files = [file(0, 0, 10), file(0, 10, 20), file(0, 50, 60), file(1, 0, 1000)]
    await table.add(list(reversed(files)), {"compact": 1})
    index = await table.segments(0)
    file_by_offset = {
        offset: index.at_or_after(offset) for offset in (0, 9, 10, 19, 20, 49, 50, 59)
    }
    bases = [
        None if segment_file is None else segment_file.base_offset
        for segment_file in file_by_offset.values()
    ]
    assert bases == [0, 0, 10, 10, 50, 50, 50, 50]
    assert index.at_or_after(60) is None
    assert index[1] == files[1]


async def test_segments_are_found_by_timestamp(new_table: Open) -> None:
    table = new_table()
    stamps = [(0, 100), (300, 500), (150, 200), (200, 500), (700, 800)]
    files = [
        file(0, 10 * i, 10 * i + 10, stamps=(START_MS + low, START_MS + high))
        for i, (low, high) in enumerate(stamps)
    ]
    await table.add(files, seal(50))
    index = await table.segments(0)

    def since(ms: int) -> list[int]:
        return [segment_file.base_offset // 10 for segment_file in index.since(START_MS + ms)]

    assert since(-1000) == [0, 1, 2, 3, 4]
    assert since(100) == [0, 1, 2, 3, 4]
    assert since(101) == [1, 2, 3, 4]
    assert since(201) == [1, 3, 4]
    assert since(500) == [1, 3, 4]
    assert since(501) == [4]
    assert since(801) == []


async def test_a_file_of_strange_times_is_searched_for_any(new_table: Open) -> None:
    table = new_table()
    await table.add([file(0, 0, 10, stamps=(-(2**50), 2**50))], seal(10))
    for timestamp in (-(2**50), 0, START_MS, 2**50):
        assert [
            segment_file.base_offset for segment_file in (await table.segments(0)).since(timestamp)
        ] == [0]


async def test_a_thousand_files_come_in_one_commit(new_table: Open) -> None:
    table = new_table()
    files = [file(p, 10 * i, 10 * i + 10) for i in range(250) for p in range(4)]
    await table.add(files, seal(2500, 2500, 2500, 2500))
    other = new_table()
    for partition in range(4):
        expected = [segment_file for segment_file in files if segment_file.partition == partition]
        assert await files_of(other, partition) == expected
    assert await other.transaction_version(seal_app_id(3)) == 2500


async def test_a_bad_file_fails_its_own_partition(new_table: Open) -> None:
    table = new_table()
    overlapping = [file(0, 0, 100), file(0, 50, 150)]
    foreign = file(1, 0, 10)._replace(path="partition=1/part-00000-c0ffee.snappy.parquet")
    good = file(2, 0, 10)
    elsewhere = file(2, 10, 20)._replace(partition=3)  # a wrong bit: Delta's log has no checksum
    await table.add([*overlapping, foreign, good, elsewhere], {"somebody": 1})
    bad = ((0, overlapping[1].path), (1, foreign.path), (3, elsewhere.path))
    for partition, path in bad:
        with pytest.raises(Corrupt, match=path):
            await table.segments(partition)
    assert await files_of(table, 2) == [good]


# --- transactions


async def test_transactions_are_remembered(opened_anywhere: Open) -> None:
    table, other = opened_anywhere(), opened_anywhere()
    assert await other.transaction_version(seal_app_id(0)) is None
    end = 0
    for step in range(1, 16):  # more than a reader follows one by one
        await table.add([file(0, end, end + step)], seal(end + step))
        end += step
        if step < 4:
            await other.refresh()
            assert await other.transaction_version(seal_app_id(0)) == end
    await other.refresh()
    assert await other.transaction_version(seal_app_id(0)) == end
    assert await table.transaction_version(seal_app_id(0)) == end
    assert await table.transaction_version(seal_app_id(1)) is None
    assert await opened_anywhere().transaction_version(seal_app_id(0)) == end


@pytest.mark.parametrize("base", [50, 150])
async def test_a_seal_goes_on_where_the_table_ends(new_table: Open, base: int) -> None:
    table = new_table()
    await table.add([file(0, 0, 100)], seal(100))
    with pytest.raises(ManifestConflict):
        await table.add([file(0, base, 200)], seal(200))
    assert await fresh(new_table) == [file(0, 0, 100)]
    await table.add([file(0, 100, 200)], seal(200))
    assert (await table.segments(0)).end_offset == 200


async def test_files_of_a_seal_leave_no_hole(new_table: Open) -> None:
    table = new_table()
    for files in ([file(0, 0, 10), file(0, 11, 20)], [file(0, 0, 19)]):
        with pytest.raises(AssertionError):
            await table.add(files, seal(20))
    with pytest.raises(AssertionError):
        await table.add([file(0, 0, 20)], {})


async def test_the_slower_of_two_sealers_starts_again(opened_anywhere: Open) -> None:
    fast, slow = opened_anywhere(), opened_anywhere()
    for table in (fast, slow):
        assert await table.transaction_version(seal_app_id(0)) is None
    await fast.add([file(0, 0, 100, unique="fa57")], seal(100))
    with pytest.raises(ManifestConflict):
        await slow.add([file(0, 0, 120, unique="5107")], seal(120))
    assert await fresh(opened_anywhere) == [file(0, 0, 100, unique="fa57")]
    await slow.refresh()
    assert await slow.transaction_version(seal_app_id(0)) == 100
    await slow.add([file(0, 100, 120, unique="5107")], seal(120))
    assert (await slow.segments(0)).end_offset == 120


async def test_a_refresh_between_looking_and_adding_lets_no_sealer_pass(new_table: Open) -> None:
    fast, slow = new_table(), new_table()
    assert await slow.transaction_version(seal_app_id(0)) is None
    await fast.add([file(0, 0, 100, unique="fa57")], seal(100))
    await slow.refresh()  # by a reader of the same broker
    with pytest.raises(ManifestConflict):
        await slow.add([file(0, 0, 120, unique="5107")], seal(120))
    assert await fresh(new_table) == [file(0, 0, 100, unique="fa57")]


async def test_sealers_of_other_partitions_do_not_meet(new_table: Open) -> None:
    table, other = new_table(), new_table()
    await table.add([file(0, 0, 10)], {seal_app_id(0): 10})
    assert await files_of(other, 1) == []
    await table.add([file(1, 0, 10)], {seal_app_id(1): 10})
    await other.add([file(2, 0, 10)], {seal_app_id(2): 10})
    for partition in range(3):
        assert await files_of(other, partition) == [file(partition, 0, 10)]


async def test_any_other_transaction_must_grow(new_table: Open) -> None:
    table = new_table()
    await table.add([file(0, 0, 10)], {"compact-0": 7})
    for version in (6, 7):
        with pytest.raises(ManifestConflict):
            await table.add([file(0, 10, 20)], {"compact-0": version})
    await table.add([file(0, 10, 20)], {"compact-0": 8})
    assert len(await table.segments(0)) == 2


async def test_what_was_done_once_is_done(new_table: Open) -> None:
    table, other = new_table(), new_table()
    await other.refresh()
    files = [file(0, 0, 10), file(0, 10, 20)]
    for writer in (table, table, other):
        await writer.add(files, seal(20))
    await other.add([file(0, 20, 30)], seal(30))
    await table.add(files, seal(20))
    assert await fresh(new_table) == [*files, file(0, 20, 30)]


# --- taking files out


async def planned(table: Table, partition: int = 0) -> dict[str, int]:
    """The care of a partition's next commit, as of the loaded version."""
    app_id = maintenance_app_id(partition)
    return {app_id: (await table.transaction_version(app_id) or 0) + 1}


async def test_files_are_replaced_in_one_commit(opened_anywhere: Open) -> None:
    table, other = opened_anywhere(), opened_anywhere()
    old = [file(0, 0, 10), file(0, 10, 20)]
    await table.add([*old, file(1, 0, 5)], seal(20, 5))
    new = file(0, 0, 20, unique="3e3e")
    await table.replace(old, [new], await planned(table), data_change=False)
    assert await files_of(table) == [new]
    assert await fresh(opened_anywhere) == [new]
    assert await fresh(opened_anywhere, 1) == [file(1, 0, 5)]
    await other.refresh()
    assert await other.paths() == {new.path, file(1, 0, 5).path}
    (removal,) = await other.removed_since(0)
    assert removal.removed == {segment_file.path for segment_file in old}
    assert removal.added == {new.path}
    assert await other.removed_since(removal.at_ms) == [removal]
    assert await other.removed_since(removal.at_ms + 1) == []
    # Sealers go on where the table ended, whatever is left in it.
    await other.replace([new], [], await planned(other), data_change=True)
    assert await fresh(opened_anywhere) == []
    await table.refresh()
    assert await table.transaction_version(seal_app_id(0)) == 20
    await table.add([file(0, 20, 30)], seal(30))
    assert await fresh(opened_anywhere) == [file(0, 20, 30)]


async def test_of_two_that_remove_a_file_one_starts_again(opened_anywhere: Open) -> None:
    fast, slow = opened_anywhere(), opened_anywhere()
    old = file(0, 0, 10)
    await fast.add([old], seal(10))
    await slow.refresh()
    first, second = await planned(fast), await planned(slow)
    await fast.replace([old], [file(0, 0, 10, unique="fa57")], first, data_change=False)
    for _ in range(2):  # also when a reader of its process has refreshed the table since
        with pytest.raises(ManifestConflict):
            await slow.replace([old], [file(0, 0, 10, unique="5107")], second, data_change=False)
        await slow.refresh()
    assert await fresh(opened_anywhere) == [file(0, 0, 10, unique="fa57")]


async def test_a_seal_does_not_meet_a_replace(opened_anywhere: Open) -> None:
    sealer, carer = opened_anywhere(), opened_anywhere()
    await sealer.add([file(0, 0, 10)], seal(10))
    await carer.refresh()
    next_care = await planned(carer)
    await sealer.add([file(0, 10, 20)], seal(20))
    new = file(0, 0, 10, unique="3e3e")
    await carer.replace([file(0, 0, 10)], [new], next_care, data_change=False)
    await sealer.add([file(0, 20, 30)], seal(30))
    assert await fresh(opened_anywhere) == [new, file(0, 10, 20), file(0, 20, 30)]


async def test_what_was_replaced_once_is_replaced(new_table: Open) -> None:
    table, other = new_table(), new_table()
    old, new = file(0, 0, 10), file(0, 0, 10, unique="3e3e")
    await table.add([old], seal(10))
    for writer in (table, table, other):
        await writer.replace([old], [new], {maintenance_app_id(0): 1}, data_change=False)
    await other.replace([new], [], {maintenance_app_id(0): 2}, data_change=True)
    await table.replace([new], [], {maintenance_app_id(0): 2}, data_change=True)
    assert await fresh(new_table) == []


# --- at once


async def test_writers_at_once_lose_nothing(opened_anywhere: Open) -> None:
    async def write(partition: int) -> None:
        table = opened_anywhere()
        for step in range(3):
            end = 10 * step + 10
            await table.add([file(partition, end - 10, end)], {seal_app_id(partition): end})

    async with asyncio.TaskGroup() as group:
        for partition in range(5):
            group.create_task(write(partition))
    for partition in range(5):
        bases = [
            segment_file.base_offset for segment_file in await fresh(opened_anywhere, partition)
        ]
        assert bases == [0, 10, 20]


async def test_of_sealers_at_once_one_wins(opened_anywhere: Open) -> None:
    tables = [opened_anywhere() for _ in range(5)]
    await tables[0].add([file(0, 0, 100)], seal(100))
    for table in tables:
        await table.refresh()

    async def race(number: int) -> bool:
        try:
            ours = file(0, 100, 110 + number, unique=f"{number:04x}")
            await tables[number].add([ours], seal(110 + number))
        except ManifestConflict:
            return False
        return True

    won = await asyncio.gather(*(race(number) for number in range(5)))
    assert sum(won) == 1
    winner = won.index(True)
    assert await fresh(opened_anywhere) == [
        file(0, 0, 100),
        file(0, 100, 110 + winner, unique=f"{winner:04x}"),
    ]


async def test_of_creators_at_once_all_go_on(opened_anywhere: Open) -> None:
    tables = [opened_anywhere() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for number, table in enumerate(tables):
            group.create_task(table.add([file(number, 0, 10)], {seal_app_id(number): 10}))
    last = opened_anywhere()
    for number in range(5):
        assert await files_of(last, number) == [file(number, 0, 10)]
    assert last.version == 5  # one creation, five commits


async def test_tasks_share_one_table(new_table: Open) -> None:
    table = new_table()

    async def write(partition: int) -> None:
        await table.add([file(partition, 0, 10)], {seal_app_id(partition): 10})
        assert await files_of(table, partition) == [file(partition, 0, 10)]

    async with asyncio.TaskGroup() as group:
        for partition in range(4):
            group.create_task(write(partition))
            group.create_task(table.refresh())
    assert table.version == 4


async def test_a_cancelled_add_leaves_a_table_that_works(new_table: Open) -> None:
    table = new_table()
    await table.add([file(0, 0, 10)], seal(10))
    for turns in range(12):
        task = asyncio.ensure_future(table.add([file(0, 10, 20)], seal(20)))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
    await table.refresh()
    assert await table.transaction_version(seal_app_id(0)) in {10, 20}
    await table.add([file(0, 10, 20)], seal(20))
    assert await fresh(new_table) == [file(0, 0, 10), file(0, 10, 20)]
    await table.add([file(0, 20, 30)], seal(30))
    assert len(await fresh(new_table)) == 3


# --- memory alone


async def test_wrappers_that_show_its_tables_share_a_memory_store() -> None:
    class Wrapper(MemoryStore):
        def __init__(self, tables: dict) -> None:
            super().__init__()
            self.tables = tables

    tables: dict = {}
    table = open_table(Wrapper(tables), PREFIX, "orders")
    assert isinstance(table, MemoryManifest)
    await table.add([file(0, 0, 10)], seal(10))
    other = open_table(Wrapper(tables), PREFIX, "orders")
    assert await files_of(other) == [file(0, 0, 10)]
    apart = open_table(MemoryStore(), PREFIX, "orders")
    assert await files_of(apart) == []


async def test_all_transactions_are_found_at_once(new_table: Open) -> None:
    """Also after a checkpoint of Delta, and those that no commit has."""
    count, commits = 20, 60
    table = new_table()
    for step in range(commits):
        files = [file(number, step, step + 1, unique=f"{step:04x}") for number in range(count)]
        await table.add(files, seal(*[step + 1] * count))
    app_ids = [*seal(*[0] * count), "seal-99", maintenance_app_id(0)]
    want = dict.fromkeys(app_ids[:count], commits) | dict.fromkeys(app_ids[count:])
    for reader in (table, new_table()):
        assert await reader.transaction_versions(app_ids) == want
        assert [await reader.transaction_version(app_id) for app_id in app_ids] == list(
            want.values()
        )
    again = new_table()
    assert await again.transaction_versions(app_ids[:2]) == dict.fromkeys(app_ids[:2], commits)
    await table.add([file(0, commits, commits + 1)], seal(commits + 1))
    await again.refresh()
    assert (await again.transaction_versions(app_ids))[seal_app_id(0)] == commits + 1
