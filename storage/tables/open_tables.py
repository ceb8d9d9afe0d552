"""The open manifests of a broker, one for each topic that it has read or sealed.

I10: a deleted topic's manifest is dropped, so memory does not grow with created and deleted topics.
`doubts` has the tables that were in doubt at this broker's last check of them, by topic id.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from tidelog.storage.core.errors import TableInDoubt
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.foreign_commits import check
from tidelog.storage.tables.manifest import Table

log = logging.getLogger("tidelog.tables")


@dataclass
class _OpenTable:
    table: Table
    refreshed_s: float = -math.inf


class OpenTables:
    """The open manifests of one broker, owned by one event loop.

    `topic_of_id` returns a topic of the newest state that the broker has, `refresh` reads the WAL
    to its end.
    """

    def __init__(
        self,
        store: ObjectStore,
        topic_of_id: Callable[[str], Topic | None],
        refresh: Callable[[], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self.doubts: dict[str, TableInDoubt] = {}
        self._store = store
        self._clock = clock
        self.topic_of_id = topic_of_id
        self.refresh = refresh
        self._open: dict[str, _OpenTable] = {}

    def __len__(self) -> int:
        return len(self._open)

    def has(self, topic: Topic) -> bool:
        """Return whether the topic's manifest is open."""
        return topic.topic_id in self._open

    async def of(self, topic: Topic, *, age_max_s: float = math.inf) -> Table:
        """Return the topic's manifest.

        If this method has not refreshed it within the last `age_max_s` seconds, refresh it first.
        Raises Unavailable.
        """
        opened_table = self._open.get(topic.topic_id)
        if opened_table is None:
            opened_table = _OpenTable(
                open_table(self._store, topic.prefix, topic.name, self._clock)
            )
            if self._is_known(topic.topic_id):  # nothing would drop a deleted topic's table
                self._open[topic.topic_id] = opened_table
        if age_max_s < math.inf:
            now_s = asyncio.get_running_loop().time()
            if now_s - opened_table.refreshed_s > age_max_s:
                opened_table.refreshed_s = now_s
                await opened_table.table.refresh()
        return opened_table.table

    async def checked(self, topic: Topic, *, is_newest: bool = True) -> Table:
        """Return the topic's manifest at its newest version, or at the loaded one.

        Raises TableInDoubt if this version is not what the log put there. Raises Unavailable.
        """
        table = await self.of(topic)
        topic_of = partial(self.topic_of_id, topic.topic_id)
        try:
            await check(table, topic_of, self.refresh, is_newest=is_newest)
        except TableInDoubt as error:
            self.doubt(topic, error)
            raise
        self.doubt(topic, None)
        return table

    def doubt(self, topic: Topic, error: TableInDoubt | None) -> None:
        """Remember what a check of the topic's table found; log a change."""
        old_doubt = self.doubts.pop(topic.topic_id, None)
        if error is not None and self._is_known(topic.topic_id):
            self.doubts[topic.topic_id] = error
        if error is not None and (old_doubt is None or old_doubt.args != error.args):
            log.error("topic %s: %s", topic.name, error)
        elif error is None and old_doubt is not None:
            log.info("topic %s: its table is not in doubt any more", topic.name)

    def forget(self, topic_id: str) -> None:
        """Drop a deleted topic's manifest; a call on it may be in progress."""
        self._open.pop(topic_id, None)
        self.doubts.pop(topic_id, None)

    def forget_unknown(self) -> None:
        """Drop the manifests of topics that the cluster state no longer has."""
        for topic_id in [
            topic_id for topic_id in (*self._open, *self.doubts) if not self._is_known(topic_id)
        ]:
            self.forget(topic_id)

    def _is_known(self, topic_id: str) -> bool:
        return self.topic_of_id(topic_id) is not None
