"""Deliberate faults in the guards of backups (DESIGN 8), for tests/sim/mutations.py."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest

import tidelog.compaction.backups.backup
import tidelog.compaction.collect
from tidelog.compaction import repair_wal
from tidelog.compaction.backups.restore import _Restore
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.state.collection_holds import Hold
from tidelog.storage.state.producers import Producers
from tidelog.storage.state.topic import Topic
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.manifest import ManifestVersion

T = TypeVar("T")


def holds_are_passed_over() -> list[tuple[Any, str, Any]]:
    async def none(cluster: MaintenanceSession) -> list[Hold]:
        return []

    return [(tidelog.compaction.collect, "_holds", none)]


def tables_after_the_moment() -> list[tuple[Any, str, Any]]:
    async def newest(self: Any, topic: Topic, loaded: object) -> ManifestVersion:
        return await open_table(self.cluster.store, topic.prefix, topic.name).newest()

    return [(tidelog.compaction.backups.backup._Copy, "_version", newest)]


def tables_as_they_were_loaded() -> list[tuple[Any, str, Any]]:
    real = tidelog.compaction.backups.backup._Copy._version

    async def first(self: Any, topic: Topic, loaded: ManifestVersion | None) -> ManifestVersion:
        return loaded or await real(self, topic, loaded)

    return [(tidelog.compaction.backups.backup._Copy, "_version", first)]


def without_rebase(real: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """The same without a new base of producer ids."""

    async def done(*arguments: Any) -> T:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Producers, "rebase", lambda self, draw: None)
            return await real(*arguments)

    return done


def restored_ids_go_on() -> list[tuple[Any, str, Any]]:
    return [(_Restore, "run", without_rebase(_Restore.run))]


def repaired_ids_go_on() -> list[tuple[Any, str, Any]]:
    return [(repair_wal, "drop_after", without_rebase(repair_wal.drop_after))]


MUTATIONS = (
    ("collection passes over holds", holds_are_passed_over, ("backups",), 10),
    ("tables are copied as they are now", tables_after_the_moment, ("backups",), 80),
    ("tables are copied as they were", tables_as_they_were_loaded, ("backups",), 60),
    ("a restored cluster gives producer ids again", restored_ids_go_on, ("backups",), 10),
    ("a repaired WAL gives producer ids again", repaired_ids_go_on, ("backups",), 10),
)
