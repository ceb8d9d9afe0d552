"""What `Table` promises, on every implementation and every store: I7 rests on it."""

import asyncio
import http.client
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import deltalake
import pytest

from storage import keys, table
from storage.errors import CommitUnknown, Corrupt, Unavailable
from storage.folder import FolderStore
from storage.manifest import MemoryManifest
from storage.model import SegmentFile
from storage.objectstore import MemoryStore, ObjectStore
from storage.s3 import S3Options, S3Store
from storage.table import DeltaManifest, ManifestConflict, Table, open_table, seal_app_id
from tests.support.moto import Moto
from tests.support.seaweed import REGION

PREFIX = keys.topic("orders", "0af3")
START_MS = 1_700_000_000_000

Open = Callable[[], Awaitable[Table]]


@pytest.fixture(params=["memory", "folder"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the one table again and again, as one broker after the other would."""
    store = MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")
    yield lambda: open_table(store, PREFIX, "orders")
    await store.close()


@pytest.fixture
def opened_anywhere(store: ObjectStore) -> Open:
    """As `opened`, on S3 too."""
    return lambda: open_table(store, PREFIX, "orders")


def file(
    partition: int,
    base: int,
    end: int,
    *,
    unique: str = "ab12",
    stamps: tuple[int, int] = (START_MS, START_MS + 999),
) -> SegmentFile:
    path = keys.segment(partition, base, end, unique)
    return SegmentFile(path, partition, base, end, 1000 + base, end - base, *stamps)


def seal(*ends: int) -> dict[str, int]:
    """Transactions of the seals of partitions 0, 1, ..."""
    return {seal_app_id(partition): end for partition, end in enumerate(ends)}


async def files_of(table: Table, partition: int = 0) -> list[SegmentFile]:
    return list(await table.segments(partition))


async def fresh(opened: Open, partition: int = 0) -> list[SegmentFile]:
    """The partition's files as somebody sees them who opens the table now."""
    return await files_of(await opened(), partition)


# --- reading


async def test_a_table_that_nobody_wrote_is_empty(opened: Open) -> None:
    one = await opened()
    assert one.version == -1
    index = await one.segments(3)
    assert list(index) == []
    assert index.end_offset == len(index) == 0
    assert index.at_or_after(0) is None
    assert list(index.since(0)) == []
    assert await one.transaction_version(seal_app_id(0)) is None
    await one.refresh()
    assert one.version == -1
    one.close()
    one.close()


async def test_what_is_added_is_found_by_everybody(opened_anywhere: Open) -> None:
    one, other = await opened_anywhere(), await opened_anywhere()
    assert await files_of(other) == []
    added = [file(0, 0, 100), file(0, 100, 250), file(1, 0, 7, stamps=(-5, 2**41))]
    await one.add(added, seal(250, 7))
    assert await files_of(one, 0) == added[:2]
    assert await files_of(one, 1) == added[2:]
    assert await files_of(one, 2) == []
    assert (await one.segments(0)).end_offset == 250
    assert await files_of(other) == [], "a view moves when it is told to"
    before = other.version
    await other.refresh()
    assert await files_of(other) == added[:2]
    assert other.version == one.version > before
    assert await fresh(opened_anywhere, 1) == added[2:]


async def test_segments_are_found_by_offset(opened: Open) -> None:
    one = await opened()
    # What key compaction leaves: gaps between files and inside of them.
    files = [file(0, 0, 10), file(0, 10, 20), file(0, 50, 60), file(1, 0, 1000)]
    await one.add(list(reversed(files)), {"compact": 1})
    index = await one.segments(0)
    found = {offset: index.at_or_after(offset) for offset in (0, 9, 10, 19, 20, 49, 50, 59)}
    bases = [None if at is None else at.base_offset for at in found.values()]
    assert bases == [0, 0, 10, 10, 50, 50, 50, 50]
    assert index.at_or_after(60) is None
    assert index[1] == files[1]


async def test_segments_are_found_by_timestamp(opened: Open) -> None:
    one = await opened()
    stamps = [(0, 100), (300, 500), (150, 200), (200, 500), (700, 800)]
    files = [
        file(0, 10 * i, 10 * i + 10, stamps=(START_MS + low, START_MS + high))
        for i, (low, high) in enumerate(stamps)
    ]
    await one.add(files, seal(50))
    index = await one.segments(0)

    def since(ms: int) -> list[int]:
        return [found.base_offset // 10 for found in index.since(START_MS + ms)]

    assert since(-1000) == [0, 1, 2, 3, 4]
    assert since(100) == [0, 1, 2, 3, 4]
    assert since(101) == [1, 2, 3, 4]
    assert since(201) == [1, 3, 4]
    assert since(500) == [1, 3, 4]
    assert since(501) == [4]
    assert since(801) == []


async def test_a_file_of_strange_times_is_searched_for_any(opened: Open) -> None:
    one = await opened()
    await one.add([file(0, 0, 10, stamps=(-(2**50), 2**50))], seal(10))
    for timestamp in (-(2**50), 0, START_MS, 2**50):
        assert [found.base_offset for found in (await one.segments(0)).since(timestamp)] == [0]


async def test_a_thousand_files_come_in_one_commit(opened: Open) -> None:
    one = await opened()
    files = [file(p, 10 * i, 10 * i + 10) for i in range(250) for p in range(4)]
    await one.add(files, seal(2500, 2500, 2500, 2500))
    other = await opened()
    for partition in range(4):
        expected = [each for each in files if each.partition == partition]
        assert await files_of(other, partition) == expected
    assert await other.transaction_version(seal_app_id(3)) == 2500


async def test_a_bad_file_fails_its_own_partition(opened: Open) -> None:
    one = await opened()
    overlapping = [file(0, 0, 100), file(0, 50, 150)]
    foreign = file(1, 0, 10)._replace(path="partition=1/part-00000-c0ffee.snappy.parquet")
    good = file(2, 0, 10)
    await one.add([*overlapping, foreign, good], {"somebody": 1})
    for partition, path in ((0, overlapping[1].path), (1, foreign.path)):
        with pytest.raises(Corrupt, match=path):
            await one.segments(partition)
    assert await files_of(one, 2) == [good]


# --- transactions


async def test_transactions_are_remembered(opened_anywhere: Open) -> None:
    one, other = await opened_anywhere(), await opened_anywhere()
    assert await other.transaction_version(seal_app_id(0)) is None
    end = 0
    for step in range(1, 16):  # more than a reader follows one by one
        await one.add([file(0, end, end + step)], seal(end + step))
        end += step
        if step < 4:
            await other.refresh()
            assert await other.transaction_version(seal_app_id(0)) == end
    await other.refresh()
    assert await other.transaction_version(seal_app_id(0)) == end
    assert await one.transaction_version(seal_app_id(0)) == end
    assert await one.transaction_version(seal_app_id(1)) is None
    assert await (await opened_anywhere()).transaction_version(seal_app_id(0)) == end


@pytest.mark.parametrize("base", [50, 150])
async def test_a_seal_goes_on_where_the_table_ends(opened: Open, base: int) -> None:
    one = await opened()
    await one.add([file(0, 0, 100)], seal(100))
    with pytest.raises(ManifestConflict):
        await one.add([file(0, base, 200)], seal(200))
    assert await fresh(opened) == [file(0, 0, 100)]
    await one.add([file(0, 100, 200)], seal(200))
    assert (await one.segments(0)).end_offset == 200


async def test_files_of_a_seal_leave_no_hole(opened: Open) -> None:
    one = await opened()
    for files in ([file(0, 0, 10), file(0, 11, 20)], [file(0, 0, 19)]):
        with pytest.raises(AssertionError):
            await one.add(files, seal(20))
    with pytest.raises(AssertionError):
        await one.add([file(0, 0, 20)], {})


async def test_the_slower_of_two_sealers_starts_again(opened_anywhere: Open) -> None:
    fast, slow = await opened_anywhere(), await opened_anywhere()
    for each in (fast, slow):
        assert await each.transaction_version(seal_app_id(0)) is None
    await fast.add([file(0, 0, 100, unique="fa57")], seal(100))
    with pytest.raises(ManifestConflict):
        await slow.add([file(0, 0, 120, unique="5107")], seal(120))
    assert await fresh(opened_anywhere) == [file(0, 0, 100, unique="fa57")]
    await slow.refresh()
    assert await slow.transaction_version(seal_app_id(0)) == 100
    await slow.add([file(0, 100, 120, unique="5107")], seal(120))
    assert (await slow.segments(0)).end_offset == 120


async def test_a_refresh_between_looking_and_adding_lets_no_sealer_pass(opened: Open) -> None:
    fast, slow = await opened(), await opened()
    assert await slow.transaction_version(seal_app_id(0)) is None
    await fast.add([file(0, 0, 100, unique="fa57")], seal(100))
    await slow.refresh()  # by a reader of the same broker
    with pytest.raises(ManifestConflict):
        await slow.add([file(0, 0, 120, unique="5107")], seal(120))
    assert await fresh(opened) == [file(0, 0, 100, unique="fa57")]


async def test_sealers_of_other_partitions_do_not_meet(opened: Open) -> None:
    one, other = await opened(), await opened()
    await one.add([file(0, 0, 10)], {seal_app_id(0): 10})
    assert await files_of(other, 1) == []
    await one.add([file(1, 0, 10)], {seal_app_id(1): 10})
    await other.add([file(2, 0, 10)], {seal_app_id(2): 10})
    for partition in range(3):
        assert await files_of(other, partition) == [file(partition, 0, 10)]


async def test_any_other_transaction_must_grow(opened: Open) -> None:
    one = await opened()
    await one.add([file(0, 0, 10)], {"compact-0": 7})
    for version in (6, 7):
        with pytest.raises(ManifestConflict):
            await one.add([file(0, 10, 20)], {"compact-0": version})
    await one.add([file(0, 10, 20)], {"compact-0": 8})
    assert len(await one.segments(0)) == 2


async def test_what_was_done_once_is_done(opened: Open) -> None:
    one, other = await opened(), await opened()
    await other.refresh()
    files = [file(0, 0, 10), file(0, 10, 20)]
    for each in (one, one, other):
        await each.add(files, seal(20))
    await other.add([file(0, 20, 30)], seal(30))
    await one.add(files, seal(20))
    assert await fresh(opened) == [*files, file(0, 20, 30)]


# --- at once


async def test_writers_at_once_lose_nothing(opened_anywhere: Open) -> None:
    async def write(partition: int) -> None:
        one = await opened_anywhere()
        for step in range(3):
            end = 10 * step + 10
            await one.add([file(partition, end - 10, end)], {seal_app_id(partition): end})

    async with asyncio.TaskGroup() as group:
        for partition in range(5):
            group.create_task(write(partition))
    for partition in range(5):
        bases = [each.base_offset for each in await fresh(opened_anywhere, partition)]
        assert bases == [0, 10, 20]


async def test_of_sealers_at_once_one_wins(opened_anywhere: Open) -> None:
    tables = [await opened_anywhere() for _ in range(5)]
    await tables[0].add([file(0, 0, 100)], seal(100))
    for each in tables:
        await each.refresh()

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
    tables = [await opened_anywhere() for _ in range(5)]
    async with asyncio.TaskGroup() as group:
        for number, each in enumerate(tables):
            group.create_task(each.add([file(number, 0, 10)], {seal_app_id(number): 10}))
    last = await opened_anywhere()
    for number in range(5):
        assert await files_of(last, number) == [file(number, 0, 10)]
    assert last.version == 5  # one creation, five commits


async def test_tasks_share_one_table(opened: Open) -> None:
    one = await opened()

    async def write(partition: int) -> None:
        await one.add([file(partition, 0, 10)], {seal_app_id(partition): 10})
        assert await files_of(one, partition) == [file(partition, 0, 10)]

    async with asyncio.TaskGroup() as group:
        for partition in range(4):
            group.create_task(write(partition))
            group.create_task(one.refresh())
    assert one.version == 4


async def test_a_cancelled_add_leaves_a_table_that_works(opened: Open) -> None:
    one = await opened()
    await one.add([file(0, 0, 10)], seal(10))
    for turns in range(12):
        task = asyncio.ensure_future(one.add([file(0, 10, 20)], seal(20)))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
    await one.refresh()
    assert await one.transaction_version(seal_app_id(0)) in {10, 20}
    await one.add([file(0, 10, 20)], seal(20))
    assert await fresh(opened) == [file(0, 0, 10), file(0, 10, 20)]
    await one.add([file(0, 20, 30)], seal(30))
    assert len(await fresh(opened)) == 3


# --- memory alone


async def test_wrappers_that_show_its_tables_share_a_memory_store() -> None:
    class Wrapper(MemoryStore):
        def __init__(self, tables: dict) -> None:
            super().__init__()
            self.tables = tables

    tables: dict = {}
    one = await open_table(Wrapper(tables), PREFIX, "orders")
    assert isinstance(one, MemoryManifest)
    await one.add([file(0, 0, 10)], seal(10))
    other = await open_table(Wrapper(tables), PREFIX, "orders")
    assert await files_of(other) == [file(0, 0, 10)]
    apart = await open_table(MemoryStore(), PREFIX, "orders")
    assert await files_of(apart) == []


# --- Delta on a folder


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[FolderStore]:
    store = FolderStore(tmp_path / "a folder")
    yield store
    await store.close()


def delta(folder: FolderStore) -> DeltaManifest:
    return DeltaManifest(folder, PREFIX, "orders")


def log_of(folder: FolderStore) -> Path:
    return Path(folder.table_uri(PREFIX), "_delta_log")


def actions(folder: FolderStore, version: int) -> list[dict]:
    lines = (log_of(folder) / f"{version:020d}.json").read_text().splitlines()
    return [json.loads(line) for line in lines]


async def seal_often(one: Table, steps: Sequence[int]) -> None:
    for step in steps:
        await one.add([file(0, 10 * step, 10 * step + 10)], seal(10 * step + 10))


async def test_the_log_says_what_engines_need(folder: FolderStore) -> None:
    one = delta(folder)
    await one.add([file(0, 0, 10)], seal(10))
    await one.add([file(7, 5, 10)._replace(rows=2)], {"compact": 1})
    opened = deltalake.DeltaTable(folder.table_uri(PREFIX))
    assert opened.metadata().name == "orders"
    assert opened.metadata().partition_columns == ["partition"]
    assert (opened.protocol().min_reader_version, opened.protocol().min_writer_version) == (1, 2)
    [add] = [line["add"] for line in actions(folder, 1) if "add" in line]
    assert add["path"] == keys.segment(0, 0, 10, "ab12")
    assert add["partitionValues"] == {"partition": "0"}
    assert add["dataChange"] is True
    assert json.loads(add["stats"]) == {
        "numRecords": 10,
        "minValues": {"offset": 0, "timestamp": "2023-11-14T22:13:20.000Z"},
        "maxValues": {"offset": 9, "timestamp": "2023-11-14T22:13:20.999999Z"},
        "nullCount": {"offset": 0, "timestamp": 0},
        "tightBounds": True,
    }
    assert {"txn": {"appId": "seal-0", "version": 10}} in actions(folder, 1)
    [add] = [line["add"] for line in actions(folder, 2) if "add" in line]
    assert json.loads(add["stats"])["tightBounds"] is False


async def test_checkpoints_are_made_and_expired_versions_go(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(table._PROPERTIES, "delta.checkpointInterval", "5")
    one, stale = delta(folder), delta(folder)
    await seal_often(one, [0])
    assert len(await files_of(stale)) == 1
    assert await stale.transaction_version(seal_app_id(0)) == 10
    await seal_often(one, range(1, 12))
    log = log_of(folder)
    assert (log / "00000000000000000009.checkpoint.parquet").exists()
    assert (log / "00000000000000000000.json").exists()
    for path in log.iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    await seal_often(one, range(12, 14))
    assert not (log / "00000000000000000001.json").exists()
    # Who was asleep meanwhile goes on, from the checkpoint.
    await stale.refresh()
    assert await files_of(stale) == await files_of(one)
    assert await stale.transaction_version(seal_app_id(0)) == 140
    with pytest.raises(ManifestConflict):
        await stale.add([file(0, 130, 150, unique="bad")], seal(150))
    await seal_often(stale, [14])


async def test_a_stale_writer_whose_versions_are_gone_is_refused(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(table._PROPERTIES, "delta.checkpointInterval", "5")
    one, stale = delta(folder), delta(folder)
    await seal_often(one, range(3))
    assert await stale.transaction_version(seal_app_id(0)) == 30
    await seal_often(one, range(3, 11))
    for path in log_of(folder).iterdir():
        os.utime(path, (1_000_000_000, 1_000_000_000))
    await seal_often(one, range(11, 16))
    with pytest.raises((ManifestConflict, CommitUnknown)):
        await stale.add([file(0, 30, 35, unique="bad")], seal(35))
    assert len(await files_of(stale)) == 16
    await seal_often(stale, [16])


async def test_transactions_are_followed_without_asking_delta(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = delta(folder), delta(folder)
    await seal_often(one, [0])
    assert await other.transaction_version(seal_app_id(0)) == 10
    await seal_often(one, range(1, 4))
    monkeypatch.setattr(deltalake.DeltaTable, "transaction_version", None)  # a call would raise
    await other.refresh()
    assert await other.transaction_version(seal_app_id(0)) == 40
    await seal_often(other, [4])


async def test_every_version_is_synced_before_it_counts(
    folder: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    sync = table._sync
    monkeypatch.setattr(table, "_sync", lambda path: (synced.append(path.name), sync(path)))
    one, other = delta(folder), delta(folder)
    await seal_often(one, [0])
    assert {"00000000000000000001.json", "_delta_log"} <= set(synced)
    await seal_often(one, [1])
    synced.clear()
    # Somebody else's commit may not be on the disk yet: a hole below ours would cost the table.
    await other.refresh()
    assert {f"{version:020d}.json" for version in range(3)} <= set(synced)
    synced.clear()
    await other.refresh()
    assert synced == []


async def test_a_log_that_cannot_be_read_is_unavailable_until_it_can(folder: FolderStore) -> None:
    one = delta(folder)
    await seal_often(one, range(2))
    last = log_of(folder) / "00000000000000000002.json"
    good = last.read_bytes()
    last.write_bytes(good[:300])
    other = delta(folder)
    with pytest.raises(Unavailable):
        await other.segments(0)
    last.write_bytes(good)
    assert len(await files_of(other)) == 2
    assert len(await files_of(one)) == 2


async def test_a_commit_that_fails_otherwise_is_unknown(folder: FolderStore) -> None:
    one = delta(folder)
    await seal_often(one, range(2))
    (log_of(folder) / "00000000000000000003.json").mkdir()
    with pytest.raises(CommitUnknown):
        await seal_often(one, [2])
    (log_of(folder) / "00000000000000000003.json").rmdir()
    await one.refresh()
    assert await one.transaction_version(seal_app_id(0)) == 20
    await seal_often(one, [2])


async def test_a_path_that_delta_cannot_open_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="%"):
        delta(FolderStore(tmp_path / "a%20b"))


# --- Delta on S3


class LossyProxy:
    """Stands before an S3 and loses the answer to a PUT of a Delta version, once: the object is
    stored, the client hears of a failure and asks again."""

    def __init__(self, endpoint_url: str, how: str) -> None:
        self.lost: list[str] = []
        self.how = how
        self.is_away = False
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(endpoint_url))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self.endpoint_url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "LossyProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self, endpoint_url: str) -> type[BaseHTTPRequestHandler]:
        proxy, host = self, endpoint_url.removeprefix("http://")

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if proxy.is_away:
                    self.close_connection = True
                    return
                with closing(http.client.HTTPConnection(host)) as server:
                    server.request(self.command, self.path, body, dict(self.headers))
                    answer = server.getresponse()
                    status, content = answer.status, answer.read()
                    headers = answer.getheaders()
                is_version = re.search(r"_delta_log/0*[1-9]\d*\.json$", self.path)
                if self.command == "PUT" and is_version and not proxy.lost:
                    proxy.lost.append(self.path)
                    if proxy.how == "dropped":
                        self.close_connection = True
                        return
                    status, content, headers = 500, b"", []
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in {"transfer-encoding", "connection", "content-length"}:
                        self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

            def log_message(self, *_: object) -> None:
                """Quietly."""

        return Handler


@pytest.mark.parametrize("how", ["dropped", "500"])
async def test_a_lost_answer_is_not_a_lost_commit(moto_server: Moto, how: str) -> None:
    prefix = f"lossy-{how}"
    with LossyProxy(moto_server.endpoint_url, how) as proxy:
        options = S3Options(endpoint_url=proxy.endpoint_url, region=REGION)
        store = await S3Store.open(moto_server.bucket, prefix, options)
        one = await open_table(store, PREFIX, "orders")
        await one.add([file(0, 0, 10)], seal(10))
        assert len(proxy.lost) == 1
        assert await fresh(lambda: open_table(store, PREFIX, "orders")) == [file(0, 0, 10)]
        await one.add([file(0, 10, 20)], seal(20))
        assert one.version == 2
        await store.close()


async def test_a_store_that_is_away_is_unavailable_and_its_commits_unknown(
    moto_server: Moto,
) -> None:
    with LossyProxy(moto_server.endpoint_url, "500") as proxy:
        options = S3Options(endpoint_url=proxy.endpoint_url, region=REGION)
        store = await S3Store.open(moto_server.bucket, "away", options)
        one, other = [await open_table(store, PREFIX, "orders") for _ in range(2)]
        await one.add([file(0, 0, 10)], seal(10))
        proxy.is_away = True
        with pytest.raises(CommitUnknown):
            await one.add([file(0, 10, 20)], seal(20))
        with pytest.raises(Unavailable):
            await one.refresh()
        with pytest.raises(Unavailable):
            await other.segments(0)
        assert await files_of(one) == [file(0, 0, 10)], "what was loaded stays"
        proxy.is_away = False
        await one.add([file(0, 10, 20)], seal(20))
        assert await files_of(other) == [file(0, 0, 10), file(0, 10, 20)]
        await store.close()
