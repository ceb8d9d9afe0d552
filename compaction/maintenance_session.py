"""A session of maintenance on a cluster: the WAL, the tables and the store's clock.

A session commits to the WAL through `WalView.commit`, as a broker does. The plans come from
compaction/plan.py and compaction/garbage.py. **On a crash**: a session has no state of its own, so
the next run continues.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence

from tidelog.storage.broker import Broker
from tidelog.storage.codec.entry import Commit, Draft
from tidelog.storage.core import object_keys
from tidelog.storage.core.actions import AnyAction
from tidelog.storage.core.errors import (
    Corrupt,
    LogError,
    TableInDoubt,
    Unavailable,
    UnknownTopic,
)
from tidelog.storage.core.log_settings import WalSettings
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.topic import Topic
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.tables.delta import open_table
from tidelog.storage.tables.foreign_commits import check
from tidelog.storage.tables.manifest import Table
from tidelog.storage.tables.open_tables import OpenTables
from tidelog.storage.wal.view import WalView
from tidelog.storage.wal.wal_objects import WalObjects, decode_checkpoint

log = logging.getLogger("tidelog.care")

ACTIONS_MAX = 1000
"""Actions in one commit, because an entry's header is bounded (I10)."""

_NEVER = sys.maxsize
_NO_CHECKPOINTS = WalSettings(checkpoint_entries=_NEVER, checkpoint_entries_max=_NEVER)
"""The view writes no checkpoint by itself; collection and `drop_after` write the checkpoints that
they need."""


def topics_of(state: ClusterState, names: Sequence[str] | None) -> list[Topic]:
    """Return the named topics, or all topics in order of names. Raises UnknownTopic."""
    return [state.topic(name) for name in (sorted(state.topics) if names is None else names)]


async def check_exists(store: ObjectStore, clock: Clock) -> None:
    """Raise StoreUnfit if the store has no cluster."""
    await WalObjects(store, clock).open_cluster(None, is_creating=False)


class MaintenanceSession:
    """A session on one cluster, owned by one event loop for one command or maintenance round."""

    def __init__(
        self,
        wal: WalView,
        *,
        is_shared: bool,
        is_reading: bool = False,
        open_tables: OpenTables | None = None,
    ) -> None:
        """Use `open` or `of_broker` instead. If the view is shared, `close` leaves it open."""
        self.store = wal.store
        self.clock = wal.clock
        self.wal = wal
        self.skipped: dict[str, LogError] = {}
        """Topics that were left as they are, by name, and why."""
        self._is_shared = is_shared
        self._is_reading = is_reading
        self._open_tables = open_tables
        self._tables: dict[str, Table] = {}

    @classmethod
    def of_broker(cls, broker: Broker, *, has_brokers_tables: bool = False) -> "MaintenanceSession":
        """Return a session on the broker's view and event loop, so nothing is loaded again.

        The session opens tables of its own, because the broker would keep all tables open that are
        opened through it. With `has_brokers_tables`, it uses the broker's where one is open: they
        are at the newest version if the broker seals the topic, and its next seal has no conflict.
        """
        open_tables = broker.stored.open_tables if has_brokers_tables else None
        return cls(broker.stored.wal, is_shared=True, open_tables=open_tables)

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        clock: Clock,
        *,
        report_damage: bool = True,
        is_reading: bool = False,
    ) -> "MaintenanceSession":
        """Open an existing cluster.

        Raises StoreUnfit if there is none, Corrupt, Unavailable. Without `report_damage`, this
        raises no Corrupt if the WAL is damaged, so that a scrub can begin and report all damage. A
        session with `is_reading` writes nothing. It is for scrubs and dry runs, and takes the
        store's time from this machine's clock.
        """
        writer = f"care-{clock.new_id().hex()}"
        objects = WalObjects(store, clock)
        cluster = await objects.open_cluster(None, is_creating=False)
        wal = WalView(objects, cluster, writer, _NO_CHECKPOINTS)
        try:
            await wal.load(())
        except Corrupt:
            if report_damage:
                raise
        return cls(wal, is_shared=False, is_reading=is_reading)

    @property
    def state(self) -> ClusterState:
        return self.wal.state

    async def refresh(self) -> None:
        """Refresh the state: it then holds every commit that finished before this call (I3)."""
        await self.wal.refresh()

    async def commit(self, actions: Sequence[AnyAction]) -> None:
        """Commit all actions, at most ACTIONS_MAX in one commit.

        Raises the refusal of an action, but not UnknownTopic, because a topic that was deleted
        meanwhile needs no maintenance. If one topic of a commit was deleted, each action of the
        commit is committed by itself.
        """
        for first in range(0, len(actions), ACTIONS_MAX):
            batch = list(actions[first : first + ACTIONS_MAX])
            (outcome,) = await self.wal.commit(Draft([Commit(self.clock.new_id(), batch)], [], []))
            if isinstance(outcome.refusal, UnknownTopic) and len(batch) > 1:
                for action in batch:
                    await self.commit([action])
            elif outcome.refusal is not None and not isinstance(outcome.refusal, UnknownTopic):
                raise outcome.refusal

    async def table(self, topic: Topic, *, is_newest: bool = True) -> Table:
        """Return the topic's table, refreshed to its newest version, or as it is loaded."""
        table = self._tables.get(topic.topic_id)
        if table is None:
            table = self._tables[topic.topic_id] = await self._open_table(topic)
        if is_newest:
            await table.refresh()
        return table

    async def _open_table(self, topic: Topic) -> Table:
        if self._open_tables is not None and self._open_tables.has(topic):
            return await self._open_tables.of(topic)
        return open_table(self.store, topic.prefix, topic.name, self.clock)

    async def checked_table(self, topic: Topic) -> Table:
        """Return the topic's table at its newest version.

        Raises TableInDoubt if this version is not what the log put there; Corrupt, Unavailable.
        """
        table = await self.table(topic)
        await check(table, lambda: self.state.topic_of_id(topic.topic_id), self.refresh)
        return table

    async def for_each(
        self, topics: Sequence[Topic], work: Callable[[Topic], Awaitable[None]]
    ) -> None:
        """Do the work for each topic, even if it fails for another topic.

        Add topics that are damaged or in doubt to `skipped`. After the last topic, raise the first
        other error.
        """
        failed: LogError | None = None
        for topic in topics:
            try:
                await work(topic)
            except Corrupt as error:
                self.skip(topic, error)
            except LogError as error:
                log.warning("topic %s: %s", topic.name, error)
                failed = failed or error
        if failed is not None:
            raise failed

    def skip(self, topic: Topic, error: LogError) -> None:
        """Note that the topic is left as it is."""
        if not isinstance(error, TableInDoubt):  # a broker logs a doubt once, a command shows it
            log.error("topic %s is left as it is: %s", topic.name, error)
        self.skipped[topic.name] = error

    async def checkpoint(self, key: str) -> ClusterState:
        """Read and verify the state of a checkpoint; raises Corrupt, ObjectNotFound."""
        cluster = self.wal.cluster
        body = await self.store.get(key)
        state = decode_checkpoint(body, key, cluster.cluster_id, cluster.bounds)
        if state.seq != object_keys.seq_of(key):
            raise Corrupt(key, f"has the state after entry {state.seq}")
        return state

    async def store_now_ms(self) -> int:
        """Return the time of the store's clock, because this clock stamps the objects.

        If the session only reads, return the time of this machine's clock.
        """
        if self._is_reading:
            return self.clock.now_ms()
        key = f"{object_keys.PROBE}{self.clock.new_id().hex()}/now"
        for pause_s in (0.05, 0.2, 1.0):
            await self.store.create(key, [b"now"])  # the listing shows whether it was created
            async for info in self.store.list(key):
                with contextlib.suppress(LogError):  # if this fails, collection deletes the object
                    await self.store.delete([key])
                return info.modified_ms
            await asyncio.sleep(pause_s)
        raise Unavailable(f"{self.store.url} does not answer: its clock cannot be read")

    async def close(self) -> None:
        if not self._is_shared:
            await self.wal.close()
