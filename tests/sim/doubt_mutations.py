"""Deliberate faults in the guards of tables in doubt (DESIGN 8), for tests/sim/mutations.py."""

import asyncio
from collections.abc import Callable
from typing import Any

import tidelog.compaction.collect
import tidelog.compaction.maintenance_session
import tidelog.storage.tables.delta
import tidelog.storage.tables.open_tables
from tidelog.compaction.maintenance_session import MaintenanceSession
from tidelog.storage.core.errors import LogError
from tidelog.storage.seal.sealer import Sealer
from tidelog.storage.state.cluster_state import ClusterState


def doubt_is_obeyed() -> list[tuple[Any, str, Any]]:
    async def check(table: Any, topic_of: Any, refresh: Any) -> None:
        await table.refresh()

    return [
        (tidelog.storage.tables.open_tables, "check", check),
        (tidelog.compaction.maintenance_session, "check", check),
    ]


def doubt_is_collected() -> list[tuple[Any, str, Any]]:
    search = tidelog.compaction.collect._GarbageSearch
    real = search._table

    async def of_table(self: Any, *arguments: Any) -> None:
        blind = MaintenanceSession(self._cluster.wal, is_shared=True)
        blind.checked_table = blind.table  # type: ignore[method-assign]
        seeing, self._cluster = self._cluster, blind
        try:
            await real(self, *arguments)
        finally:
            self._cluster = seeing

    return [(search, "_table", of_table)]


def newest_is_served() -> list[tuple[Any, str, Any]]:
    async def served(history: Any, newest: Any) -> Any:
        return newest

    return [(tidelog.storage.tables.delta, "served", served)]


def one_doubt_stops_all() -> list[tuple[Any, str, Any]]:
    async def run(self: Sealer, state_of: Callable[[], ClusterState]) -> None:
        while True:
            await asyncio.sleep(self.settings.check_interval_s)
            state = state_of()
            try:
                for topic_id, numbers in self.due(state).items():
                    topic = state.topic_of_id(topic_id)
                    if topic is not None:
                        await self.seal(topic, numbers)
            except LogError:
                self.counters.failures += 1

    return [(Sealer, "run", run)]
