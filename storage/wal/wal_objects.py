"""The WAL's objects in the store: `cluster.json`, entries, checkpoints.

This module reads objects, creates the cluster, and writes checkpoints. wal.view has the view and
all rules about time. This module verifies all content before use. A failed check raises Corrupt
with the key, or StoreUnfit for `cluster.json`; a newer level raises NewerLevel.
"""

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.checksum import crc32c
from tidelog.storage.codec.entry import DecodedEntry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import Corrupt, LogError, ObjectNotFound, StoreUnfit, Unavailable
from tidelog.storage.core.log_settings import WalSettings
from tidelog.storage.core.model import Part
from tidelog.storage.core.time_bounds import DEFAULT_BOUNDS, Bounds
from tidelog.storage.core.time_bounds import check as check_bounds
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.tail_objects import TailObjects

__all__ = ["WalCounters", "WalObjects", "WalSettings"]

log = logging.getLogger("tidelog.wal")

READ_BYTES = 64 * 1024
"""Size of the first range that `read` gets of an entry. For all but the largest entries, this one
GET returns the whole header."""
STRAY_GAP = 100
"""Largest gap between two numbers in `wal/` behind which an object may be a damaged entry. Behind a
larger gap, objects that are no entries are strays. No damaged entry can be there, because brokers
create entries one after the other."""
CHECKPOINT_MAGIC = b"TIDECKP1"
FOUND_RETRY_S = 0.05
LISTS_MAX = 5
"""After this number of listings that name a missing checkpoint, a load fails. Collection deletes a
checkpoint only if there is a newer one, so the next listing should name the newer one."""


class ClusterIdentity(msgspec.Struct, frozen=True, omit_defaults=True):
    """`cluster.json`: the identity of the cluster under this prefix.

    Written once. `format` is the level at which the WAL begins.
    """

    format: int
    cluster_id: str
    created_ms: int
    bounds: Bounds = DEFAULT_BOUNDS
    """The bounds with which the WAL begins; the cluster state has the bounds in effect. Written
    from level 2 on, unless they are the default bounds."""


@dataclass
class WalCounters:
    """Counters since the process started."""

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
class WalObjects:
    """The WAL's objects in `store`. Caches nothing; safe for concurrent tasks."""

    store: ObjectStore
    clock: Clock
    counters: WalCounters = field(default_factory=WalCounters)

    # -- identity of the cluster

    async def open_cluster(
        self,
        cluster_id: str | None,
        *,
        is_creating: bool,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> ClusterIdentity:
        """Return the store's cluster.

        If there is none and `is_creating` is true, create it with these bounds. Raises StoreUnfit
        if the id of the cluster is not `cluster_id`, if there is no cluster and `is_creating` is
        false, or if the bounds or the objects in the store are invalid.
        """
        cluster = await self._find(cluster_id, bounds, is_creating=is_creating)
        if cluster_id is not None and cluster.cluster_id != cluster_id:
            raise StoreUnfit(
                f"{self.store.url} belongs to cluster {cluster.cluster_id}, not to {cluster_id}: "
                "give each cluster a prefix of its own"
            )
        return cluster

    async def _find(
        self, cluster_id: str | None, bounds: Bounds, *, is_creating: bool
    ) -> ClusterIdentity:
        try:
            return await self._read_cluster()
        except ObjectNotFound:
            if not is_creating:
                raise StoreUnfit(
                    f"{self.store.url} holds no cluster: there is no {object_keys.CLUSTER}"
                ) from None
        async for info in self.store.list(object_keys.WAL):
            with contextlib.suppress(ObjectNotFound):
                return await self._read_cluster()  # created since the first read
            raise StoreUnfit(
                f"{self.store.url} has {info.key} but no {object_keys.CLUSTER}: "
                "the cluster is damaged, or this prefix is not the root of a cluster"
            )
        if (wrong := check_bounds(bounds)) is not None:
            raise StoreUnfit(f"{self.store.url} gets no cluster: {wrong}")
        fresh = ClusterIdentity(
            format_levels.NEWEST,
            cluster_id or self.clock.new_id().hex(),
            self.clock.now_ms(),
            bounds,
        )
        # The stored object decides, not the outcome of this create, because several brokers may
        # create the cluster at once. **On a crash** after the create, an empty cluster is left.
        while True:
            await self.store.create(object_keys.CLUSTER, [msgspec.json.encode(fresh)])
            with contextlib.suppress(ObjectNotFound):
                return await self._read_cluster()
            await asyncio.sleep(FOUND_RETRY_S)

    async def _read_cluster(self) -> ClusterIdentity:
        body = await self.store.get(object_keys.CLUSTER)
        try:
            cluster = msgspec.json.decode(body, type=ClusterIdentity)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreUnfit(
                f"{self.store.url}/{object_keys.CLUSTER} is invalid: {error}"
            ) from error
        format_levels.check(cluster.format, object_keys.CLUSTER)
        if (wrong := check_bounds(cluster.bounds)) is not None:
            raise StoreUnfit(f"{self.store.url}/{object_keys.CLUSTER} is invalid: {wrong}")
        return cluster

    # -- entries

    async def read(self, seq: int) -> DecodedEntry:
        """Return entry `seq` without its chunks.

        Do not check the hash of the entry before it. Raises ObjectNotFound, Corrupt.
        """
        key = object_keys.wal(seq)
        self.counters.gets += 1
        start = await self.store.get_range(key, 0, READ_BYTES)
        try:
            needed = entries.header_length(start, key)
            if needed > len(start):
                start += await self.store.get_range(key, len(start), needed - len(start))
            return entries.decode(start, key, seq=seq, previous=None)
        except Corrupt as damage:
            return await self._read_whole(seq, damage)

    async def read_announced(self, seq: int, tail_objects: TailObjects) -> DecodedEntry | None:
        """Return what `read` does, from an object of which other readers need the chunks, too.

        Return None if there are no valid bytes. Do not check that the entry is in the chain.
        """
        key = object_keys.wal(seq)
        try:
            start = await tail_objects.beginning(key, READ_BYTES)
            if (needed := entries.header_length(start, key)) > len(start):
                start = await tail_objects.beginning(key, needed)
            return entries.decode(start, key, seq=seq, previous=None)
        except LogError:  # `read` says what is wrong
            return None

    async def _read_whole(self, seq: int, damage: Corrupt) -> DecodedEntry:
        """Return what `read` does, from the copy of the header at the object's end.

        If there is no valid copy, raise `damage`.
        """
        key = object_keys.wal(seq)
        copy = entries.copy_in(await self.store.get(key))
        if copy is None:
            raise damage
        try:
            decoded = entries.decode(copy, key, seq=seq, previous=None)
        except Corrupt:
            raise damage from None
        log.error("%s: using the copy of the header at the object's end", damage)
        return decoded

    async def strays(self, numbers: Sequence[int]) -> list[int]:
        """Return the strays among ascending WAL numbers, of which the first must be in the chain.

        A stray is an object far beyond the chain that no process wrote as an entry. Strays are
        always the last numbers.
        """
        gaps = [
            index
            for index in range(1, len(numbers))
            if numbers[index] - numbers[index - 1] > STRAY_GAP
        ]
        strays: list[int] = []
        for first in reversed(gaps):
            for seq in numbers[first : len(numbers) - len(strays)]:
                try:
                    await self.read(seq)
                except Corrupt:
                    continue
                except ObjectNotFound:
                    pass  # collected meanwhile: it was an entry
                return strays
            strays = list(numbers[first:])
        return strays

    async def find(self, seq: int) -> DecodedEntry | None:
        """Return what `read` does. If the number is absent, return None."""
        try:
            return await self.read(seq)
        except ObjectNotFound:
            return None

    async def numbers_after(self, seq: int) -> list[int]:
        """Return the WAL's sequence numbers after `seq`, ascending."""
        keys = [
            info.key
            async for info in self.store.list(object_keys.WAL, start_after=object_keys.wal(seq))
        ]
        return [number for key in keys if (number := object_keys.seq_of(key)) is not None]

    # -- checkpoints

    async def newest_checkpoint(self, cluster: ClusterIdentity) -> ClusterState:
        """Return the state of the newest readable checkpoint.

        If no checkpoint is readable, return the empty state, but only if the WAL begins at entry 1,
        or if the store has no entries and no checkpoints; else raise StoreUnfit. Raises NewerLevel
        if the newest checkpoint needs a newer version of this program, and Unavailable.
        """
        looks = stale = 0
        while True:
            looks += 1
            keys = [info.key async for info in self.store.list(object_keys.CHECKPOINTS)]
            try:
                for key in reversed(keys):
                    if object_keys.seq_of(key) is None:
                        continue
                    try:
                        body = await self.store.get(key)
                        return decode_checkpoint(body, key, cluster.cluster_id, cluster.bounds)
                    except Corrupt as error:
                        log.error("%s: trying the checkpoint before it", error)
            except ObjectNotFound as error:  # collected since, so a newer one exists: list again
                stale += 1
                if stale == LISTS_MAX:
                    raise Unavailable(f"{self.store.url}: listings are stale: {error}") from error
                await asyncio.sleep(FOUND_RETRY_S * 2**stale)
                continue
            numbers = await self.numbers_after(0)
            if numbers[:1] == [1] or not (numbers or keys):
                return empty_state(cluster)
            # Look twice: after the list of the checkpoints and before the list of the entries,
            # a broker may have written the first checkpoint, and collection deleted entry 1.
            if looks > 1:
                if not numbers:
                    raise StoreUnfit(
                        f"{self.store.url}: the WAL has no entries and no checkpoint can be read"
                    )
                raise StoreUnfit(
                    f"{self.store.url}: the WAL begins at {object_keys.wal(numbers[0])} and no "
                    "checkpoint that can be read covers the entries before it"
                )

    async def state_at(self, cluster: ClusterIdentity, time_ms: int) -> ClusterState | None:
        """Return the state before the first entry that was written after `time_ms`.

        It begins at the newest checkpoint whose entry is not newer than `time_ms`. Return None if
        the objects of that time have been collected. Raises Corrupt, Unavailable.
        """
        state = await self._checkpoint_at(cluster, time_ms)
        if state is None:
            return None
        while (decoded := await self.find(state.seq + 1)) is not None:
            key = object_keys.wal(decoded.entry.seq)
            if decoded.entry.previous != state.hash:
                raise Corrupt(key, "does not name the entry before it: the chain is broken")
            if decoded.entry.time_ms > time_ms:
                return state
            state.apply(decoded, key)
        # The WAL ends here, unless entries after this one have been collected.
        return None if await self.numbers_after(state.seq) else state

    async def _checkpoint_at(self, cluster: ClusterIdentity, time_ms: int) -> ClusterState | None:
        keys = [info.key async for info in self.store.list(object_keys.CHECKPOINTS)]
        numbers = [number for key in keys if (number := object_keys.seq_of(key)) is not None]
        for number in reversed(numbers):
            decoded = await self.find(number)
            if decoded is None:
                return None
            if decoded.entry.time_ms <= time_ms:
                key = object_keys.checkpoint(number)
                with contextlib.suppress(ObjectNotFound):
                    body = await self.store.get(key)
                    return decode_checkpoint(body, key, cluster.cluster_id, cluster.bounds)
                return None
        is_whole = (await self.numbers_after(0))[:1] == [1]
        return empty_state(cluster) if is_whole else None

    async def write_checkpoint(self, seq: int, state: bytes) -> int:
        """Write the encoded state after entry `seq`; return `seq`.

        **On a crash**: a whole checkpoint is left, or none. Another broker's checkpoint of that
        number has the same bytes (I4), so the outcome of the PUT does not matter.
        """
        await self.store.create(object_keys.checkpoint(seq), encode_checkpoint(state))
        self.counters.checkpoints += 1
        return seq


def empty_state(cluster: ClusterIdentity) -> ClusterState:
    """Return the state before the first entry."""
    return ClusterState(cluster.cluster_id, cluster.format, cluster.bounds)


def encode_checkpoint(state: bytes) -> list[Part]:
    """Return the parts of a checkpoint of the encoded state."""
    return [CHECKPOINT_MAGIC + crc32c(state).to_bytes(4, "little"), state]


def decode_checkpoint(
    body: bytes, key: str, cluster_id: str, bounds: Bounds = DEFAULT_BOUNDS
) -> ClusterState:
    """Decode a checkpoint.

    Raises Corrupt if it is damaged or belongs to another cluster. `bounds` are the bounds in
    `cluster.json`.
    """
    payload = body[12:]
    if body[:8] != CHECKPOINT_MAGIC or int.from_bytes(body[8:12], "little") != crc32c(payload):
        raise Corrupt(key, "checksum of the checkpoint differs")
    state = ClusterState.decode(payload, key, bounds)
    if state.cluster_id != cluster_id:
        raise Corrupt(key, f"belongs to cluster {state.cluster_id}")
    return state
