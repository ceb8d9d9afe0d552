"""The WAL: one numbered chain of objects, and the view of it that a broker holds.

Order, durability, offsets and atomicity of the whole cluster come from one request:
create-if-absent of the next number. This module makes that request safe: the three outcomes of
DESIGN 4 and the zombie rules of DESIGN 5 are here and nowhere else (I1, I5, I6).

What a crash leaves: before the PUT nothing; during it an entry or none, as the store decides, which
the next reader of the chain finds out by reading; after it the entry. No memory of a process is
needed to continue. Knows keys, entries and the state; not what records are.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from storage import entry as entries
from storage import keys
from storage.chunk import crc32c
from storage.clock import Clock
from storage.entry import Decoded, Draft, Entry
from storage.errors import CommitUnknown, Corrupt, NotFound, StoreRefused, StoreUnfit, Unavailable
from storage.objectstore import Created, ObjectStore, Part
from storage.state import ClusterState, Outcome

log = logging.getLogger("tidelog.wal")

READ_BYTES = 64 * 1024
"""First range of an entry: holds the header of all but the largest flushes in one GET."""
PREFETCH = 16
"""Entries fetched at once while catching up; a cold start over S3 is bound by latency."""
CHECKPOINT_MAGIC = b"TIDECKP1"


class Cluster(msgspec.Struct, frozen=True):
    """`cluster.json`: who lives under this prefix. Written once."""

    format: int
    cluster_id: str
    created_ms: int


class WalSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    view_age_max_s: float = 600.0
    """A view older than this is void (DESIGN 5). WAL retention is several times as long."""
    checkpoint_entries: int = 1000
    """A checkpoint is written after this many entries ..."""
    checkpoint_interval_s: float = 10.0
    """... and no sooner than this after the one before, or every `checkpoint_entries_max`."""
    checkpoint_entries_max: int = 20_000
    retry_s: float = 0.05
    """First pause after an unknown outcome; doubles up to two seconds."""


class Listener(Protocol):
    """Who holds things that follow from the state. Called synchronously, in WAL order."""

    def on_applied(self, outcomes: list[Outcome]) -> None: ...

    def on_reset(self) -> None:
        """The view was void and has been loaded anew: forget what was derived from it."""
        ...


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


class _Void(Exception):
    """The view turned out to be too old in the middle of something."""


@dataclass
class Wal:
    """A broker's view of the chain. Lives as long as the broker; safe for concurrent tasks."""

    store: ObjectStore
    clock: Clock
    writer: str
    settings: WalSettings = WalSettings()
    counters: WalCounters = field(default_factory=WalCounters)

    def __post_init__(self) -> None:
        self.state = ClusterState("")
        self.listener: Listener | None = None
        self._turn = asyncio.Lock()  # who holds it moves the view forward
        self._fresh_s = 0.0  # boot time at which nothing beyond the view existed
        self._probes_begun = 0
        self._probe_fresh = 0  # number of the newest probe that found the end of the chain
        self._probe: asyncio.Task[None] | None = None
        self._checkpoint_seq = 0
        self._checkpoint_s = 0.0
        self._checkpointing: asyncio.Task[None] | None = None

    # -- life

    async def open(self, cluster_id: str | None = None, *, found: bool = True) -> None:
        """Find or found the cluster and load its state; raises StoreUnfit or Corrupt.

        `cluster_id`, if given, is the cluster that must live here. Without `found` it must exist.
        """
        cluster = await self._cluster(cluster_id, found=found)
        if cluster_id is not None and cluster.cluster_id != cluster_id:
            raise StoreUnfit(
                f"{self.store.url} belongs to cluster {cluster.cluster_id}, not to {cluster_id}: "
                "give each cluster a prefix of its own"
            )
        self.cluster = cluster
        async with self._turn:
            await self._load()

    async def close(self) -> None:
        """Wait for background work of the view; nothing is lost if this never runs."""
        for task in (self._probe, self._checkpointing):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _cluster(self, cluster_id: str | None, *, found: bool) -> Cluster:
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
            await asyncio.sleep(self.settings.retry_s)

    async def _read_cluster(self) -> Cluster:
        body = await self.store.get(keys.CLUSTER)
        try:
            cluster = msgspec.json.decode(body, type=Cluster)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StoreUnfit(f"{self.store.url}/{keys.CLUSTER} is not ours: {error}") from error
        if cluster.format != entries.FORMAT:
            raise StoreUnfit(
                f"{self.store.url} has format {cluster.format}, this version reads {entries.FORMAT}"
            )
        return cluster

    # -- writing

    async def commit(self, draft: Draft) -> list[Outcome]:
        """Make the draft the next entry, whatever its number turns out to be; one outcome per
        commit.

        Returns only when the entry is durable and applied here. Raises StoreRefused when it is
        definitely not in the WAL and never will be (I6), Corrupt when the chain cannot be read,
        CommitUnknown when we slept so long that what would tell was collected.
        Never gives up on an unknown outcome: run it in a task that no client can cancel.
        """
        async with self._turn:
            while True:
                await self._ensure_view()
                try:
                    if (outcomes := await self._attempt(draft)) is not None:
                        return outcomes
                    # Lost, which is definite: the number holds another entry. Theirs comes first.
                    self.counters.lost += 1
                    await self._catch_up()
                except _Void:
                    # The chain was collected behind our back: ours lies below its beginning. Lost.
                    self.counters.void += 1
                    await self._load()

    async def _attempt(self, draft: Draft) -> list[Outcome] | None:
        state = self.state
        entry = Entry(
            format=entries.FORMAT,
            seq=state.seq + 1,
            previous=state.hash,
            entry_id=self.clock.new_id(),
            writer=self.writer,
            at_ms=max(state.time_ms, self.clock.now_ms()),
            chunks=draft.chunks,
            commits=draft.commits,
        )
        header, entry_hash = entries.encode_header(entry)
        key = keys.wal(entry.seq)
        fresh_s, started_s = self._fresh_s, self.clock.boot_s()
        if not await self._put(key, [header, *draft.bodies], entry):
            return None
        slept = self.clock.boot_s() - fresh_s > self.settings.view_age_max_s
        # Before the PUT arrived: then this very number may have been collected and made again by us
        # (I5). Or afterwards: then others may have gone on from it.
        if slept and not await self._is_in_chain(entry.seq, entry_hash):
            raise _Void
        self._fresh_s = max(self._fresh_s, started_s)
        self.counters.entries_committed += 1
        outcomes = self._apply(self.state, Decoded(entry, entry_hash, len(header)))
        self._on_entry(outcomes)
        return outcomes

    async def _put(self, key: str, parts: list[Part], entry: Entry) -> bool:
        """True when the number is ours, False when it is definitely another's."""
        is_ambiguous, pause_s = False, self.settings.retry_s
        self.counters.bytes_written += sum(len(part) for part in parts)
        while True:
            self.counters.puts += 1
            try:
                created = await self.store.create(key, parts)
                # Dying here: the entry is in the chain, our clients have no answer, and a retry
                # with their Idempotency-Key finds the first answer in the state.
            except StoreRefused:
                if not is_ambiguous:
                    raise  # nothing of ours was ever under way: a definite no
                created = Created.UNKNOWN
            if created is Created.DONE:
                return True
            if created is Created.UNKNOWN:
                is_ambiguous = True
                self.counters.unknown += 1
                log.warning("put of %s: outcome unknown, reading it back", key)
            found = await self._read_back(key, entry.seq)
            if found is not None:
                return found.entry.entry_id == entry.entry_id
            if created is Created.EXISTS:
                # There and gone: collected. It may have been our own, by a PUT before this one or
                # by one that the transport repeated.
                raise self._nobody_knows(key)
            # Absent, but our bytes may be on their way: the same again at the same number is
            # harmless, another number would not be.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)

    async def _is_in_chain(self, seq: int, entry_hash: bytes) -> bool:
        """Whether our entry, which was stored, is the chain's. Asks until there is an answer: to
        give up would call a perhaps committed entry failed."""
        while True:
            try:
                if not await self._numbers_after(seq):
                    return True  # the newest is never collected
                return (await self._read(seq + 1)).entry.previous == entry_hash
            except NotFound:  # what followed it is collected
                raise self._nobody_knows(keys.wal(seq)) from None
            except Unavailable as error:
                log.warning("looking for what follows %s: %s", keys.wal(seq), error)
            await asyncio.sleep(1.0)

    def _nobody_knows(self, key: str) -> CommitUnknown:
        """Entry `key` was ours or another's, and is collected: we slept for an hour or more. No
        client waits that long, and what was acked has a mark that `apply` takes once."""
        self._fresh_s = -math.inf
        return CommitUnknown(f"{key} is collected already: nobody knows whether it was this one")

    async def _read_back(self, key: str, seq: int) -> Decoded | None:
        pause_s = self.settings.retry_s
        while True:
            try:
                return await self._try_read(seq)
            except Unavailable as error:
                log.warning("reading back %s: %s", key, error)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, 2.0)

    # -- reading

    async def ensure_view(self) -> None:
        """Load the state anew if the view is void; cheap otherwise."""
        if self._is_void():
            async with self._turn:
                await self._ensure_view()

    async def refresh(self) -> None:
        """Afterwards the state holds every entry that was committed before this call (I3). It costs
        one GET of the next number, shared by all who ask while it has not begun."""
        need = self._probes_begun + 1
        while self._probe_fresh < need:
            if self._probe is None or self._probe.done():
                self._probe = asyncio.create_task(self._find_end())
                self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
            await asyncio.shield(self._probe)

    async def _find_end(self) -> None:
        self._probes_begun += 1
        number = self._probes_begun
        while True:
            started_s = self.clock.boot_s()
            try:
                await self._read(self.state.seq + 1)
            except NotFound:
                # Of a void view the next number may be absent because it was collected.
                if not self._is_void():
                    self._fresh_s = max(self._fresh_s, started_s)
                    break
                await self.ensure_view()
                continue
            async with self._turn:  # an own PUT of that number resolves first
                await self._ensure_view()
                await self._catch_up()
            if not self._is_void():
                break  # it came to an end of the chain, after we were asked
        self._probe_fresh = number

    def _is_void(self) -> bool:
        return self.clock.boot_s() - self._fresh_s > self.settings.view_age_max_s

    async def _ensure_view(self) -> None:
        if self._is_void():
            self.counters.void += 1
            log.warning("the view of the WAL is too old: loading the newest checkpoint")
            await self._load()

    async def _load(self) -> None:
        """A new view from the newest checkpoint on. Until it is whole the old one stays, void."""
        self._fresh_s = fresh_s = -math.inf
        stuck_at = -1
        while True:
            state = await self._newest_checkpoint()
            checkpoint_seq = state.seq
            try:
                fresh_s = await self._follow_to_newest(state)
                break
            except Corrupt:
                # Collected while we looked, or a sleeper's void entry stands where one was: then
                # there is a newer checkpoint by now. Or it is damaged for good.
                if stuck_at == state.seq:
                    raise
                stuck_at = state.seq
        self.state = state
        self._fresh_s = fresh_s
        self._checkpoint_seq = checkpoint_seq
        self._checkpoint_s = self.clock.boot_s()
        if self.listener is not None:
            self.listener.on_reset()
        self._checkpoint_if_due()

    async def _follow_to_newest(self, state: ClusterState) -> float:
        """Apply what comes after `state`; since when that is all. Raises Corrupt at a hole: that a
        number is absent proves nothing here, because what follows a checkpoint may be collected; a
        listing does, because the newest entry never is."""
        while True:
            started_s = self.clock.boot_s()
            numbers = await self._numbers_after(state.seq)
            await self._follow(state, lambda _: None)
            if numbers and numbers[-1] > state.seq:
                raise Corrupt(keys.wal(state.seq + 1), "is missing, and the WAL goes on after it")
            if self.clock.boot_s() - started_s <= self.settings.view_age_max_s:
                return started_s

    async def _numbers_after(self, seq: int) -> list[int]:
        """The numbers of the WAL after `seq`, ascending."""
        found = [info.key async for info in self.store.list(keys.WAL, start_after=keys.wal(seq))]
        return [number for key in found if (number := keys.seq_of(key)) is not None]

    async def _newest_checkpoint(self) -> ClusterState:
        looks = 0
        while True:
            looks += 1
            found = [info.key async for info in self.store.list(keys.CHECKPOINTS)]
            try:
                for key in reversed(found):
                    if keys.seq_of(key) is None:
                        continue
                    try:
                        return self._decode_checkpoint(await self.store.get(key), key)
                    except Corrupt as error:
                        log.error("%s: trying the one before it", error)
            except NotFound:
                continue  # collected since the listing, so a newer one is there: not one before it
            numbers = await self._numbers_after(0)
            if numbers[:1] == [1] or not (numbers or found):
                return ClusterState(self.cluster.cluster_id)
            if looks > 1:  # not just checkpointed and collected since the listing
                first = keys.wal(numbers[0]) if numbers else "nothing"
                raise StoreUnfit(
                    f"{self.store.url}: the WAL begins at {first} and no checkpoint that can be "
                    "read covers what came before"
                )

    def _decode_checkpoint(self, body: bytes, key: str) -> ClusterState:
        payload = body[12:]
        if body[:8] != CHECKPOINT_MAGIC or int.from_bytes(body[8:12], "little") != crc32c(payload):
            raise Corrupt(key, "checksum of the checkpoint differs")
        state = ClusterState.decode(payload, key)
        if state.cluster_id != self.cluster.cluster_id:
            raise Corrupt(key, f"is of cluster {state.cluster_id}")
        return state

    async def _catch_up(self) -> None:
        """Apply everything that is there."""
        fresh_s = await self._follow(self.state, self._on_entry)
        if not self._is_void():  # as in _find_end
            self._fresh_s = max(self._fresh_s, fresh_s)

    async def _follow(
        self, state: ClusterState, on_entry: Callable[[list[Outcome]], None]
    ) -> float:
        """Apply to `state` what comes after it, up to the first number that is absent; a boot time
        after which it was absent. Reads ahead once an entry was found."""
        width = 1
        while True:
            started_s = self.clock.boot_s()
            seqs = range(state.seq + 1, state.seq + 1 + width)
            reads = [asyncio.create_task(self._try_read(seq)) for seq in seqs]
            try:
                for read in reads:
                    decoded = await read
                    # Slept: this may be a sleeper's void entry at a number that was collected.
                    if decoded is None or (state is self.state and self._is_void()):
                        return started_s
                    if decoded.entry.previous != state.hash:
                        why = "does not name the entry before it: the chain is broken"
                        raise Corrupt(keys.wal(decoded.entry.seq), why)
                    on_entry(self._apply(state, decoded))
            finally:
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
            width = min(width * 4, PREFETCH)

    async def _try_read(self, seq: int) -> Decoded | None:
        try:
            return await self._read(seq)
        except NotFound:
            return None

    async def _read(self, seq: int) -> Decoded:
        key = keys.wal(seq)
        self.counters.gets += 1
        start = await self.store.get_range(key, 0, READ_BYTES)
        needed = entries.header_length(start, key)
        if needed > len(start):
            start += await self.store.get_range(key, len(start), needed - len(start))
        return entries.decode(start, key, seq=seq, previous=None)

    def _apply(self, state: ClusterState, decoded: Decoded) -> list[Outcome]:
        self.counters.entries_applied += 1
        return state.apply(decoded, keys.wal(decoded.entry.seq))

    def _on_entry(self, outcomes: list[Outcome]) -> None:
        if self.listener is not None:
            self.listener.on_applied(outcomes)
        self._checkpoint_if_due()

    # -- checkpoints

    def _checkpoint_if_due(self) -> None:
        since = self.state.seq - self._checkpoint_seq
        rested = self.clock.boot_s() - self._checkpoint_s >= self.settings.checkpoint_interval_s
        is_due = rested and since >= self.settings.checkpoint_entries
        is_running = self._checkpointing is not None and not self._checkpointing.done()
        if (is_due or since >= self.settings.checkpoint_entries_max) and not is_running:
            self._checkpoint_s = self.clock.boot_s()
            self._checkpoint_seq = self.state.seq
            self._checkpointing = asyncio.create_task(self._try_checkpoint())

    async def _try_checkpoint(self) -> None:
        try:
            await self.checkpoint()
        except (Unavailable, OSError) as error:
            log.warning("checkpoint not written, the next one will be: %s", error)

    async def checkpoint(self) -> int:
        """Write the state as it is now; returns its number.

        Dying here leaves a whole checkpoint or none. Another broker's checkpoint of that number
        has the same bytes (I4), so the outcome need not be known.
        """
        seq = self.state.seq
        payload = self.state.encode()  # at once: the state moves on while the PUT is under way
        head = CHECKPOINT_MAGIC + crc32c(payload).to_bytes(4, "little")
        await self.store.create(keys.checkpoint(seq), [head, payload])
        self.counters.checkpoints += 1
        return seq
