"""A cluster as those see it who care for it beside its brokers: WAL, tables, the store's clock.

Writes to the WAL as any broker does, through `Wal.commit`, and to tables under the care lock of the
partition. Holds nothing that must survive: whoever dies here is followed by the next run. Knows no
HTTP, and no plan: what is to be done is decided in compaction/plan.py and compaction/garbage.py.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence

from storage import keys
from storage.chain import decode_checkpoint
from storage.clock import Clock
from storage.entry import AnyAction, Commit, Draft
from storage.errors import Corrupt, LogError, Unavailable, UnknownTopic
from storage.manifest import Table
from storage.objectstore import ObjectStore
from storage.state import ClusterState, Topic
from storage.table import open_table
from storage.wal import Wal, WalSettings

ACTIONS_MAX = 1000
"""Of one commit; an entry's header is bounded (I10)."""

_NEVER = sys.maxsize
_NO_CHECKPOINTS = WalSettings(checkpoint_entries=_NEVER, checkpoint_entries_max=_NEVER)
"""Collection alone writes one, when it wants one."""


class Cluster:
    """Owned by one event loop, for as long as a command or a round of duty takes."""

    def __init__(self, store: ObjectStore, clock: Clock, wal: Wal) -> None:
        """Use `open`."""
        self.store = store
        self.clock = clock
        self.wal = wal
        self._tables: dict[str, Table] = {}

    @classmethod
    async def open(
        cls, store: ObjectStore, clock: Clock, *, is_damage_told: bool = True
    ) -> "Cluster":
        """Raises StoreUnfit where no cluster is, Corrupt, Unavailable. Unless damage is told here,
        it is told by whatever needs the state first: a scrub finds out more than the first of it.
        """
        writer = f"care-{clock.new_id().hex()[:12]}"
        wal = Wal(store, clock, writer, _NO_CHECKPOINTS)
        try:
            await wal.open(found=False)
        except Corrupt:
            if is_damage_told:
                raise
        return cls(store, clock, wal)

    @property
    def state(self) -> ClusterState:
        return self.wal.state

    async def refresh(self) -> None:
        """Afterwards the state holds whatever was committed before this call (I3)."""
        await self.wal.refresh()

    async def commit(self, actions: Sequence[AnyAction]) -> None:
        """All actions, in commits of bounded size; each may be repeated. Raises what refused one,
        unless its topic was deleted meanwhile: then there is nothing left to care for."""
        for first in range(0, len(actions), ACTIONS_MAX):
            some = list(actions[first : first + ACTIONS_MAX])
            (outcome,) = await self.wal.commit(Draft([Commit(self.clock.new_id(), some)], [], []))
            if isinstance(outcome.refusal, UnknownTopic) and len(some) > 1:
                for each in some:
                    await self.commit([each])
            elif outcome.refusal is not None and not isinstance(outcome.refusal, UnknownTopic):
                raise outcome.refusal

    def topics(self, names: Sequence[str] | None) -> list[Topic]:
        """Those of the names, or all in order; raises UnknownTopic."""
        if names is None:
            return [self.state.topics[name] for name in sorted(self.state.topics)]
        return [self.state.topic(name) for name in names]

    async def table(self, topic: Topic) -> Table:
        """The topic's table in its newest version."""
        table = self._tables.get(topic.topic_id)
        if table is None:
            table = await open_table(self.store, topic.prefix, topic.name)
            self._tables[topic.topic_id] = table
        await table.refresh()
        return table

    async def checkpoint(self, key: str) -> ClusterState:
        """The state in a checkpoint, verified; raises Corrupt, NotFound."""
        cluster_id = self.wal.cluster.cluster_id
        state = decode_checkpoint(await self.store.get(key), key, cluster_id)
        if state.seq != keys.seq_of(key):
            raise Corrupt(key, f"is number {state.seq}")
        return state

    async def store_now_ms(self) -> int:
        """The time by the clock that stamps objects: ages are taken from it and from no other."""
        key = f"{keys.PROBE}{self.clock.new_id().hex()}/now"
        for pause_s in (0.05, 0.2, 1.0):
            await self.store.create(key, [b"now"])  # whatever the outcome: is it there?
            async for info in self.store.list(key):
                with contextlib.suppress(LogError):  # a few bytes that collection finds
                    await self.store.delete([key])
                return info.modified_ms
            await asyncio.sleep(pause_s)
        raise Unavailable(f"{self.store.url} does not answer: its clock cannot be read")

    async def close(self) -> None:
        await self.wal.close()
        for table in self._tables.values():
            table.close()
        self._tables.clear()
