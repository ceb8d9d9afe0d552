"""Who commits: by habit one broker for all, and every broker for itself whenever in doubt.

The sequencer is the first in rank of the live brokers (storage.members). The others hand it their
drafts, and what waits while its last PUT is in flight becomes one entry. It is never trusted
(DESIGN 2): a broker that is refused, or hears nothing, commits by itself at once. Two sequencers at
a time are harmless, as is a draft that both of them hold: whoever makes an entry has read all of
the chain before it, leaves out what is there already, and `apply` looks again (storage.origins).

And if we die here? A handed-over draft is the sequencer's and its broker's: each death leaves the
other, who finds out by reading. I6: what was handed over and not answered is "definitely not in the
log" for nobody; it is committed again, under the same number, until it or its like is there.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from storage import keys
from storage.clock import Clock
from storage.entry import Draft, Entry, Origin, shares
from storage.errors import CommitUnknown, Corrupt, LogError, StoreUnfit, Unavailable
from storage.handover import (
    NoAnswer,
    NotTaken,
    Told,
    decode_hand_over,
    decode_told,
    encode_hand_over,
    encode_told,
    merge,
    not_after_ms,
    refer,
)
from storage.members import Member, first_trusted
from storage.membership import Membership
from storage.objectstore import Created, Part
from storage.state import Outcome
from storage.told import ToldBodies
from storage.wakeups import PeerTransport, Wakeups
from storage.wal import Committed, Wal

log = logging.getLogger("tidelog.sequencer")

ENTRY_PARTS_MAX = 100_000
"""Commits and chunks in one entry: its header has a bound (I10)."""
TOLD_BYTES_MAX = 64 * 1024
"""Larger headers, and larger chunks of an entry, are not told but read from the store."""
TOO_OLD = "its upload took too long to be committed and may be collected; send it again"
RETRY_S = 0.05
RETRY_S_MAX = 2.0


class SequencerSettings(NamedTuple):
    """Values; the service reads them from its settings."""

    handover_timeout_s: float = 1.0
    """Longer than a PUT takes, twice: the one in flight, and ours."""
    handover_bytes_max: int = 512 * 1024
    """A larger draft's chunks are uploaded first and referred to."""
    entry_bytes_max: int = 64 * 1024 * 1024
    upload_life_s: float = 1800.0
    """From an upload to the entry that names it, by the time of the cluster."""
    queue_bytes_max: int = 64 * 1024 * 1024
    """Of drafts that peers have handed over; beyond it they are refused, and commit themselves."""


@dataclass
class SequencerCounters:
    """Since the process started."""

    commits: int = 0
    drafts: int = 0
    handed_over: int = 0
    refused: int = 0
    unanswered: int = 0
    own_commits: int = 0
    taken: int = 0
    not_taken: int = 0
    uploads: int = 0


@dataclass(eq=False)
class _Waiting:
    """A draft that waits here for its entry: a peer's, by its origin, or our own."""

    draft: Draft
    origin: Origin | None
    size: int
    not_after_ms: float
    done: "asyncio.Future[int | list[Outcome]]"


@dataclass(eq=False)
class _HandedOver:
    """Our draft that a peer has or had: found in the chain by its number."""

    draft: Draft
    number: int
    wal: Wal
    done: "asyncio.Future[list[Outcome]]"
    is_in_doubt: bool = False
    is_void: bool = False

    def next_draft(self) -> Draft | None:
        if self.done.done():
            return None
        if self.is_void and self.is_in_doubt:
            # Entries went by unseen: it may be in one of them, and its mark forgotten since.
            raise CommitUnknown("this broker slept: nobody knows whether the draft was committed")
        if self.wal.state.time_ms > not_after_ms(self.draft):
            # Definite, whoever has it: it is in no entry so far, and must not be in a later one.
            self.is_in_doubt = False
            raise Unavailable(TOO_OLD)
        return self.draft


@dataclass(eq=False)
class Sequencer:
    """A broker's committer, and the one it is to its peers. Owned by one event loop."""

    wal: Wal
    clock: Clock
    membership: Membership
    transport: PeerTransport
    settings: SequencerSettings = SequencerSettings()
    counters: SequencerCounters = field(default_factory=SequencerCounters)

    def __post_init__(self) -> None:
        self.wakeups = Wakeups(
            self.membership, self.clock, self.transport, self.settings.handover_timeout_s
        )
        self.told_bodies = ToldBodies()
        self.wal.watcher = self
        self._number = 0
        self._own: _HandedOver | None = None
        self._queue: dict[_Waiting, None] = {}  # in order
        self._queue_bytes = 0
        self._batch: list[_Waiting] = []
        self._drain: asyncio.Task[None] | None = None
        self._newest = Told(0)
        self._is_closing = False

    @property
    def target(self) -> Member | None:
        """Who commits our drafts; None is ourselves."""
        first = first_trusted(self.membership.ranking, self.wakeups.suspects)
        return None if first is None or first.id == self.membership.me.id else first

    @property
    def is_first(self) -> bool:
        """Whether this broker commits for all."""
        return self.target is None

    def refuse(self) -> None:
        """Take no more from peers: the end is near."""
        self._is_closing = True

    async def close(self) -> None:
        """Commit what was taken, then stop."""
        self.refuse()
        if self._drain is not None:
            await self._drain
        await self.wakeups.close()

    # -- our own drafts

    async def commit(self, draft: Draft) -> list[Outcome]:
        """Make the draft part of the chain, by whom it may be; one outcome per commit.

        Raises as Wal.commit does: StoreRefused and Unavailable when it is definitely not in the WAL
        and never will be, Corrupt, CommitUnknown. One at a time.
        """
        self.counters.drafts += 1
        target = self.target
        if target is not None:
            return await self._commit_through(target, draft)
        if not self.membership.others and not self._queue:
            self.counters.commits += 1
            return await self.wal.commit(draft)  # alone: one PUT and nothing else
        # A large one would hold up everybody else's entry, too.
        draft = await self._upload_if_large(draft)
        waiting = self._enqueue(draft, None, sum(len(body) for body in draft.bodies))
        outcomes = await waiting.done
        assert isinstance(outcomes, list), "only a peer's draft is answered with a number"
        return outcomes

    async def _commit_through(self, target: Member, draft: Draft) -> list[Outcome]:
        draft = await self._upload_if_large(draft)
        # Spent whatever comes of it: a number is never given to two drafts.
        self._number += 1
        origin = Origin(self.membership.me.id, self._number, len(draft.commits))
        done = asyncio.get_running_loop().create_future()
        draft = draft._replace(origins=[origin])
        own = self._own = _HandedOver(draft, self._number, self.wal, done)
        try:
            await self._hand_over(target, own)
            return own.done.result() if own.done.done() else await self._commit_alone(own)
        finally:
            self._own = None

    async def _upload_if_large(self, draft: Draft) -> Draft:
        """The draft as it is to be committed. Dying in here leaves an object that nothing names,
        for the collector.

        And if we sleep, or a message does? The collector deletes the upload only when an entry is
        there that ends its life by the time of the cluster, and whoever makes an entry has applied
        all before it: the upload is collected, or it is named, and never first one, then the other.
        """
        if sum(len(body) for body in draft.bodies) <= self.settings.handover_bytes_max:
            return draft
        self.counters.uploads += 1
        now_ms = max(self.wal.state.time_ms, self.clock.now_ms())
        end_ms = now_ms + int(self.settings.upload_life_s * 1000)
        key = keys.data(self.clock.new_id().hex(), end_ms)
        pause_s = RETRY_S
        while await self.wal.store.create(key, draft.bodies) is Created.UNKNOWN:
            # The name is ours alone, so EXISTS at the next try means that this one arrived.
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, RETRY_S_MAX)
        return refer(draft, key)

    async def _hand_over(self, target: Member, own: _HandedOver) -> None:
        """Ask the peer once. Afterwards `own` is done, in doubt, or definitely not with it."""
        self.counters.handed_over += 1
        try:
            own.is_in_doubt = True
            async with asyncio.timeout(self.settings.handover_timeout_s):
                answer = await self.transport.hand_over(target, encode_hand_over(own.draft))
            (told,) = decode_told(answer)
            self._hear(told)
            await self.wal.reach(told.seq)
            if not own.done.done():
                raise NoAnswer(f"it says entry {told.seq}, and our draft is not there")
            self.wakeups.trust(target)
        except NotTaken as error:
            own.is_in_doubt = False
            self.counters.refused += 1
            self.wakeups.suspect(target, str(error))
        except (LogError, TimeoutError, ValueError) as error:
            self.counters.unanswered += 1
            timeout_s = self.settings.handover_timeout_s
            self.wakeups.suspect(target, str(error) or f"no answer within {timeout_s:g} s")
            try:
                await self.wal.refresh()  # it may be there all the same
            except LogError as second:
                log.warning("cannot read the WAL: %s", second)

    async def _commit_alone(self, own: _HandedOver) -> list[Outcome]:
        self.counters.own_commits += 1
        pause_s = RETRY_S
        while True:
            try:
                committed = await self.wal.commit_next(own.next_draft)
            except Unavailable as error:
                if not own.is_in_doubt:
                    raise
                # Not by us; but the peer may still do it, so this is no answer to anybody (I6).
                log.warning("draft %d is in doubt, trying again: %s", own.number, error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_S_MAX)
                continue
            if committed is not None:
                self._tell(committed)
            return own.done.result()

    # -- drafts that wait here for the next entry

    async def take(self, message: Part) -> bytes:
        """A peer's draft: the answer when it is in the chain. Raises NotTaken when it never will be
        by us, NoAnswer when we do not know."""
        try:
            draft = decode_hand_over(message)
        except Corrupt as error:
            self.counters.not_taken += 1
            raise NotTaken(str(error)) from error
        if self._is_closing or self._queue_bytes + len(message) > self.settings.queue_bytes_max:
            self.counters.not_taken += 1
            why = "it is shutting down" if self._is_closing else "too many drafts wait there"
            raise NotTaken(why)
        self.counters.taken += 1
        (origin,) = draft.origins
        # Shielded: a peer that goes away does not take its draft along.
        seq = await asyncio.shield(self._enqueue(draft, origin, len(message)).done)
        assert isinstance(seq, int), "a peer's draft is answered with a number"
        newest = self._newest
        return encode_told([newest if newest.seq == seq else Told(seq)])

    def _enqueue(self, draft: Draft, origin: Origin | None, size: int) -> _Waiting:
        done = asyncio.get_running_loop().create_future()
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
        waiting = _Waiting(draft, origin, size, not_after_ms(draft), done)
        self._queue[waiting] = None
        self._queue_bytes += size
        if self._drain is None or self._drain.done():
            self._drain = asyncio.create_task(self._commit_waiting(), name="tidelog-sequencer")
        return waiting

    async def _commit_waiting(self) -> None:
        while self._queue:
            self._batch = []
            try:
                committed = await self.wal.commit_next(self._next_batch)
            except (CommitUnknown, Corrupt, StoreUnfit) as error:
                self._fail(self._batch or list(self._queue), error, NoAnswer(str(error)))
            except Unavailable as error:  # none of it is in the WAL, and we forget it now
                self._fail(list(self._queue), error, NotTaken(str(error)))
            except Exception as bug:  # the root of a task: nobody may be left waiting
                self._fail(list(self._queue), bug, NoAnswer("the sequencer has a bug"))
                raise
            else:
                if committed is not None:
                    self._tell(committed)
                    self._answer_own(committed)

    def _next_batch(self) -> Draft | None:
        """As much of what waits as one entry carries; asked anew before each attempt, when drafts
        that are in the chain meanwhile wait no more."""
        now_ms = self.wal.state.time_ms
        old = [waiting for waiting in self._queue if waiting.not_after_ms < now_ms]
        self._fail(old, Unavailable(TOO_OLD), NotTaken(TOO_OLD))
        batch: list[_Waiting] = []
        size = parts = 0
        for waiting in self._queue:
            size += waiting.size
            parts += len(waiting.draft.commits) + len(waiting.draft.chunks)
            if batch and (size > self.settings.entry_bytes_max or parts > ENTRY_PARTS_MAX):
                break
            batch.append(waiting)
        self._batch = sorted(batch, key=lambda waiting: waiting.origin is None)
        return merge([waiting.draft for waiting in self._batch]) if batch else None

    def _answer_own(self, committed: Committed) -> None:
        """Of the batch; peers' drafts were found by their origins."""
        first = sum(origin.commits for origin in committed.entry.origins)
        for waiting in self._batch:
            if waiting.origin is None:
                last = first + len(waiting.draft.commits)
                self._finish(waiting, committed.outcomes[first:last])
                first = last

    def _finish(self, waiting: _Waiting, result: int | list[Outcome]) -> None:
        self._forget(waiting)
        if not waiting.done.done():
            waiting.done.set_result(result)

    def _fail(self, batch: Sequence[_Waiting], own: Exception, peers: LogError) -> None:
        for waiting in batch:
            self._forget(waiting)
            if not waiting.done.done():
                waiting.done.set_exception(own if waiting.origin is None else peers)

    def _forget(self, waiting: _Waiting) -> None:
        if waiting in self._queue:
            del self._queue[waiting]
            self._queue_bytes -= waiting.size

    # -- what others commit, and tell

    def told(self, message: Part) -> None:
        """Entries that a peer says are in the chain. Raises Corrupt."""
        for told in decode_told(message):
            self.wakeups.counters.received += 1
            before = self.wal.state.seq
            self._hear(told)
            self.wakeups.counters.useful += self.wal.state.seq > before

    def _hear(self, told: Told) -> None:
        # The body first: whoever waits for its records is woken by the header.
        self.told_bodies.add(keys.wal(told.seq), len(told.header), told.body)
        self.wal.offer(told.seq, told.header)

    def _tell(self, committed: Committed) -> None:
        """Of an entry of ours. Its number was won by a PUT that is done: nothing is told before."""
        self.counters.commits += 1
        entry, header = committed.entry, committed.header
        size = sum(len(body) for body in committed.bodies)
        is_small = len(header) <= TOLD_BYTES_MAX
        body = b"".join(committed.bodies) if is_small and size <= TOLD_BYTES_MAX else b""
        self._newest = Told(entry.seq, header if is_small else b"", body)
        self.told_bodies.add(keys.wal(entry.seq), len(header), body)
        if self.membership.others:
            answered = {origin.origin_id for origin in entry.origins}
            self.wakeups.tell(self._newest, but=answered)

    def on_entry(self, entry: Entry, outcomes: Sequence[Outcome]) -> None:
        """An entry was applied: whose drafts are in it need not be committed any more."""
        if not entry.origins:
            return
        own, seen = self._own, dict[str, int]()
        for origin, commits in shares(entry):
            seen[origin.origin_id] = max(origin.number, seen.get(origin.origin_id, 0))
            if (
                own is not None
                and (origin.origin_id, origin.number) == (self.membership.me.id, own.number)
                and not own.done.done()
            ):
                own.done.set_result(list(outcomes[commits.start : commits.stop]))
        for waiting in [waiting for waiting in self._queue if waiting.origin is not None]:
            origin = waiting.draft.origins[0]
            if origin.number <= seen.get(origin.origin_id, 0):
                self._finish(waiting, entry.seq)

    def on_void(self) -> None:
        """The view was loaded anew: what we hold for others may be in entries that went by."""
        unknown = NoAnswer("the sequencer's view of the WAL was too old")
        foreign = [waiting for waiting in self._queue if waiting.origin is not None]
        self._fail(foreign, unknown, unknown)
        if self._own is not None:
            self._own.is_void = True
