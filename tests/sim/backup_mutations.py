"""Deliberate faults in the guards of backups (DESIGN 8), for tests/sim/mutations.py."""

from typing import Any

import tidelog.compaction.backups.backup
import tidelog.compaction.collect
from tidelog.compaction.session import MaintenanceSession
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.state.holds import Hold
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.manifest import ManifestVersion


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


MUTATIONS = (
    ("collection passes over holds", holds_are_passed_over, ("backups",), 10),
    ("tables are copied as they are now", tables_after_the_moment, ("backups",), 80),
    ("tables are copied as they were", tables_as_they_were_loaded, ("backups",), 60),
)
