"""The log's own commits to a table: outcomes of the PUT, other programs, checkpoints."""

import json
from collections.abc import Iterator
from pathlib import Path

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contract.test_delta import actions, log_of
from tests.contract.test_table import PREFIX, file, files_of, planned, seal
from tests.support.clock import ManualClock
from tests.support.faults import Fault, FaultyStore, Script
from tidelog.storage.core.errors import CommitUnknown, StoreRefused
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.tables import commit_put, delta
from tidelog.storage.tables.delta import DeltaManifest
from tidelog.storage.tables.delta_json import ENGINE
from tidelog.storage.tables.manifest import ManifestConflict, seal_app_id

LOG = f"{PREFIX}/_delta_log/"


class WithTables(FaultyStore):
    """A faulty way to a folder in which other programs find tables."""

    def table_uri(self, key: str) -> str:
        assert isinstance(self.inner, FolderStore)
        return self.inner.table_uri(key)


@pytest.fixture
async def folder(tmp_path: Path) -> Iterator[FolderStore]:
    store = FolderStore(tmp_path / "store")
    yield store
    await store.close()


@pytest.fixture
async def way(folder: FolderStore) -> WithTables:
    return WithTables(folder)


@pytest.fixture
async def table(way: WithTables) -> DeltaManifest:
    """A table with one segment, loaded."""
    manifest = DeltaManifest(way, PREFIX, "orders")
    await manifest.add([file(0, 0, 10)], seal(10))
    return manifest


def engine(folder: FolderStore, version: int) -> str:
    return actions(folder, version)[0]["commitInfo"]["engineInfo"]


async def test_a_commit_is_one_request(way: WithTables, table: DeltaManifest) -> None:
    way.answered.clear()
    await table.add([file(0, 10, 20)], seal(20))
    assert [answer.call.verb for answer in way.answered] == ["create"]
    assert await files_of(table) == [file(0, 0, 10), file(0, 10, 20)]
    assert await table.transaction_version(seal_app_id(0)) == 20


@pytest.mark.parametrize(
    "faults",
    [
        [Fault.ABSENT],
        [Fault.STORED],
        [Fault.OWN_412],
        [Fault.ABSENT, Fault.STORED],
        [Fault.ABSENT, Fault.REFUSED, Fault.OWN_412],
        [Fault.LATE, Fault.ABSENT],
    ],
)
async def test_an_unclear_answer_is_read_back(
    way: WithTables, table: DeltaManifest, faults: list[Fault]
) -> None:
    way.plan = Script("create", LOG, faults)
    await table.add([file(0, 10, 20)], seal(20))
    assert table.version == 2
    other = DeltaManifest(way, PREFIX)
    assert await files_of(other) == [file(0, 0, 10), file(0, 10, 20)]


async def test_a_refused_commit_is_not_done(way: WithTables, table: DeltaManifest) -> None:
    way.plan = Script("create", LOG, [Fault.REFUSED])
    with pytest.raises(StoreRefused):
        await table.add([file(0, 10, 20)], seal(20))
    await table.add([file(0, 10, 20)], seal(20))
    assert table.version == 2


async def test_a_commit_that_arrives_after_its_sender_gave_up_counts_once(
    way: WithTables, table: DeltaManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_put, "PUT_PAUSES_S", (0.01,))
    way.plan = Script("create", LOG, [Fault.LATE])
    way.late_s = 0.05
    with pytest.raises(CommitUnknown):
        await table.add([file(0, 10, 20)], seal(20))
    while table.version < 2:
        await table.refresh()
    await table.add([file(0, 10, 20)], seal(20))
    with pytest.raises(ManifestConflict):
        await table.add([file(0, 10, 25, unique="bad")], seal(25))
    assert table.version == 2


# -- others


async def test_a_foreign_commit_first_is_a_conflict(
    folder: FolderStore, table: DeltaManifest
) -> None:
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    foreign.create_write_transaction(
        [], mode="append", schema=foreign.schema(), partition_by=["partition"]
    )
    await table.add([file(0, 10, 20)], seal(20))  # it changed no file
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    path, values = "partition=0/x.parquet", {"partition": "0"}
    strange = deltalake.transaction.AddAction(path, 1, values, 0, True, "{}")
    foreign.create_write_transaction(
        [strange], mode="append", schema=foreign.schema(), partition_by=["partition"]
    )
    with pytest.raises(ManifestConflict, match="another program"):
        await table.add([file(0, 20, 30)], seal(30))
    assert "partition=0/x.parquet" in await table.paths()


async def test_a_replacement_by_another_broker_is_taken_over(
    way: WithTables, table: DeltaManifest
) -> None:
    """Its removes too: the view would have the rows twice."""
    other = DeltaManifest(way, PREFIX)
    new = file(0, 0, 10, unique="3e3e")
    await other.refresh()
    await other.replace([file(0, 0, 10)], [new], await planned(other), data_change=False)
    await table.add([file(0, 10, 20)], seal(20))
    assert await files_of(table) == [new, file(0, 10, 20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta.enableChangeDataFeed", "true"),
        ("delta.randomizeFilePrefixes", "true"),
        ("delta.checkpoint.writeStatsAsStruct", "true"),
    ],
)
async def test_properties_that_we_do_not_know_are_left_to_deltalake(
    folder: FolderStore, table: DeltaManifest, name: str, value: str
) -> None:
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    foreign.alter.set_table_properties({name: value}, raise_if_not_exists=False)
    with pytest.raises(ManifestConflict):  # the log's own view was older
        await table.add([file(0, 10, 20)], seal(20))
    await table.add([file(0, 10, 20)], seal(20))
    assert engine(folder, 1) == ENGINE
    assert engine(folder, table.version) != ENGINE
    assert await files_of(table) == [file(0, 0, 10), file(0, 10, 20)]
    await table.add([file(0, 20, 30)], seal(30))
    assert await table.transaction_version(seal_app_id(0)) == 30


async def test_a_view_that_was_suspended_in_the_put_is_dropped(
    folder: FolderStore, way: WithTables
) -> None:
    clock = ManualClock()
    table = DeltaManifest(way, PREFIX, "orders", clock)
    await table.add([file(0, 0, 10)], seal(10))
    real = way.create

    async def slow(*arguments):
        outcome = await real(*arguments)
        clock.advance(2 * 86_400)
        return outcome

    way.create = slow
    with pytest.raises(CommitUnknown, match="too long"):
        await table.add([file(0, 10, 20)], seal(20))
    way.create = real
    await table.refresh()
    assert table.version == 2


# -- checkpoints


async def test_a_checkpoint_is_the_table(
    folder: FolderStore, way: WithTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As deltalake reads it, without the commits that it replaces, and as deltalake makes it."""
    monkeypatch.setitem(delta._PROPERTIES, commit_put.CHECKPOINT_INTERVAL, "4")
    table = DeltaManifest(way, PREFIX, "orders")
    for number in range(1, 14):
        end = 10 * number
        files = [file(0, end - 10, end), file(3, end - 10, end)]
        await table.add(files, {**seal(end), seal_app_id(3): end})
        if number % 3 == 0:
            base = end - 30
            old = [segment for segment in await files_of(table) if segment.base_offset >= base]
            await table.replace(
                old, [file(0, base, end, unique="3e3e")], await planned(table), data_change=False
            )
    log = log_of(folder)
    newest = max(log.glob("*.checkpoint.parquet"))
    rows = pq.read_table(newest).to_pylist()
    before = adds(folder)
    for path in log.glob("0*.json"):
        if path.name[:20] <= newest.name[:20] and path.name[:20] != f"{table.version:020d}":
            path.unlink()
    assert adds(folder) == before
    foreign = deltalake.DeltaTable(folder.table_uri(PREFIX))
    assert foreign.transaction_version(seal_app_id(3)) == 130
    assert foreign.metadata().name == "orders"
    foreign.create_checkpoint()
    assert adds(folder) == before
    pointer = json.loads((log / "_last_checkpoint").read_text())
    assert pointer["numOfAddFiles"] == len(before)
    assert sum(row["remove"] is not None for row in rows) == 9
    # The next checkpoint is made from deltalake's.
    again = DeltaManifest(way, PREFIX)
    assert await files_of(again, 3) == await files_of(table, 3)
    for end in range(140, 190, 10):
        await again.add([file(0, end - 10, end)], seal(end))
    assert engine(folder, again.version) == ENGINE
    assert max(log.glob("*.checkpoint.parquet")).name[:20] == f"{again.version - 1:020d}"
    assert len(adds(folder)) == len(before) + 5


def adds(folder: FolderStore) -> list[dict]:
    delta = deltalake.DeltaTable(folder.table_uri(PREFIX))
    stream = pa.RecordBatchReader.from_stream(delta.get_add_actions(flatten=True))
    return sorted(stream.read_all().to_pylist(), key=lambda row: row["path"])
