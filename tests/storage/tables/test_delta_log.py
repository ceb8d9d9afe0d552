"""Which files of a Delta log are synced."""

import os
from pathlib import Path

import pytest

from tidelog.storage.tables.delta_log import VERSIONS_MAX, sync_log


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
    others = [f"{1000:020d}.checkpoint.parquet", "_last_checkpoint", "_delta_log"]
    assert sorted(synced) == sorted(commits + others + ([tmp_path.name] if first == 0 else []))
