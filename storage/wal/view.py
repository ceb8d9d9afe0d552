"""The WAL, one numbered chain of objects, and a broker's view of it.

One request, create-if-absent of the next number, gives the whole cluster order, durability, offsets
and atomicity. wal.entry_put handles the three outcomes of this request (DESIGN 4). Only this module
has the rules for expired views (DESIGN 5; I1, I5, I6). It does not know records.

**On a crash** before the PUT nothing is left, during the PUT the entry or nothing, after the PUT
the entry (wal.entry_put). A broker needs only the store to continue.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import DecodedEntry, Draft, Entry
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    LogError,
    ObjectNotFound,
    Unavailable,
)
from tidelog.storage.core.log_settings import WalSettings
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import Clock
from tidelog.storage.runtime.tasks import TASK_ENDS, retrieve_exception
from tidelog.storage.state.cluster_state import Applied, ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.store.moments import NEVER, Moment
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.wal.announced import AnnouncedEntries
from tidelog.storage.wal.checkpoint_schedule import CheckpointSchedule
from tidelog.storage.wal.clone_fence import CloneFence
from tidelog.storage.wal.entry_put import EntryPut
from tidelog.storage.wal.store_time import StoreTime
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.wal.view_age import Freshness
from tidelog.storage.wal.wal_objects import ClusterIdentity, WalObjects, empty_state

T = TypeVar("T")

log = logging.getLogger("tidelog.wal")

PREFETCH = 16
"""Number of concurrent reads during catch-up. Over S3, its latency limits a cold start."""
TURN_WAIT_S = 5.0
"""Time that a reader of an expired view waits for a blocked commit. Then it raises Unavailable."""


class Committer(Protocol):
    """Commits closed hot segments, with the guarantees of `WalView.commit`. `WalView` is one."""

    async def commit(self, draft: Draft) -> list[Outcome]: ...


class Committed(NamedTuple):
    """An entry that this broker has committed, and the bytes of its object."""

    entry: Entry
    header: bytes
    bodies: list[Part]
    outcomes: list[Outcome]


class Subscriber(Protocol):
    """A part of a broker that derives data from applied entries.

    Called synchronously, in WAL order. Parts subscribe in their constructors, and are called in the
    order of construction.
    """

    def on_applied(self, entry: Entry, applied: Applied) -> None: ...

    def on_reset(self) -> None:
        """Handle a reload of the view, which skipped entries without a call of `on_applied`."""


class ViewExpired(Exception):
    """The view expired during an operation."""


class _BeforeThePut:
    """Context manager that turns an unforeseen exception into Unavailable.

    Nothing is committed, because the PUT of this attempt has not begun, and all earlier PUTs are
    lost.
    """

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (LogError, *TASK_ENDS)):
            raise Unavailable(f"the next entry cannot be made: {error!r}") from error


_BEFORE_THE_PUT = _BeforeThePut()


class WalView:
    """A broker's view of the WAL. Lives as long as the broker; safe for concurrent tasks."""

    def __init__(
        self,
        objects: WalObjects,
        cluster: ClusterIdentity,
        writer: str,
        settings: WalSettings,
    ) -> None:
        """Call `load` before any other method, or use `open`.

        No other process may have the name `writer`: an entry of another process with this name
        fences this process (`CloneFence`).
        """
        self.objects = objects
        self.cluster = cluster
        self.writer = writer
        self.settings = settings
        self.store = objects.store
        self.clock = objects.clock
        self.store_time = StoreTime(objects.store, objects.clock)
        self.counters = objects.counters
        self._state = empty_state(cluster)
        self.subscribers: list[Subscriber] = []
        self._is_half_applied = False
        self.told_seq = 0
        """The newest entry that its writer announced, or that this view committed or loaded."""
        self._offers = AnnouncedEntries()
        self._turn = asyncio.Lock()  # its holder may apply entries to the view
        self._freshness = Freshness(objects.store, objects.clock)
        self._entry_put = EntryPut(objects, self._freshness, settings.retry_s)
        self.clone_fence = CloneFence(writer)
        self._probes_begun = 0
        self._probe_fresh = 0  # number of the newest probe that reached the end of the WAL
        self._probe: asyncio.Task[None] | None = None
        self._reaching: asyncio.Task[None] | None = None
        self._tail_objects: TailObjects | None = None
        self._checkpoints = CheckpointSchedule(
            objects,
            entries_least=settings.checkpoint_entries,
            entries_max=settings.checkpoint_entries_max,
            interval_s=settings.checkpoint_interval_s,
        )

    @property
    def view_age_max_s(self) -> float:
        """The age in seconds above which a view is expired (DESIGN 5)."""
        return self._state.bounds.now.view_age_ms / 1000

    @property
    def state(self) -> ClusterState:
        """The newest state.

        An exception in `apply` leaves a state that no broker may serve (I3, I4). This property then
        raises Unavailable until the state is loaded again.
        """
        if self._is_half_applied:
            raise Unavailable("this broker must load its state again after an error: retry")
        return self._state

    @property
    def seq(self) -> int:
        """The number of the newest applied entry."""
        return self._state.seq

    # -- opening and closing

    @classmethod
    async def open(
        cls,
        store: ObjectStore,
        clock: Clock,
        writer: str,
        settings: WalSettings | None = None,
        *,
        cluster_id: str | None = None,
        is_creating: bool = True,
    ) -> "WalView":
        """Open the cluster, or create it if `is_creating`; load its state.

        Raises Corrupt. Raises StoreUnfit, also if the id of the cluster is not `cluster_id`.
        """
        objects = WalObjects(store, clock)
        settings = settings or WalSettings()
        cluster = await objects.open_cluster(
            cluster_id, is_creating=is_creating, bounds=settings.bounds
        )
        view = cls(objects, cluster, writer, settings)
        await view.load(())
        return view

    async def load(
        self, subscribers: Iterable[Subscriber], tail_objects: TailObjects | None = None
    ) -> None:
        """Load the state: the newest checkpoint and all entries after it.

        From now on, call the subscribers, and read announced entries from `tail_objects`, because
        their chunks are read from there, too. Raises Corrupt.
        """
        async with self._turn:
            self.subscribers = list(subscribers)
            self._tail_objects = tail_objects
            await self._load()

    async def close(self) -> None:
        """Cancel the view's background tasks. A process that does not call this loses nothing."""
        for task in (self._probe, self._reaching):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task
        await self._checkpoints.close()

    # -- writing

    async def commit(self, draft: Draft) -> list[Outcome]:
        """Commit the draft as the next entry, whatever its number; return one outcome per commit.

        Returns when the entry is durable and applied to this view. Raises Unavailable if the draft
        is not in the WAL and never will be (I6), and Corrupt if the WAL cannot be read. Raises
        CommitUnknown if the entries that would show the outcome were collected while the process
        was suspended, or if `apply` failed. After any other exception the outcome is unknown.
        `commit` repeats a PUT without limit until the outcome is known, so call it in a task that
        no client can cancel.
        """
        committed = await self.commit_next(lambda: draft)
        assert committed is not None, "the draft is never None"
        return committed.outcomes

    async def commit_next(self, next_draft: Callable[[], Draft | None]) -> Committed | None:
        """Commit a draft from `next_draft` as `commit` does.

        Before each attempt, apply all known entries and call `next_draft` again. If it returns
        None, return None.
        """
        async with self._moving():
            while True:
                await self._ensure_view()
                self._apply_offers()
                self.clone_fence.check_fence()
                with _BEFORE_THE_PUT:
                    draft = next_draft()
                if draft is None:
                    return None
                try:
                    if (committed := await self._attempt(draft)) is not None:
                        return committed
                    # Lost, definitely: another entry has the number. Apply it first.
                    self.counters.lost += 1
                    await self._catch_up()
                except ViewExpired:
                    # Lost: the WAL was collected past this number, so the entry does not count.
                    self.counters.void += 1
                    await self._load()

    async def _attempt(self, draft: Draft) -> Committed | None:
        state, now_ms = self._state, self.clock.now_ms()
        entry = Entry(
            level=draft.level or state.level,
            seq=state.seq + 1,
            previous=state.hash,
            entry_id=self.clock.new_id(),
            writer=self.writer,
            at_ms=max(state.time_ms, now_ms) if state.level == format_levels.FIRST else now_ms,
            chunks=draft.chunks,
            commits=draft.commits,
            origins=list(draft.origins),
            store_ms=self.store.seen_ms,
        )
        with _BEFORE_THE_PUT:
            header, entry_hash = entries.encode_header(entry)
        key = object_keys.wal(entry.seq)
        fresh, started = self._freshness.moment, self._freshness.now()
        self.clone_fence.add(entry_hash, entry)
        parts = [header, *draft.bodies, *entries.copy_of(entry, header)]
        if not await self._entry_put.put(key, parts, entry, entry_hash):
            return None
        is_late = self._freshness.age_s(fresh) > self.view_age_max_s  # the time of the PUT included
        # If the process was suspended before the PUT arrived, the PUT may have created a collected
        # number again (I5). If it was suspended later, the entry is in the chain.
        if is_late and not await self._entry_put.is_in_chain(entry.seq, entry_hash):
            raise ViewExpired
        self._freshness.advance(started)
        self.told_seq = max(self.told_seq, entry.seq)
        self.counters.entries_committed += 1
        try:
            outcomes = self._on_entry(DecodedEntry(entry, entry_hash, len(header)))
        except LogError as error:
            raise CommitUnknown(f"{key} is in the WAL, with unknown outcomes: {error}") from error
        return Committed(entry, header, draft.bodies, outcomes)

    # -- reading

    async def retry_after_suspend(self, read: Callable[[], Awaitable[T]]) -> T:
        """Return the result of a read of objects that this view names.

        Repeat it if it finds damage and took longer than a view may be old.
        """
        return await self._freshness.retry_after_suspend(read, self.view_age_max_s)

    async def ensure_view(self) -> None:
        """Reload the state if the view has expired; cheap otherwise.

        Raises Unavailable if a commit with an unknown outcome blocks the view.
        """
        if not self._is_void():
            return
        try:
            async with asyncio.timeout(TURN_WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable(
                "the view of the WAL has expired, and a commit waits for the store: retry"
            ) from None
        try:
            await self._ensure_view()
        finally:
            self._turn.release()

    async def reach(self, seq: int) -> None:
        """Apply entries up to `seq`, or to the end of the WAL if that comes first."""
        if self._state.seq < seq:
            async with self._moving():
                await self._ensure_view()
                await self._follow(self._state, self._on_entry, upto=seq)

    def on_announced(self, seq: int, header: bytes) -> None:
        """Handle a peer's announcement that entry `seq` is in the WAL.

        `header` is the beginning of its object, or empty if the header is large.

        The peer must have access to the cluster's store. The view uses only a header that is of the
        next entry and names the hash of the last applied entry. Else the view reads the store.
        An announcement does not make the view fresher, because later entries may exist.
        """
        self.told_seq = max(self.told_seq, seq)
        self.on_newer(seq, header)

    def on_newer(self, seq: int, header: bytes = b"") -> None:
        """Handle a peer's message that it knows entry `seq`: read the WAL if the view lacks it."""
        if seq <= self._state.seq:
            return
        self._offers.add(seq, header)
        if not self._turn.locked():  # else the holder of `_turn` applies it later
            self._take_offers()

    @contextlib.asynccontextmanager
    async def _moving(self) -> AsyncIterator[None]:
        """Hold `_turn`; at the end apply entries that were announced meanwhile.

        If the state is half applied and the store answers, load the state again before the caller
        goes on.
        """
        async with self._turn:
            try:
                yield
            except TASK_ENDS:
                raise
            except BaseException:
                await self._mend()
                raise
            self._take_offers()
            await self._mend()

    async def _mend(self) -> None:
        if self._is_half_applied:
            try:
                await self._load()
            except Exception as error:  # noqa: BLE001 - the next reader of the WAL tries again
                log.error("the state was not loaded again, retrying: %s", error)

    def _take_offers(self) -> None:
        """Apply announced entries; if entries before them are missing, start to read the store."""
        if not self._is_void():
            try:
                self._apply_offers()
            except LogError as error:  # not raised: the caller's entry may be committed
                log.error("an announced entry cannot be applied: %s", error)
        if self._is_half_applied:
            _ = self._start_probe()
        elif self._offers and (self._reaching is None or self._reaching.done()):
            self._reaching = asyncio.create_task(self._reach_offers())
            self._reaching.add_done_callback(retrieve_exception)

    async def _reach_offers(self) -> None:
        """Apply the entries up to the announced ones; drop announcements of absent entries."""
        while offered := self._offers.numbers():
            await self.reach(max(offered))
            self._offers.drop(offered)

    def _apply_offers(self) -> None:
        """Apply announced entries as long as each is the next one.

        The caller holds `_turn`, or `_turn` is free and the caller does not await.
        """
        while (decoded := self._offers.pop_next(self._state.seq, self._state.hash)) is not None:
            try:
                _ = self._on_entry(decoded)
            except Corrupt as error:  # not raised here: the next read of the entry raises it
                log.warning("a peer announced an entry that cannot be applied: %s", error)
                self._offers.add(decoded.entry.seq, b"")
                return

    async def refresh(self, since_s: float = math.inf) -> None:
        """Apply all entries that were committed before this call (I3).

        It costs one GET of the next number, shared by all callers that arrive before the GET
        starts. If the caller needs only the entries committed before `since_s` of the boot clock, a
        view that was fresh later costs nothing.
        """
        if self._freshness.moment.boot_s > since_s and not self._is_void():
            return
        need = self._probes_begun + 1
        while self._probe_fresh < need:
            await asyncio.shield(self._start_probe())

    def _start_probe(self) -> asyncio.Task[None]:
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._find_end())
            self._probe.add_done_callback(retrieve_exception)
        return self._probe

    async def _find_end(self) -> None:
        self._probes_begun += 1
        number = self._probes_begun
        while True:
            started, offered = self._freshness.now(), self._offers.numbers()
            try:
                await self.objects.read(self._state.seq + 1)
            except ObjectNotFound:
                self._offers.drop(offered)
                # If the view has expired, the next number may be absent because it was collected.
                if not self._is_void():
                    self._freshness.advance(started)
                    break
                await self.ensure_view()
                continue
            async with self._moving():  # waits for the outcome of an own PUT of that number
                await self._ensure_view()
                await self._catch_up()
            if not self._is_void():
                break  # the catch-up reached an end of the WAL after this probe began
        self._probe_fresh = number

    @property
    def view_age_s(self) -> float:
        """Seconds since the newest moment at which the store had no entry that this view lacks."""
        return max(self._freshness.view_age_s(), 0.0)

    def _is_void(self) -> bool:
        return self._is_half_applied or self._freshness.view_age_s() > self.view_age_max_s

    async def _ensure_view(self) -> None:
        if self._is_void():
            self.counters.void += 1
            log.warning("the view of the WAL has expired or failed: loading the newest checkpoint")
            await self._load()

    async def _load(self) -> None:
        """Load a new view from the newest checkpoint. Until it is loaded, the old view stays."""
        self._freshness.moment = fresh = NEVER
        stuck_at = -1
        while True:
            state = await self.objects.newest_checkpoint(self.cluster)
            checkpoint_seq = state.seq
            try:
                fresh = await self._follow_to_newest(state)
                break
            except Corrupt as error:
                # Damage, unless the WAL was collected meanwhile: then a newer checkpoint exists.
                if stuck_at == state.seq:
                    why = f"{error.why}; nothing after entry {state.seq} can be read"
                    raise Corrupt(error.key, f"{why}: see tidelog repair") from error
                stuck_at = state.seq
        self._state = state
        self.told_seq = max(self.told_seq, state.seq)
        self._is_half_applied = False
        self._freshness.moment = fresh
        self._checkpoints.on_loaded(checkpoint_seq)
        self.clone_fence.check_loaded(state)
        self._tell(lambda subscriber: subscriber.on_reset())
        self._checkpoints.write_if_due(self._state.seq, self.checkpoint)

    async def _follow_to_newest(self, state: ClusterState) -> Moment:
        """Apply all entries after `state`; return a moment at which there were no more.

        Raises Corrupt at a hole; a gap before strays is no hole. An absent number may have been
        collected, so only a listing shows the end of the WAL: its newest entry is never collected.
        """
        while True:
            started = self._freshness.now()
            numbers = await self.objects.numbers_after(state.seq)
            await self._follow(state, lambda decoded: self._apply(state, decoded))
            seqs = [state.seq, *(number for number in numbers if number > state.seq)]
            if len(strays := await self.objects.strays(seqs)) < len(seqs) - 1:
                raise Corrupt(object_keys.wal(state.seq + 1), "is missing, but later entries exist")
            for number in strays:
                log.error("%s is a stray: see tidelog repair", object_keys.wal(number))
            if self._freshness.age_s(started) <= state.bounds.now.view_age_ms / 1000:
                return started

    async def _catch_up(self) -> None:
        fresh = await self._follow(self._state, self._on_entry)
        if not self._is_void():  # as in _find_end
            self._freshness.advance(fresh)

    async def _follow(
        self,
        state: ClusterState,
        on_entry: Callable[[DecodedEntry], object],
        *,
        upto: float = math.inf,
    ) -> Moment:
        """Apply the entries after `state`, up to the first absent number.

        Return a moment just before the read that found it absent. After the first entry, read
        ahead.
        """
        width = 1
        while True:
            if state is self._state:
                self._apply_offers()
            if state.seq >= upto:
                return NEVER
            started = self._freshness.now()
            seqs = range(state.seq + 1, int(min(state.seq + width, upto)) + 1)
            reads = [asyncio.create_task(self._find(seq)) for seq in seqs]
            try:
                for read in reads:
                    decoded = await read
                    # If the view has expired, this may be an invalid entry at a collected number.
                    if decoded is None or (state is self._state and self._is_void()):
                        return started
                    if decoded.entry.previous != state.hash:
                        decoded = await self.objects.find(decoded.entry.seq) or decoded
                    if decoded.entry.previous != state.hash:
                        why = "does not name the entry before it: the chain is broken"
                        raise Corrupt(object_keys.wal(decoded.entry.seq), why)
                    on_entry(decoded)
            finally:
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
            width = min(width * 4, PREFETCH)

    async def _find(self, seq: int) -> DecodedEntry | None:
        """Return the entry, or None if the number is absent in the store.

        If a peer announced it, its bytes may come from a peer, so the caller checks the chain.
        """
        if self._tail_objects is not None and seq in self._offers:
            decoded = await self.objects.read_announced(seq, self._tail_objects)
            if decoded is not None:
                return decoded
        return await self.objects.find(seq)

    def _apply(self, state: ClusterState, decoded: DecodedEntry) -> Applied:
        self.counters.entries_applied += 1
        self.clone_fence.check_writer(decoded)
        key = object_keys.wal(decoded.entry.seq)
        try:
            return state.apply(decoded, key)
        except (Corrupt, *TASK_ENDS):  # Corrupt: `apply` has changed nothing
            raise
        except BaseException as error:
            self._is_half_applied = self._is_half_applied or state is self._state
            log.critical("object %s cannot be applied", key, exc_info=error)
            raise Unavailable(f"object {key} cannot be applied: {error!r}") from error

    def _on_entry(self, decoded: DecodedEntry) -> list[Outcome]:
        applied = self._apply(self._state, decoded)
        self._tell(lambda subscriber: subscriber.on_applied(decoded.entry, applied))
        self._checkpoints.write_if_due(self._state.seq, self.checkpoint)
        return applied.outcomes

    def _tell(self, call: Callable[[Subscriber], None]) -> None:
        """Call each subscriber.

        Its derived data may be wrong after an exception, so the view expires, and `on_reset` drops
        the data. The entry and its outcomes stay valid.
        """
        for subscriber in self.subscribers:
            try:
                call(subscriber)
            except TASK_ENDS:
                raise
            except BaseException as error:
                self._freshness.expire()
                log.critical("bug in %s", type(subscriber).__name__, exc_info=error)

    def begin_checkpoint(self) -> None:
        """Begin to write a checkpoint of the newest state, if there is none."""
        self._checkpoints.write_now(self._state.seq, self.checkpoint)

    async def checkpoint_at_end(self) -> None:
        """Do what `begin_checkpoint` does, and wait. A failure is logged."""
        await self._checkpoints.write_last(self._state.seq, self.checkpoint)

    async def checkpoint(self) -> int:
        state = self.state  # raises if it is half applied: such a state is not written
        return await self.objects.write_checkpoint(state.seq, state.encode())
