"""Tables in doubt are repaired: restored where the objects are there, else adopted as they are."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

import deltalake
import polars as pl
import pytest

from tests.support.broker_log import BrokerLog
from tests.support.foreign_engines import (
    END,
    ROWS,
    SEGMENTS,
    append_one,
    batch_offsets,
    broker_records,
    caring,
    delete_one,
    delete_segment,
    filled,
    optimize,
    restore,
    table,
    table_uri,
)
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.repair_tables import (
    ADOPT,
    NONE,
    RESTORE,
    Repair,
    repair,
    undo_rearrangement,
)
from tidelog.compaction.scrub import ScrubReport, scrub
from tidelog.storage.core.errors import Corrupt, LogError

ALL = list(range(END))


def delete_all(delta: deltalake.DeltaTable) -> None:
    delta.delete()


def overwrite(delta: deltalake.DeltaTable) -> None:
    deltalake.write_deltalake(delta, delta.to_pyarrow_table(), mode="overwrite")


def repaired(root: Path, *, is_dry: bool = False, way: str | None = None) -> list[Repair]:
    return caring(root, lambda cluster: repair(cluster, None, is_dry=is_dry, way=way))


def is_whole(root: Path) -> bool:
    return caring(root, lambda cluster: scrub(cluster, None, Grace())).is_whole


def sealed(root: Path) -> int:
    with BrokerLog(root) as broker:
        return broker.seal("t")


COMMITS = [optimize, delete_one, delete_segment, delete_all, restore, append_one, overwrite]


@pytest.mark.parametrize("commit", COMMITS)
def test_what_the_log_put_there_comes_back(tmp_path: Path, commit) -> None:
    records = filled(tmp_path)
    commit(table(tmp_path))
    old_version = table(tmp_path).version()
    (proposed,) = repaired(tmp_path, is_dry=True)
    assert (proposed.way, proposed.is_done) == (RESTORE, False)
    assert table(tmp_path).version() == old_version
    (result,) = repaired(tmp_path)
    assert (result.way, result.is_done) == (RESTORE, True)
    assert repaired(tmp_path) == []
    assert is_whole(tmp_path)
    assert broker_records(tmp_path) == records
    assert sealed(tmp_path) == 5
    assert batch_offsets(tmp_path) == ALL


def test_after_several_foreign_commits_between_seals(tmp_path: Path) -> None:
    """A broker of version 0.1 seals on into a table that others changed."""
    records = filled(tmp_path)
    delete_one(table(tmp_path))
    optimize(table(tmp_path))
    append_one(table(tmp_path))
    assert batch_offsets(tmp_path) == ALL
    repaired(tmp_path)
    assert is_whole(tmp_path)
    assert broker_records(tmp_path) == records


def test_adopted_rows_are_segments_and_the_lost_ones_are_named(tmp_path: Path) -> None:
    filled(tmp_path)
    delete_one(table(tmp_path))
    delete_segment(table(tmp_path))
    (result,) = repaired(tmp_path, way=ADOPT)
    assert (result.way, list(result.lost)) == (ADOPT, [(0, 3, 4), (0, 20, 30)])
    assert is_whole(tmp_path)
    remaining_offsets = [offset for offset in ALL if offset != 3 and not 20 <= offset < 30]
    assert batch_offsets(tmp_path) == remaining_offsets
    assert [record.offset for record in broker_records(tmp_path)] == remaining_offsets
    assert sealed(tmp_path) == 5
    assert batch_offsets(tmp_path) == remaining_offsets


def test_rearranged_rows_are_adopted_where_the_originals_are_gone(tmp_path: Path) -> None:
    records = filled(tmp_path)
    optimize(table(tmp_path))
    table(tmp_path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    (result,) = repaired(tmp_path)
    assert (result.way, list(result.lost), result.is_done) == (ADOPT, [], True)
    assert is_whole(tmp_path)
    assert broker_records(tmp_path) == records


def test_a_table_that_lost_all_moves_the_log_start(tmp_path: Path) -> None:
    filled(tmp_path)
    delete_all(table(tmp_path))
    (result,) = repaired(tmp_path, way=ADOPT)
    assert list(result.lost) == [(0, 0, 50)]
    assert [record.offset for record in broker_records(tmp_path)] == ALL[50:]
    assert is_whole(tmp_path)


def test_a_row_that_is_there_twice_is_not_adopted(tmp_path: Path) -> None:
    filled(tmp_path)
    append_one(table(tmp_path))
    (proposed,) = repaired(tmp_path, way=ADOPT)
    assert (proposed.way, proposed.is_done) == (NONE, False)
    assert "two files" in proposed.what


def test_a_lost_transaction_is_set_again(tmp_path: Path) -> None:
    records = filled(tmp_path)
    *_, last = sorted(tmp_path.glob("topics/*/_delta_log/*.json"))
    lines = last.read_text().splitlines()
    last.write_text("\n".join(line for line in lines if '"txn"' not in line))
    assert not is_whole(tmp_path)
    (result,) = repaired(tmp_path)
    assert (result.way, result.is_done, result.added, result.removed) == (RESTORE, True, 0, 0)
    assert is_whole(tmp_path)
    assert broker_records(tmp_path) == records
    assert sealed(tmp_path) == 5


def test_a_log_that_cannot_be_read_needs_a_copy(tmp_path: Path) -> None:
    filled(tmp_path)
    *_, last = sorted(tmp_path.glob("topics/*/_delta_log/*.json"))
    last.write_bytes(last.read_bytes()[:-60])
    (proposed,) = repaired(tmp_path)
    assert (proposed.way, proposed.is_done) == (NONE, False)
    assert last.name in proposed.why


def test_a_table_of_a_later_moment_than_the_wal(tmp_path: Path) -> None:
    """The copy of D4: the WAL before the table. The records of the WAL stay, the table's go."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    with BrokerLog(original) as broker:
        broker.create("t", 1)
        broker.append("t", {0: [b"a", b"b"]})
        copy.mkdir()
        shutil.copy(original / "cluster.json", copy)
        shutil.copytree(original / "wal", copy / "wal")
        broker.append("t", {0: [b"c", b"d"]})
        broker.seal("t")
    shutil.copytree(original / "topics", copy / "topics")
    assert not is_whole(copy)
    with BrokerLog(copy) as broker:
        for values in ([], [b"x", b"y", b"z"]):
            for value in values:
                broker.append("t", {0: [value]})
            with contextlib.suppress(LogError):
                broker.seal("t")
            assert [record.value for record in broker.records("t")] == [b"a", b"b", *values]
    assert not is_whole(copy)
    (result,) = repaired(copy)
    assert (result.way, result.is_done) == (RESTORE, True)
    assert is_whole(copy)
    assert sealed(copy) == 5
    assert [record.value for record in broker_records(copy)] == [b"a", b"b", b"x", b"y", b"z"]
    assert is_whole(copy)


@pytest.mark.parametrize(("commit", "is_undone"), [(optimize, True), (delete_one, False)])
def test_only_a_rearrangement_is_undone_unasked(tmp_path: Path, commit, is_undone: bool) -> None:
    records = filled(tmp_path)
    commit(table(tmp_path))

    async def undo(cluster: MaintenanceSession) -> bool:
        return await undo_rearrangement(cluster, cluster.state.topic("t"))

    assert caring(tmp_path, undo) == is_undone
    assert is_whole(tmp_path) == is_undone
    assert broker_records(tmp_path) == records


# -- copies of a running cluster, folder after folder


ORDERS = (
    ("wal", "topics", "checkpoints", "cluster.json"),
    ("cluster.json", "wal", "checkpoints", "topics"),
    ("cluster.json", "topics", "checkpoints", "wal"),
)
orders = pytest.mark.parametrize("order", ORDERS)


def copied(root: Path, order: tuple[str, ...]) -> Path:
    """A copy of one folder after the other; between two of them records are written and sealed."""
    original, copy = root / "original", root / "copy"
    with BrokerLog(original) as broker:
        broker.create("t", 2)
        copy.mkdir()
        for number, name in enumerate(order):
            for partition in range(2):
                broker.append("t", {partition: [b"%s %d" % (name.encode(), number)] * 3})
            broker.seal("t")
            source = original / name
            if source.is_dir():
                shutil.copytree(source, copy / name)
            elif source.exists():
                shutil.copy(source, copy)
    return copy


def scrubbed(root: Path) -> ScrubReport:
    return caring(root, lambda cluster: scrub(cluster, None, Grace()))


@orders
def test_a_scrub_names_the_copy(tmp_path: Path, order: tuple[str, ...]) -> None:
    copy = copied(tmp_path, order)
    report = scrubbed(copy)
    assert not report.is_whole
    assert any("topics/t-" in str(finding) for finding in report.findings)


@orders
def test_copy_gives_no_offset_twice(tmp_path: Path, order: tuple[str, ...]) -> None:
    copy = copied(tmp_path, order)
    with BrokerLog(copy) as broker:
        end = broker.log.state.partition("t", 0).high_watermark
        start = broker.log.state.partition("t", 0).sealed_end
        expected = _tail(broker, start)
        assert len(expected) == end - start
        for number in range(12):
            broker.append("t", {0: [b"new %d" % number]})
            with contextlib.suppress(Corrupt):
                broker.seal("t")
        expected += [b"new %d" % number for number in range(12)]
        assert _tail(broker, start) == expected
    assert not scrubbed(copy).is_whole


def _tail(broker: BrokerLog, start: int) -> list[bytes]:
    values: list[bytes] = []
    while True:
        fetched = broker._runner.run(broker.log.records.fetch("t", 0, start, bytes_max=1 << 20))
        if not fetched.pieces:
            return values
        for piece in fetched.pieces:
            values += piece.batch.column("value").to_pylist()
        start = fetched.next_offset


FIRST_KEPT = ROWS + ROWS // 2
"""In the middle of the second segment."""


def by_deltalake(uri: str) -> list[int]:
    query = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(uri))
    batches = query.execute('select "offset" from t')
    return sorted(offset for batch in batches for offset in batch.column("offset").to_pylist())


def by_polars(uri: str) -> list[int]:
    return sorted(pl.scan_delta(uri).select("offset").collect()["offset"].to_list())


@pytest.mark.parametrize("read", [by_deltalake, by_polars])
def test_engines_see_no_deleted_records(tmp_path: Path, read: Callable[[str], list[int]]) -> None:
    filled(tmp_path)
    assert read(table_uri(tmp_path)) == list(range(SEGMENTS * ROWS))
    cut = {0: FIRST_KEPT}
    caring(tmp_path, lambda cluster: delete_records(cluster, "t", cut, is_dry=False))
    assert batch_offsets(tmp_path) == list(range(FIRST_KEPT, END))
    assert read(table_uri(tmp_path)) == list(range(FIRST_KEPT, SEGMENTS * ROWS))
