"""Another engine commits to a table. Readers give what was acked, and never pass over a hole."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import deltalake
import pytest

from tests.support.foreign_engines import (
    END,
    append_one,
    batch_offsets,
    broker_records,
    caring,
    delete_one,
    delete_segment,
    filled,
    optimize,
    outcome,
    restore,
    stream_offsets,
    table,
)
from tidelog.compaction.compact import compact
from tidelog.compaction.delete_records import delete_records
from tidelog.compaction.garbage import Grace
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.compaction.retention import retain
from tidelog.compaction.scrub import scrub
from tidelog.storage.core.errors import Corrupt, LogError
from tidelog.storage.tables.delta_log import VERSIONS_MAX, sync_log

ALL = list(range(END))


Remove = Callable[[deltalake.DeltaTable], None]
ways = pytest.mark.parametrize("remove", [restore, delete_segment])


def is_whole_or_refused(answer: list[int] | LogError) -> bool:
    """A reader gives all records, or says that the table is damaged."""
    return answer == ALL or isinstance(answer, Corrupt)


@ways
def test_a_batch_read_never_passes_over_a_hole(tmp_path: Path, remove: Remove) -> None:
    filled(tmp_path)
    assert batch_offsets(tmp_path) == ALL
    remove(table(tmp_path))
    assert is_whole_or_refused(outcome(lambda: batch_offsets(tmp_path)))


@ways
def test_a_stream_never_passes_over_a_hole(tmp_path: Path, remove: Remove) -> None:
    def streamed() -> list[int]:
        return [offset for batch in stream_offsets(tmp_path, 15) for offset in batch]

    filled(tmp_path)
    assert streamed() == ALL
    remove(table(tmp_path))
    assert is_whole_or_refused(outcome(streamed))


@ways
def test_a_reader_that_may_lose_data_says_what_it_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, remove: Remove
) -> None:
    filled(tmp_path)
    remove(table(tmp_path))
    remaining_offsets = batch_offsets(tmp_path, failOnDataLoss="false")
    assert set(range(20)) <= set(remaining_offsets)
    assert set(range(50, END)) <= set(remaining_offsets)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert remaining_offsets == ALL or warnings


@ways
def test_new_broker_reports_table_with_hole(tmp_path: Path, remove: Remove) -> None:
    records = filled(tmp_path)
    remove(table(tmp_path))
    try:
        served_records = broker_records(tmp_path)
    except Corrupt:
        return
    assert served_records == records


def test_compaction_never_merges_over_a_hole(tmp_path: Path) -> None:
    filled(tmp_path)
    delete_segment(table(tmp_path))
    old_files = table(tmp_path).file_uris()
    caring(tmp_path, lambda cluster: compact(cluster, None, is_dry=False))
    assert sorted(table(tmp_path).file_uris()) == sorted(old_files)


def test_compaction_by_key_never_hides_a_loss_from_scrub(tmp_path: Path) -> None:
    def is_whole() -> bool:
        return caring(tmp_path, lambda cluster: scrub(cluster, None, Grace())).is_whole

    filled(tmp_path, cleanup_policy="compact")
    assert is_whole()
    delete_segment(table(tmp_path))
    assert not is_whole()
    caring(tmp_path, lambda cluster: compact(cluster, None, is_dry=False, is_forced=True))
    assert not is_whole()


# -- commits that keep all segments


def z_order(delta: deltalake.DeltaTable) -> None:
    delta.optimize.z_order(["offset"])


def update_one(delta: deltalake.DeltaTable) -> None:
    delta.update(updates={"key": "arrow_cast('x', 'Binary')"}, predicate='"offset" = 3')


Commit = Callable[[deltalake.DeltaTable], None]
COMMITS = (optimize, z_order, delete_one, update_one, append_one)
commits = pytest.mark.parametrize("commit", COMMITS)


def committed(root: Path, commit: Commit) -> None:
    """The topic, and then the commit of another engine on its table."""
    delta = table(root)
    old_version = delta.version()
    commit(delta)
    assert table(root).version() == old_version + 1


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
    old_count = len(table(tmp_path).file_uris())
    caring(tmp_path, remove)
    assert len(table(tmp_path).file_uris()) < old_count


@pytest.mark.parametrize(
    ("first", "synced_from"), [(0, 1000 - VERSIONS_MAX), (1, 1), (700, 700), (1000, 1000)]
)
def test_a_process_syncs_all_versions_that_came_after_its_last_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, synced_from: int
) -> None:
    log = tmp_path / "_delta_log"
    log.mkdir()
    for version in range(1001):
        (log / f"{version:020d}.json").touch()
    (log / f"{1000:020d}.checkpoint.parquet").touch()
    (log / "_last_checkpoint").touch()
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
    )
    sync_log(log, first, 1000)
    commits = [f"{version:020d}.json" for version in range(synced_from, 1001)]
    other_names = [f"{1000:020d}.checkpoint.parquet", "_last_checkpoint", "_delta_log"]
    assert sorted(synced) == sorted(commits + other_names + ([tmp_path.name] if first == 0 else []))
