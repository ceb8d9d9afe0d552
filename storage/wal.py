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
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from storage import entry as entries
from storage import keys
from storage.chain import Chain, WalCounters
from storage.clock import Clock
from storage.entry import Decoded, Draft, Entry
from storage.errors import CommitUnknown, Corrupt, NotFound, StoreRefused, Unavailable
from storage.objectstore import Created, ObjectStore, Part
from storage.offers import Offers
from storage.state import ClusterState, Outcome

log = logging.getLogger("tidelog.wal")

PREFETCH = 16
"""Entries fetched at once while catching up; a cold start over S3 is bound by latency."""
TURN_WAIT_S = 5.0
"""How long a reader whose view is void waits for a commit that is stuck before it says so."""


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


class Committer(Protocol):
    """Where a closed hot segment goes. It promises what `Wal.commit` does, and Wal is one."""

    async def commit(self, draft: Draft) -> list[Outcome]: ...


class Watcher(Protocol):
    """Who wants to know whose drafts are in which entries. Called synchronously, in WAL order,
    before the listener."""

    def on_entry(self, entry: Entry, outcomes: Sequence[Outcome]) -> None: ...

    def on_void(self) -> None:
        """The view was void and has been loaded anew: entries went by that nobody told of."""
        ...


class Committed(NamedTuple):
    """An entry of ours that is in the chain, and the bytes of its object."""

    entry: Entry
    header: bytes
    bodies: list[Part]
    outcomes: list[Outcome]


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
        self.chain = Chain(self.store, self.clock, self.counters)
        self.listener: Listener | None = None
        self.watcher: Watcher | None = None
        self._offers = Offers()
        self._turn = asyncio.Lock()  # who holds it moves the view forward
        self._fresh_s = 0.0  # boot time at which nothing beyond the view existed
        self._probes_begun = 0
        self._probe_fresh = 0  # number of the newest probe that found the end of the chain
        self._probe: asyncio.Task[None] | None = None
        self._checkpoint_seq = 0
        self._checkpoint_s = 0.0
        self._checkpoint_committed = 0
        self._checkpointing: asyncio.Task[None] | None = None

    # -- life

    async def open(self, cluster_id: str | None = None, *, found: bool = True) -> None:
        """Find or found the cluster and load its state; raises StoreUnfit or Corrupt.

        `cluster_id`, if given, is the cluster that must live here. Without `found` it must exist.
        """
        self.cluster = await self.chain.find_cluster(cluster_id, found=found)
        async with self._turn:
            await self._load()

    async def close(self) -> None:
        """Wait for background work of the view; nothing is lost if this never runs."""
        for task in (self._probe, self._checkpointing):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    # -- writing

    async def commit(self, draft: Draft) -> list[Outcome]:
        """Make the draft the next entry, whatever its number turns out to be; one outcome per
        commit.

        Returns only when the entry is durable and applied here. Raises StoreRefused when it is
        definitely not in the WAL and never will be (I6), Corrupt when the chain cannot be read,
        CommitUnknown when we slept so long that what would tell was collected.
        Never gives up on an unknown outcome: run it in a task that no client can cancel.
        """
        committed = await self.commit_next(lambda: draft)
        assert committed is not None, "there always was something to commit"
        return committed.outcomes

    async def commit_next(self, next_draft: Callable[[], Draft | None]) -> Committed | None:
        """As `commit`, of what `next_draft` says: it is asked before each attempt, when all that
        this view knows is applied, and may say something else each time; None ends it."""
        async with self._moving():
            while True:
                await self._ensure_view()
                self._apply_offers()
                draft = next_draft()
                if draft is None:
                    return None
                try:
                    if (committed := await self._attempt(draft)) is not None:
                        return committed
                    # Lost, which is definite: the number holds another entry. Theirs comes first.
                    self.counters.lost += 1
                    await self._catch_up()
                except _Void:
                    # The chain was collected behind our back: ours lies below its beginning. Lost.
                    self.counters.void += 1
                    await self._load()

    async def _attempt(self, draft: Draft) -> Committed | None:
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
            origins=list(draft.origins),
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
        outcomes = self._on_entry(Decoded(entry, entry_hash, len(header)))
        return Committed(entry, header, draft.bodies, outcomes)

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
                if not await self.chain.numbers_after(seq):
                    return True  # the newest is never collected
                return (await self.chain.read(seq + 1)).entry.previous == entry_hash
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
        """Load the state anew if the view is void; cheap otherwise.

        Raises Unavailable when a commit whose outcome the store does not tell is in the way.
        """
        if not self._is_void():
            return
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable(
                "the view of the WAL is too old, and a commit waits for the store to answer"
            ) from None
        try:
            await self._ensure_view()
        finally:
            self._turn.release()

    async def reach(self, seq: int) -> None:
        """Afterwards the state holds entry `seq`, if the chain has it."""
        if self.state.seq < seq:
            async with self._moving():
                await self._ensure_view()
                await self._follow(self.state, self._on_entry, upto=seq)

    def offer(self, seq: int, header: bytes) -> None:
        """A peer says that entry `seq` is in the chain; `header` is its object's beginning, or
        empty where that is large.

        For peers alone that hold the cluster's store themselves. Believed only if it is the next
        entry and names ours by hash; else the store is asked. The view gets no fresher: what comes
        after it nobody has said.
        """
        if seq <= self.state.seq:
            return
        self._offers.add(seq, header)
        if not self._turn.locked():  # else whoever has it takes them
            self._take_offers()

    @contextlib.asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        """The turn, and afterwards what was offered meanwhile."""
        async with self._turn:
            yield
            self._take_offers()

    def _take_offers(self) -> None:
        """Apply what was offered; read what was not, before what was."""
        if not self._is_void():
            self._apply_offers()
        if self._offers and (self._probe is None or self._probe.done()):
            _ = self._start_probe()

    def _apply_offers(self) -> None:
        """As far as they go on from here. The caller has the turn, or nobody has and it does not
        wait."""
        while (decoded := self._offers.pop_next(self.state.seq, self.state.hash)) is not None:
            _ = self._on_entry(decoded)

    async def refresh(self) -> None:
        """Afterwards the state holds every entry that was committed before this call (I3). It costs
        one GET of the next number, shared by all who ask while it has not begun."""
        need = self._probes_begun + 1
        while self._probe_fresh < need:
            await asyncio.shield(self._start_probe())

    def _start_probe(self) -> asyncio.Task[None]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._find_end())
            self._probe.add_done_callback(lambda probe: probe.cancelled() or probe.exception())
        return self._probe

    async def _find_end(self) -> None:
        self._probes_begun += 1
        number = self._probes_begun
        while True:
            started_s, offered = self.clock.boot_s(), self._offers.numbers()
            try:
                await self.chain.read(self.state.seq + 1)
            except NotFound:
                self._offers.drop(offered)
                # Of a void view the next number may be absent because it was collected.
                if not self._is_void():
                    self._fresh_s = max(self._fresh_s, started_s)
                    break
                await self.ensure_view()
                continue
            async with self._moving():  # an own PUT of that number resolves first
                await self._ensure_view()
                await self._catch_up()
            if not self._is_void():
                break  # it came to an end of the chain, after we were asked
        self._probe_fresh = number

    @property
    def view_age_s(self) -> float:
        """So long ago nothing was in the store beyond this view; entries since then may be."""
        return max(self.clock.boot_s() - self._fresh_s, 0.0)

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
            state = await self.chain.newest_checkpoint(self.cluster.cluster_id)
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
        if self.watcher is not None:
            self.watcher.on_void()
        if self.listener is not None:
            self.listener.on_reset()
        self._checkpoint_if_due()

    async def _follow_to_newest(self, state: ClusterState) -> float:
        """Apply what comes after `state`; since when that is all. Raises Corrupt at a hole: that a
        number is absent proves nothing here, because what follows a checkpoint may be collected; a
        listing does, because the newest entry never is."""
        while True:
            started_s = self.clock.boot_s()
            numbers = await self.chain.numbers_after(state.seq)
            await self._follow(state, lambda decoded: self._apply(state, decoded))
            if numbers and numbers[-1] > state.seq:
                raise Corrupt(keys.wal(state.seq + 1), "is missing, and the WAL goes on after it")
            if self.clock.boot_s() - started_s <= self.settings.view_age_max_s:
                return started_s

    async def _catch_up(self) -> None:
        """Apply everything that is there."""
        fresh_s = await self._follow(self.state, self._on_entry)
        if not self._is_void():  # as in _find_end
            self._fresh_s = max(self._fresh_s, fresh_s)

    async def _follow(
        self,
        state: ClusterState,
        on_entry: Callable[[Decoded], list[Outcome]],
        *,
        upto: float = math.inf,
    ) -> float:
        """Apply to `state` what comes after it, up to the first number that is absent; a boot time
        after which it was absent. Reads ahead once an entry was found."""
        width = 1
        while True:
            if state is self.state:
                self._apply_offers()
            if state.seq >= upto:
                return -math.inf
            started_s = self.clock.boot_s()
            seqs = range(state.seq + 1, int(min(state.seq + width, upto)) + 1)
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
                    on_entry(decoded)
            finally:
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
            width = min(width * 4, PREFETCH)

    async def _try_read(self, seq: int) -> Decoded | None:
        try:
            return await self.chain.read(seq)
        except NotFound:
            return None

    def _apply(self, state: ClusterState, decoded: Decoded) -> list[Outcome]:
        self.counters.entries_applied += 1
        return state.apply(decoded, keys.wal(decoded.entry.seq))

    def _on_entry(self, decoded: Decoded) -> list[Outcome]:
        """Fold the next entry into the view, and tell who wants to know."""
        outcomes = self._apply(self.state, decoded)
        if self.watcher is not None:
            self.watcher.on_entry(decoded.entry, outcomes)
        if self.listener is not None:
            self.listener.on_applied(outcomes)
        self._checkpoint_if_due()
        return outcomes

    # -- checkpoints

    def _checkpoint_if_due(self) -> None:
        since = self.state.seq - self._checkpoint_seq
        rested = self.clock.boot_s() - self._checkpoint_s >= self.settings.checkpoint_interval_s
        # Whoever commits writes them: the others would all upload the same.
        has_committed = self.counters.entries_committed > self._checkpoint_committed
        is_due = rested and since >= self.settings.checkpoint_entries and has_committed
        is_running = self._checkpointing is not None and not self._checkpointing.done()
        if (is_due or since >= self.settings.checkpoint_entries_max) and not is_running:
            self._checkpoint_s = self.clock.boot_s()
            self._checkpoint_seq = self.state.seq
            self._checkpoint_committed = self.counters.entries_committed
            self._checkpointing = asyncio.create_task(self._try_checkpoint())

    async def _try_checkpoint(self) -> None:
        try:
            await self.checkpoint()
        except (Unavailable, OSError) as error:
            log.warning("checkpoint not written, the next one will be: %s", error)

    async def checkpoint(self) -> int:
        """Write the state as it is now; returns its number."""
        return await self.chain.write_checkpoint(self.state)
