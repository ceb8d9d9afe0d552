"""Tables in doubt are repaired: restored where the objects are there, else adopted as they are."""

import shutil
from pathlib import Path

import deltalake
import pytest

from tests.support.broker_log import BrokerLog
from tests.support.foreign_engines import END, batch_offsets, broker_records, caring, filled, table
from tidelog.compaction.garbage import Grace
from tidelog.compaction.repair_tables import (
    ADOPT,
    NONE,
    RESTORE,
    Repair,
    repair,
    undo_rearrangement,
)
from tidelog.compaction.scrub import scrub
from tidelog.compaction.session import MaintenanceSession

ALL = list(range(END))


def optimize(delta: deltalake.DeltaTable) -> None:
    delta.optimize.compact()


def delete_one(delta: deltalake.DeltaTable) -> None:
    delta.delete('"offset" = 3')


def delete_segment(delta: deltalake.DeltaTable) -> None:
    delta.delete('"offset" >= 20 and "offset" < 30')


def delete_all(delta: deltalake.DeltaTable) -> None:
    delta.delete()


def restore(delta: deltalake.DeltaTable) -> None:
    delta.restore(2)


def append_one(delta: deltalake.DeltaTable) -> None:
    row = delta.to_pyarrow_table().slice(0, 1)
    deltalake.write_deltalake(delta, row, mode="append")


def overwrite(delta: deltalake.DeltaTable) -> None:
    deltalake.write_deltalake(delta, delta.to_pyarrow_table(), mode="overwrite")


def repaired(root: Path, *, is_dry: bool = False, way: str | None = None) -> list[Repair]:
    return caring(root, lambda cluster: repair(cluster, None, is_dry=is_dry, way=way))


def is_whole(root: Path) -> bool:
    return caring(root, lambda cluster: scrub(cluster, None, Grace())).is_whole


def sealed(root: Path) -> int:
    broker = BrokerLog(root)
    try:
        return broker.seal("t")
    finally:
        broker.close()


COMMITS = [optimize, delete_one, delete_segment, delete_all, restore, append_one, overwrite]


@pytest.mark.parametrize("commit", COMMITS)
def test_what_the_log_put_there_comes_back(tmp_path: Path, commit) -> None:
    records = filled(tmp_path)
    commit(table(tmp_path))
    before = table(tmp_path).version()
    (proposed,) = repaired(tmp_path, is_dry=True)
    assert (proposed.way, proposed.is_done) == (RESTORE, False)
    assert table(tmp_path).version() == before
    (done,) = repaired(tmp_path)
    assert (done.way, done.is_done) == (RESTORE, True)
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
    (done,) = repaired(tmp_path, way=ADOPT)
    assert (done.way, list(done.lost)) == (ADOPT, [(0, 3, 4), (0, 20, 30)])
    assert is_whole(tmp_path)
    left = [offset for offset in ALL if offset != 3 and not 20 <= offset < 30]
    assert batch_offsets(tmp_path) == left
    assert [record.offset for record in broker_records(tmp_path)] == left
    assert sealed(tmp_path) == 5
    assert batch_offsets(tmp_path) == left


def test_rearranged_rows_are_adopted_where_the_originals_are_gone(tmp_path: Path) -> None:
    records = filled(tmp_path)
    optimize(table(tmp_path))
    table(tmp_path).vacuum(0, enforce_retention_duration=False, dry_run=False)
    (done,) = repaired(tmp_path)
    assert (done.way, list(done.lost), done.is_done) == (ADOPT, [], True)
    assert is_whole(tmp_path)
    assert broker_records(tmp_path) == records


def test_a_table_that_lost_all_moves_the_log_start(tmp_path: Path) -> None:
    filled(tmp_path)
    delete_all(table(tmp_path))
    (done,) = repaired(tmp_path, way=ADOPT)
    assert list(done.lost) == [(0, 0, 50)]
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
    (done,) = repaired(tmp_path)
    assert (done.way, done.is_done, done.added, done.removed) == (RESTORE, True, 0, 0)
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
    broker = BrokerLog(original)
    broker.create("t", 1)
    broker.append("t", {0: [b"a", b"b"]})
    copy.mkdir()
    shutil.copy(original / "cluster.json", copy)
    shutil.copytree(original / "wal", copy / "wal")
    broker.append("t", {0: [b"c", b"d"]})
    broker.seal("t")
    broker.close()
    shutil.copytree(original / "topics", copy / "topics")
    assert not is_whole(copy)
    broker = BrokerLog(copy)
    for value in (b"x", b"y", b"z"):
        broker.append("t", {0: [value]})
    broker.close()
    assert not is_whole(copy)
    (done,) = repaired(copy)
    assert (done.way, done.is_done) == (RESTORE, True)
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
