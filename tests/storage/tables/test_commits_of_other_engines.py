"""Another engine commits to a table. Records that brokers acked stay readable."""

from collections.abc import Callable
from pathlib import Path

import deltalake
import pytest

from tests.support.foreign_engines import (
    END,
    batch_offsets,
    broker_records,
    caring,
    filled,
    stream_offsets,
    table,
)
from tidelog.compaction.retention import delete_records, retain
from tidelog.compaction.session import MaintenanceSession


def optimize(delta: deltalake.DeltaTable) -> None:
    delta.optimize.compact()


def z_order(delta: deltalake.DeltaTable) -> None:
    delta.optimize.z_order(["offset"])


def delete_one(delta: deltalake.DeltaTable) -> None:
    delta.delete('"offset" = 3')


def update_one(delta: deltalake.DeltaTable) -> None:
    delta.update(updates={"key": "arrow_cast('x', 'Binary')"}, predicate='"offset" = 3')


def append_one(delta: deltalake.DeltaTable) -> None:
    row = delta.to_pyarrow_table().slice(0, 1)
    deltalake.write_deltalake(delta, row, mode="append")


Commit = Callable[[deltalake.DeltaTable], None]
COMMITS = (optimize, z_order, delete_one, update_one, append_one)
commits = pytest.mark.parametrize("commit", COMMITS)


def committed(root: Path, commit: Commit) -> None:
    """The topic, and then the commit of another engine on its table."""
    delta = table(root)
    before = delta.version()
    commit(delta)
    assert table(root).version() == before + 1


@commits
def test_a_batch_read_gives_what_was_acked(tmp_path: Path, commit: Commit) -> None:
    filled(tmp_path)
    committed(tmp_path, commit)
    assert batch_offsets(tmp_path) == list(range(END))


@pytest.mark.parametrize("commit", [optimize, delete_one])
def test_a_stream_gives_what_was_acked(tmp_path: Path, commit: Commit) -> None:
    filled(tmp_path)
    committed(tmp_path, commit)
    batches = list(stream_offsets(tmp_path, 15))
    assert [offset for batch in batches for offset in batch] == list(range(END))


@commits
def test_a_new_broker_gives_what_was_acked(tmp_path: Path, commit: Commit) -> None:
    records = filled(tmp_path)
    committed(tmp_path, commit)
    assert broker_records(tmp_path) == records


# -- a table to which another engine only lets rows be appended


async def delete_twenty(cluster: MaintenanceSession) -> None:
    await delete_records(cluster, "t", {0: 20}, is_dry=False)


async def retain_all(cluster: MaintenanceSession) -> None:
    assert await retain(cluster, None, is_dry=False)


@pytest.mark.parametrize("remove", [delete_twenty, retain_all])
def test_retention_works_on_a_table_that_only_takes_appends(tmp_path: Path, remove) -> None:
    filled(tmp_path)
    table(tmp_path).alter.set_table_properties({"delta.appendOnly": "true"})
    before = len(table(tmp_path).file_uris())
    caring(tmp_path, remove)
    assert len(table(tmp_path).file_uris()) < before
