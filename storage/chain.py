"""The objects of the chain as they lie in the store: who lives here, entries, checkpoints.

Reading and founding alone: no view, no order of events, no rule about time; that is storage.wal's.
Everything is verified before it is believed, and what does not verify is Corrupt by its key.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import msgspec

from storage import entry as entries
from storage import keys
from storage.chunk import crc32c
from storage.clock import Clock
from storage.entry import Decoded
from storage.errors import Corrupt, NotFound, StoreUnfit
from storage.objectstore import ObjectStore
from storage.state import ClusterState

log = logging.getLogger("tidelog.wal")

READ_BYTES = 64 * 1024
"""First range of an entry: holds the header of all but the largest flushes in one GET."""
CHECKPOINT_MAGIC = b"TIDECKP1"
FOUND_RETRY_S = 0.05


class Cluster(msgspec.Struct, frozen=True):
    """`cluster.json`: who lives under this prefix. Written once."""

    format: int
    cluster_id: str
    created_ms: int


@dataclass
class WalCounters:
    """Since the process started."""

    puts: int = 0
    entries_committed: int = 0
    entries_applied: int = 0
    lost: int = 0
    unknown: int = 0
    void: int = 0
    checkpoints: int = 0
    bytes_written: int = 0
    gets: int = 0


@dataclass
class Chain:
    """The chain in `store`. Holds nothing that could grow old; safe for concurrent tasks."""

    store: ObjectStore
    clock: Clock
    counters: WalCounters

    # -- who lives here

    async def find_cluster(self, cluster_id: str | None, *, found: bool) -> Cluster:
        """The cluster in the store, founded now if there is none and `found`; StoreUnfit when it is
        not `cluster_id`."""
        cluster = await self._find(cluster_id, found=found)
        if cluster_id is not None and cluster.cluster_id != cluster_id:
            raise StoreUnfit(
                f"{self.store.url} belongs to cluster {cluster.cluster_id}, not to {cluster_id}: "
                "give each cluster a prefix of its own"
            )
        return cluster

    async def _find(self, cluster_id: str | None, *, found: bool) -> Cluster:
        try:
            return await self._read_cluster()
        except NotFound:
            if not found:
                raise StoreUnfit(
                    f"{self.store.url} holds no cluster: there is no {keys.CLUSTER}"
                ) from None
        async for info in self.store.list(keys.WAL):
            with contextlib.suppress(NotFound):
                return await self._read_cluster()  # founded since we looked
            raise StoreUnfit(
                f"{self.store.url} has {info.key} but no {keys.CLUSTER}: "
                "a damaged cluster, or a prefix that is not the root of one"
            )
        fresh = Cluster(
            entries.FORMAT, cluster_id or self.clock.new_id().hex(), self.clock.now_ms()
        )
        # Whatever the outcome, what lies there afterwards is the truth: several brokers may
        # found the cluster at once, and one that dies here leaves a founded, empty cluster.
        while True:
            await self.store.create(keys.CLUSTER, [msgspec.json.encode(fresh)])
            with contextlib.suppress(NotFound):
                return await self._read_cluster()
            await asyncio.sleep(FOUND_RETRY_S)

    async def _read_cluster(self) -> Cluster:
        body = await self.store.get(keys.CLUSTER)
        try:
            cluster = msgspec.json.decode(body, type=Cluster)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreUnfit(f"{self.store.url}/{keys.CLUSTER} is not ours: {error}") from error
        if cluster.format != entries.FORMAT:
            raise StoreUnfit(
                f"{self.store.url} has format {cluster.format}, this version reads {entries.FORMAT}"
            )
        return cluster

    # -- entries

    async def read(self, seq: int) -> Decoded:
        """The header of entry `seq`, its place in the chain not looked at. Raises NotFound."""
        key = keys.wal(seq)
        self.counters.gets += 1
        start = await self.store.get_range(key, 0, READ_BYTES)
        needed = entries.header_length(start, key)
        if needed > len(start):
            start += await self.store.get_range(key, len(start), needed - len(start))
        return entries.decode(start, key, seq=seq, previous=None)

    async def numbers_after(self, seq: int) -> list[int]:
        """The numbers of the WAL after `seq`, ascending."""
        found = [info.key async for info in self.store.list(keys.WAL, start_after=keys.wal(seq))]
        return [number for key in found if (number := keys.seq_of(key)) is not None]

    # -- checkpoints

    async def newest_checkpoint(self, cluster_id: str) -> ClusterState:
        """The newest one that can be read; the empty state where the chain begins at 1."""
        looks = 0
        while True:
            looks += 1
            found = [info.key async for info in self.store.list(keys.CHECKPOINTS)]
            try:
                for key in reversed(found):
                    if keys.seq_of(key) is None:
                        continue
                    try:
                        return decode_checkpoint(await self.store.get(key), key, cluster_id)
                    except Corrupt as error:
                        log.error("%s: trying the one before it", error)
            except NotFound:
                continue  # collected since the listing, so a newer one is there: not one before it
            numbers = await self.numbers_after(0)
            if numbers[:1] == [1] or not (numbers or found):
                return ClusterState(cluster_id)
            if looks > 1:  # not just checkpointed and collected since the listing
                first = keys.wal(numbers[0]) if numbers else "nothing"
                raise StoreUnfit(
                    f"{self.store.url}: the WAL begins at {first} and no checkpoint that can be "
                    "read covers what came before"
                )

    async def write_checkpoint(self, state: ClusterState) -> int:
        """Write the state as it is now; returns its number.

        Dying here leaves a whole checkpoint or none. Another broker's checkpoint of that number
        has the same bytes (I4), so the outcome need not be known.
        """
        seq = state.seq
        payload = state.encode()  # at once: the state moves on while the PUT is under way
        head = CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little")
        await self.store.create(keys.checkpoint(seq), [head, payload])
        self.counters.checkpoints += 1
        return seq


def decode_checkpoint(body: bytes, key: str, cluster_id: str) -> ClusterState:
    """The state in a checkpoint; raises Corrupt when it is not whole, or not this cluster's."""
    payload = body[12:]
    if body[:8] != CHECKPOINT_MAGIC or int.from_bytes(body[8:12], "little") != crc32c(payload):
        raise Corrupt(key, "checksum of the checkpoint differs")
    state = ClusterState.decode(payload, key)
    if state.cluster_id != cluster_id:
        raise Corrupt(key, f"is of cluster {state.cluster_id}")
    return state
