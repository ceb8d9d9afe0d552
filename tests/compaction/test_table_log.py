"""Collection deletes what checkpoints replace in the logs of tables, and a hold keeps it."""

import os
from pathlib import Path

import deltalake
import pytest

from tests.compaction.test_backup import backed_up, damage_of, on, records, restored
from tests.support.broker_log import BrokerLog
from tidelog.compaction import garbage
from tidelog.compaction.collect import CollectionPlan, collect, plan
from tidelog.compaction.garbage import LOG_RETENTION_MS, Grace
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.core.actions import ReleaseHold, TakeHold
from tidelog.storage.store.object_store import ObjectInfo
from tidelog.storage.tables import delta

LOG = "topics/t-1/_delta_log/"
DAY_MS = 86_400_000


def log_infos(commits: dict[int, int], checkpoints: list[int]) -> list[ObjectInfo]:
    """The files of a log by version. `commits` has the age of each commit in days, at day 100."""
    at_ms = {version: (100 - age) * DAY_MS for version, age in commits.items()}
    return [
        *(ObjectInfo(f"{LOG}{version:020}.json", 1, time_ms) for version, time_ms in at_ms.items()),
        *(
            ObjectInfo(f"{LOG}{version:020}.checkpoint.parquet", 1, at_ms[version])
            for version in checkpoints
        ),
        ObjectInfo(f"{LOG}_last_checkpoint", 1, 0),
        ObjectInfo(f"{LOG}{0:020}.crc", 1, 0),
    ]


@pytest.mark.parametrize(
    ("ages", "checkpoints", "base", "deleted"),
    [
        ([20, 19, 18, 17], [], -1, 0),
        ([20, 19, 18, 17], [2], 2, 2),  # the newest version is 3, however old it is
        ([20, 19, 18, 17], [1, 3], 3, 4),
        ([20, 19, 18, 6], [2], 2, 2),  # seven days ago, version 2 was the newest
        ([20, 19, 6, 5], [2], -1, 0),  # ... version 1
        ([20, 19, 6, 5], [1, 3], 1, 1),
        ([6, 5, 4, 3], [0, 2], -1, 0),
        ([6, 20, 20, 20], [3], -1, 0),  # the store's clock went back
    ],
)
def test_versions_of_seven_days_can_be_read(
    ages: list[int], checkpoints: list[int], base: int, deleted: int
) -> None:
    infos = log_infos(dict(enumerate(ages)), checkpoints)
    result = garbage.of_log(infos, 100 * DAY_MS, LOG_RETENTION_MS)
    assert result[0] == base
    assert len(result[1]) == deleted
    names = [garbage_object.key.removeprefix(LOG) for garbage_object in result[1]]
    assert all(int(name[:20]) < base for name in names)
    assert not [name for name in names if name.endswith(".crc")]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A topic with a commit for each of 12 seals, a checkpoint after five commits, and a log that
    is a month old. Another commit with a checkpoint follows."""
    monkeypatch.setattr(delta, "CHECKPOINT_INTERVAL", 5)
    monkeypatch.setitem(delta._PROPERTIES, "delta.checkpointInterval", "5")
    with BrokerLog(tmp_path / "log") as broker:
        broker.create("t", 1)
        for number in range(12):
            sealed(broker, number)
        for path in log_of(tmp_path / "log").iterdir():
            at_s = path.stat().st_mtime - 30 * 86_400
            os.utime(path, (at_s, at_s))
    return tmp_path / "log"


def sealed(broker: BrokerLog, number: int) -> None:
    broker.append("t", {0: [b"%d" % number]})
    broker.seal("t")


def log_of(root: Path) -> Path:
    (folder,) = (root / "topics").glob("t-*/_delta_log")
    return folder


def versions(root: Path) -> list[int]:
    return sorted(int(path.name[:20]) for path in log_of(root).glob("*.json"))


async def collected(cluster: MaintenanceSession) -> CollectionPlan:
    planned = await plan(cluster, Grace())
    await collect(cluster, planned)
    return planned


def test_a_hold_keeps_the_log_of_a_table_also_from_the_commits_of_brokers(root: Path) -> None:
    """A backup that takes long names versions that a commit of a broker must not clean up."""

    async def hold(cluster: MaintenanceSession) -> None:
        await cluster.commit([TakeHold("backup-1", 3_600_000)])

    async def release(cluster: MaintenanceSession) -> None:
        await cluster.commit([ReleaseHold("backup-1")])

    on(root, hold)
    before = versions(root)
    with BrokerLog(root) as broker:
        for number in range(12, 18):  # with a checkpoint
            sealed(broker, number)
        expected = broker.records("t")
    assert not on(root, collected).garbage
    assert set(before) < set(versions(root))
    on(root, release)
    on(root, collected)
    assert versions(root) == list(range(9, 19))
    assert records(root, "t") == expected
    assert damage_of(root) == []
    assert deltalake.DeltaTable(log_of(root).parent).version() == 18
    assert not on(root, collected).garbage


def test_the_log_stays_if_the_checkpoint_that_replaces_it_cannot_be_read(root: Path) -> None:
    with BrokerLog(root) as broker:
        sealed(broker, 12)
    before = versions(root)
    checkpoint = max(log_of(root).glob("*.checkpoint.parquet"))
    body = checkpoint.read_bytes()
    stat = checkpoint.stat()
    checkpoint.write_bytes(body[: len(body) // 2])
    os.utime(checkpoint, (stat.st_mtime, stat.st_mtime))
    on(root, collected)
    assert versions(root) == before
    checkpoint.write_bytes(body)
    os.utime(checkpoint, (stat.st_mtime, stat.st_mtime))
    on(root, collected)
    assert len(versions(root)) < len(before)
    assert damage_of(root) == []


def test_a_longer_retention_of_the_table_counts(root: Path) -> None:
    table = deltalake.DeltaTable(log_of(root).parent)
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 60 days"})
    before = versions(root)
    on(root, collected)
    assert versions(root) == before
    table.alter.set_table_properties({"delta.logRetentionDuration": "interval 1 day"})
    on(root, collected)
    assert len(versions(root)) < len(before)


def test_a_backup_of_a_table_with_a_collected_log(root: Path, tmp_path: Path) -> None:
    on(root, collected)
    assert backed_up(root, tmp_path / "place").doubts == []
    restored(tmp_path / "place", tmp_path / "new")
    assert records(tmp_path / "new", "t") == records(root, "t")
