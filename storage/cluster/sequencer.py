"""The sequencer, which commits for all brokers. If it does not answer, any broker commits alone.

The sequencer is the first in rank of the live brokers (cluster.liveness). The other brokers forward
their drafts to it. Drafts that wait while its last PUT is in flight become one entry. Correctness
does not depend on the sequencer (DESIGN 6): after a refusal or a timeout, a broker commits by
itself at once. Two sequencers at a time do no harm, even if both have the same draft. A broker that
makes an entry has read the whole chain before this entry, and omits drafts that are in the chain.
`apply` checks again (state.applied_drafts).

**On a crash**: two brokers have a forwarded draft, the sequencer and the draft's own broker. If one
of the two crashes, the other commits the draft, or finds it in the chain. I6: if the sequencer did
not answer, no caller gets "definitely not in the log" while the sequencer may still commit the
draft. The draft's own broker commits it again, under the same number, until one of the copies is in
the chain, or no later entry may have the draft (FORMAT rule 8). A sequencer that has refused a
draft refuses it also if the network brings it again.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tidelog.storage.cluster.entry_announcer import Announcer
from tidelog.storage.cluster.liveness import Member, first_trusted
from tidelog.storage.cluster.membership import Membership
from tidelog.storage.cluster.messages import (
    EntryAnnouncement,
    ForwardOutcomeUnknown,
    ForwardRefused,
    decode_announcements,
    decode_forwarded,
    decode_notice,
    encode_announcements,
    encode_forwarded,
)
from tidelog.storage.cluster.peer_beats import PeerBeats
from tidelog.storage.cluster.peer_transport import PeerTransport
from tidelog.storage.codec.entry import (
    Draft,
    DraftId,
    Entry,
    draft_header_bytes_max,
    has_kafka_part,
    shares,
)
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    Fenced,
    LogError,
    StoreUnfit,
    Unavailable,
)
from tidelog.storage.core.log_settings import PaceSettings, SequencerSettings
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.tasks import TASK_ENDS, begin_duty, retrieve_exception, wait_for
from tidelog.storage.state.cluster_state import Applied
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.wal.announced import ANNOUNCED_ENTRY_BYTES_MAX
from tidelog.storage.wal.chunk_uploads import ChunkUploads, body_bytes
from tidelog.storage.wal.commit_pace import LEAD_S, NEAR_S, CommitPace, Tick
from tidelog.storage.wal.merged_drafts import merge, not_after_ms
from tidelog.storage.wal.tail_objects import TailObjects
from tidelog.storage.wal.view import Committed, WalView

__all__ = ["Sequencer", "SequencerCounters", "SequencerSettings"]

log = logging.getLogger("tidelog.sequencer")

ANNOUNCED_BODY_BYTES_MAX = 64 * 1024
"""Larger chunks of an entry are not announced: peers read the object if a reader needs it."""
TOO_OLD = "the upload was not committed in time and may be collected: retry"
SKIPPED = "this broker was suspended: the outcome of the request is unknown"
REFUSED_BROKERS_MAX = 1000
"""Brokers whose refused drafts are noted: the last ones."""
BETWEEN_ZONES_BYTES_MAX = 256 * 1024
"""A larger draft is uploaded if the sequencer is in another zone: on S3 Standard, a PUT and a GET
cost as much as so many bytes between zones."""
WAIT_SHARE = 0.25
"""A draft waits for its entry for this part of the timeout, if its broker does not say how long.
The rest is for the PUT in flight and the PUT with the draft."""
QUEUE_SHARE = 0.5
"""If the drafts that wait take this part of an entry's bytes, the entry begins."""
WAIT_MS_MAX = 60_000
SEQUENCER_RETRY_S = 0.05
RETRY_S_MAX = 2.0


@dataclass
class SequencerCounters:
    """Counters since the process started."""

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
class _WaitingDraft:
    """A draft that waits here for its entry: a peer's, which has an `origin`, or this broker's."""

    draft: Draft
    origin: DraftId | None
    size: int
    not_after_ms: float
    until_s: float
    """The boot time until which its entry may wait to begin."""
    done: "asyncio.Future[int | list[Outcome]]"


@dataclass(eq=False)
class _ForwardedDraft:
    """A draft of this broker that was forwarded; its number identifies it in the chain."""

    draft: Draft
    number: int
    wal: WalView
    target: Member
    done: "asyncio.Future[list[Outcome]]"
    is_in_doubt: bool = False
    """The peer may commit the draft, or has committed it."""
    is_in_own_put: bool = False
    """This process may have committed the draft in an entry of its own."""
    is_void: bool = False

    def next_draft(self) -> Draft | None:
        if self.done.done():
            return None
        if self.is_void and self.is_in_doubt:
            # The view skipped entries. One of them may have the draft, and the state may have
            # dropped the draft's mark since.
            raise CommitUnknown(SKIPPED)
        if self.wal.state.elapsed_ms > not_after_ms(self.draft):
            # All brokers agree: the draft is in no entry so far, and no later entry may have it.
            self.is_in_doubt = False
            raise Unavailable(TOO_OLD)
        self.is_in_own_put = True
        return self.draft


class Sequencer:
    """A broker's committer, and the committer of its peers' drafts. Owned by one event loop."""

    def __init__(
        self,
        wal: WalView,
        membership: Membership,
        transport: PeerTransport,
        tail_objects: TailObjects,
        settings: SequencerSettings,
        pace_settings: PaceSettings,
    ) -> None:
        self.wal = wal
        self.clock = wal.clock
        self.membership = membership
        self.transport = transport
        self.settings = settings
        self.counters = SequencerCounters()
        self.announcer = Announcer(membership, wal.clock, transport, settings.handover_timeout_s)
        self.beats = PeerBeats(membership, wal.clock, transport, wal)
        self.uploads = ChunkUploads(
            wal,
            settings,
            lambda: bool(membership.others),
            self._inline_bytes_max,
            self._count_upload,
        )
        self._tail_objects = tail_objects
        self._number = 0
        self._own: _ForwardedDraft | None = None
        self._queue: dict[_WaitingDraft, None] = {}  # in order
        self._queue_bytes = 0
        self._batch: list[_WaitingDraft] = []
        self._drain: asyncio.Task[None] | None = None
        self._refused: dict[str, int] = {}
        """By broker, the highest number of its drafts that this broker has refused. A broker sends
        a draft once, and later drafts have higher numbers."""
        self._newest = EntryAnnouncement(0)
        self.pace = CommitPace(
            wal.clock,
            pace_settings,
            leader=self._leader_id,
            lead_s=lambda: LEAD_S if membership.others else 0.0,
            on_hurry=self._hurry,
        )
        self._is_due_earlier = asyncio.Event()
        self._is_closing = False

    @property
    def target(self) -> Member | None:
        """The peer that commits this broker's drafts. None if this broker commits them itself."""
        first = first_trusted(self.membership.ranking, self.announcer.suspects)
        return None if first is None or first.id == self.membership.me.id else first

    def _leader_id(self) -> str | None:
        target = self.target
        return None if target is None else target.id

    def refuse(self) -> None:
        """Refuse drafts of peers from now on, before shutdown. Drafts that wait are due now."""
        self._is_closing = True
        self._is_due_earlier.set()

    async def close(self) -> None:
        """Commit the drafts that wait here, then stop."""
        self.refuse()
        if self._drain is not None:
            await self._drain
        await self.announcer.close()

    # -- our own drafts

    async def commit(self, draft: Draft) -> list[Outcome]:
        """Commit the draft, by the sequencer or this broker; return one outcome per commit.

        Raises what WalView.commit does: StoreRefused and Unavailable if the draft is not in the WAL
        and never will be, Corrupt, CommitUnknown. Make one call at a time.
        """
        self.counters.drafts += 1
        # A large draft would delay the drafts of all brokers in its entry.
        draft = await self.uploads.upload_if_large(draft)
        target = self.target
        if target is not None:
            return await self._commit_through(target, draft)
        is_alone = not self.membership.others and not self._queue
        if is_alone and math.isinf(not_after_ms(draft)):
            self.counters.commits += 1
            self.pace.begin_entry()
            return await self.wal.commit(draft)  # no peers: one PUT and nothing else
        size = body_bytes(draft) + draft.header_bytes
        waiting = self._enqueue(draft, None, size, self.pace.until_s)
        outcomes = await waiting.done
        assert isinstance(outcomes, list), "only a peer's draft is answered with a number"
        return outcomes

    async def _commit_through(self, target: Member, draft: Draft) -> list[Outcome]:
        # A copy of this process (on a cloned machine) uses the same numbers. `apply` skips a
        # draft whose number is already in the log.
        self.wal.clone_fence.check_fence()
        # A draft that fails uses its number, too, so two drafts never have the same number.
        self._number += 1
        origin = DraftId(self.membership.me.id, self._number, len(draft.commits))
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(retrieve_exception)
        draft = draft._replace(origins=[origin])
        own = self._own = _ForwardedDraft(draft, self._number, self.wal, target, future)
        try:
            await self._forward(target, own)
            return own.done.result() if own.done.done() else await self._commit_alone(own)
        finally:
            self._own = None

    def _inline_bytes_max(self) -> int:
        """Return the size of the largest draft whose bytes go with it, not in uploads.

        An upload costs a PUT and delays the draft. The drafts of all brokers must fit into the
        queue of the sequencer, and bytes between zones have a price.
        """
        settings, me = self.settings, self.membership.me
        if not self.membership.others:
            return settings.alone_bytes_max
        share = settings.queue_bytes_max // (2 * (1 + len(self.membership.others)))
        bytes_max = min(settings.handover_bytes_max, share)
        is_near = (self.target or me).zone_name == me.zone_name
        return bytes_max if is_near else min(bytes_max, BETWEEN_ZONES_BYTES_MAX)

    def _count_upload(self) -> None:
        self.counters.uploads += 1

    async def _forward(self, target: Member, own: _ForwardedDraft) -> None:
        """Forward the draft once. It is then done, in doubt, or certainly not with the peer."""
        self.counters.handed_over += 1
        wait_s, timeout_s = self._wait_and_timeout_s()
        try:
            own.is_in_doubt = True
            started_s = self.clock.boot_s()
            async with asyncio.timeout(timeout_s):
                message = encode_forwarded(own.draft, int(wait_s * 1000))
                answer = await self.transport.forward(target, message)
            (entry,) = decode_announcements(answer)
            if entry.tick is not None:
                took_s = self.clock.boot_s() - started_s
                self.pace.on_round_trip(took_s - entry.tick.held_ms / 1000)
            self._on_announcement(entry)
            await self.wal.reach(entry.seq)
            if not own.done.done():
                raise ForwardOutcomeUnknown(
                    f"entry {entry.seq}, named by the peer, does not contain the draft"
                )
            self.announcer.trust(target)
        except ForwardRefused as error:
            own.is_in_doubt = False
            self.counters.refused += 1
            self.announcer.suspect(target, str(error))
        except TASK_ENDS:
            raise
        except BaseException as error:
            self.counters.unanswered += 1
            if not isinstance(error, (LogError, TimeoutError, ValueError)):
                log.critical("bug in a message to a peer", exc_info=error)
            self.announcer.suspect(target, str(error) or f"no answer within {timeout_s:g} s")
            try:
                await self.wal.refresh()  # the draft may be in the chain
            except LogError as second:
                log.warning("cannot read the WAL: %s", second)

    def _wait_and_timeout_s(self) -> tuple[float, float]:
        """Return how long a draft may wait at the sequencer, and the timeout of the answer.

        If the sequencer's last tick was free, or none is known, the timeout has no part for the
        wait, so that a silent sequencer is found as soon as without a pace.
        """
        timeout_s, interval_s = self.settings.handover_timeout_s, self.pace.leader_wait_s
        left_s = max(self.pace.until_s - self.clock.boot_s(), 0.0)
        if not interval_s:
            return min(left_s, timeout_s * WAIT_SHARE), timeout_s
        wait_s = min(left_s, interval_s)
        return wait_s, timeout_s + wait_s

    def _hurry(self, until_s: float) -> None:
        """Let this broker's draft that waits for its entry wait until `until_s` at most."""
        for waiting in self._queue:
            if waiting.origin is None:
                waiting.until_s = min(waiting.until_s, until_s)
        self._is_due_earlier.set()
        if self._own is not None:
            next_s = max(until_s - self.clock.boot_s(), 0.0)
            self.announcer.send(self._own.target, EntryAnnouncement(0, tick=_tick_in(next_s)))

    async def _commit_alone(self, own: _ForwardedDraft) -> list[Outcome]:
        self.counters.own_commits += 1
        self.pace.begin_entry()
        pause_s = SEQUENCER_RETRY_S
        while True:
            try:
                committed = await self.wal.commit_next(own.next_draft)
            except Unavailable as error:
                if not own.is_in_doubt:
                    raise
                # The peer may still commit the draft, so a caller must not get this error (I6).
                log.warning("the outcome of draft %d is unknown, retrying: %s", own.number, error)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, RETRY_S_MAX)
                continue
            if committed is not None:
                self._announce(committed)
            return own.done.result()

    # -- drafts that wait here for the next entry

    async def on_forward(self, message: Part) -> bytes:
        """Commit a peer's draft and return the response.

        Raises ForwardRefused if this broker will never commit the draft, ForwardOutcomeUnknown if
        the outcome is unknown.
        """
        started_s = self.clock.boot_s()
        try:
            draft, wait_ms = decode_forwarded(message)
        except Corrupt as error:
            self.counters.not_taken += 1
            raise ForwardRefused(str(error)) from error
        (origin,) = draft.origins
        if origin.number <= self._refused.get(origin.origin_id, 0):
            raise ForwardRefused(f"draft {origin.number} was refused, and came again")
        try:
            entry = await self._on_draft(draft, origin, len(message), wait_ms)
        except ForwardRefused:
            self._note_refused(origin)
            raise
        tick = self.pace.tick(self.clock.boot_s() - started_s)
        return encode_announcements([msgspec.structs.replace(entry, tick=tick)])

    def _note_refused(self, origin: DraftId) -> None:
        """Note that a peer's draft was refused.

        Its broker tells its client so, and the network may bring the draft a second time.
        """
        numbers = self._refused
        numbers[origin.origin_id] = max(origin.number, numbers.pop(origin.origin_id, 0))
        if len(numbers) > REFUSED_BROKERS_MAX:
            del numbers[next(iter(numbers))]

    async def _on_draft(
        self, draft: Draft, origin: DraftId, size: int, wait_ms: int
    ) -> EntryAnnouncement:
        if self._is_closing or self._queue_bytes + size > self.settings.queue_bytes_max:
            self.counters.not_taken += 1
            why = "shutting down" if self._is_closing else "the queue of drafts is full"
            raise ForwardRefused(why)
        if self.wal.state.level < format_levels.KAFKA and has_kafka_part(draft):
            self.counters.not_taken += 1
            raise ForwardRefused("this broker has not read the entry that raises the level")
        self.counters.taken += 1
        wait_s = min(wait_ms, WAIT_MS_MAX) / 1000
        if wait_ms < 0:  # of an earlier version, whose timeout knows no wait
            wait_s = self.settings.handover_timeout_s * WAIT_SHARE
        waiting = self._enqueue(draft, origin, size, self.clock.boot_s() + wait_s)
        # Shielded: a peer that disconnects does not cancel the commit.
        seq = await asyncio.shield(waiting.done)
        assert isinstance(seq, int), "a peer's draft is answered with a number"
        newest = self._newest
        return newest if newest.seq == seq else EntryAnnouncement(seq)

    def _enqueue(
        self, draft: Draft, origin: DraftId | None, size: int, until_s: float
    ) -> _WaitingDraft:
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(retrieve_exception)
        waiting = _WaitingDraft(draft, origin, size, not_after_ms(draft), until_s, future)
        self._queue[waiting] = None
        self._queue_bytes += size
        self._is_due_earlier.set()
        if self._drain is None or self._drain.done():
            self._drain = begin_duty("commit", self._commit_waiting())
        return waiting

    async def _commit_waiting(self) -> None:
        while self._queue:
            self._batch = []
            try:
                await self._wait_until_due()
                if self._queue:
                    self.pace.begin_entry()
                committed = await self.wal.commit_next(self._next_batch)
                if committed is not None:
                    self._announce(committed)
                    self._answer_own(committed)
            except (CommitUnknown, Corrupt, StoreUnfit) as error:
                self._fail(
                    self._batch or list(self._queue), error, ForwardOutcomeUnknown(str(error))
                )
            except Unavailable as error:  # the drafts are not in the WAL; drop them
                self._fail(list(self._queue), error, ForwardRefused(str(error)))
            except TASK_ENDS:
                raise
            except BaseException as bug:  # if this task gave no answer, callers would wait forever
                log.critical("bug in a commit", exc_info=bug)
                why = f"the sequencer failed: {bug!r}"
                self._fail(list(self._queue), CommitUnknown(why), ForwardOutcomeUnknown(why))

    async def _wait_until_due(self) -> None:
        """Wait until the pace permits an entry, or a draft may wait no longer.

        Drafts that arrive meanwhile share the entry. The chain may get them from their own brokers.
        """
        bytes_max = self.settings.entry_bytes_max * QUEUE_SHARE
        while self._queue and not self._is_closing and self._queue_bytes < bytes_max:
            until_s = min(waiting.until_s for waiting in self._queue)
            pause_s = min(until_s, self.pace.entry_s()) - self.clock.boot_s()
            if pause_s <= NEAR_S:
                return
            self._is_due_earlier.clear()
            await wait_for(self._is_due_earlier, pause_s)

    def _next_batch(self) -> Draft | None:
        """Return the first waiting drafts that fit into one entry.

        Called before each attempt, so that it omits drafts that reached the chain since the last
        attempt.
        """
        now_ms = self.wal.state.elapsed_ms
        old = [waiting for waiting in self._queue if waiting.not_after_ms < now_ms]
        self._fail(old, Unavailable(TOO_OLD), ForwardRefused(TOO_OLD))
        batch: list[_WaitingDraft] = []
        size = header_bytes = 0
        for waiting in self._queue:
            size += waiting.size
            header_bytes += waiting.size - body_bytes(waiting.draft)
            is_large = size > self.settings.entry_bytes_max
            if batch and (is_large or header_bytes > draft_header_bytes_max()):
                break
            batch.append(waiting)
        self._batch = sorted(batch, key=lambda waiting: waiting.origin is None)
        return merge([waiting.draft for waiting in self._batch]) if batch else None

    def _answer_own(self, committed: Committed) -> None:
        """Answer this broker's drafts of the batch. `on_applied` answered the drafts of peers."""
        first = sum(origin.commits for origin in committed.entry.origins)
        for waiting in self._batch:
            if waiting.origin is None:
                last = first + len(waiting.draft.commits)
                self._finish(waiting, committed.outcomes[first:last])
                first = last

    def _finish(self, waiting: _WaitingDraft, result: int | list[Outcome]) -> None:
        self._forget(waiting)
        if not waiting.done.done():
            waiting.done.set_result(result)

    def _fail(self, batch: Sequence[_WaitingDraft], own: Exception, peers: LogError) -> None:
        for waiting in batch:
            self._forget(waiting)
            if not waiting.done.done():
                waiting.done.set_exception(own if waiting.origin is None else peers)

    def _forget(self, waiting: _WaitingDraft) -> None:
        if waiting in self._queue:
            del self._queue[waiting]
            self._queue_bytes -= waiting.size

    # -- entries of other brokers

    def on_announcements(self, message: Part) -> bytes:
        """Handle announcements of committed entries; return the answer to a beat, or nothing.

        Raises Corrupt. An empty message or a beat asks whether this broker answers: raises
        ForwardRefused if this broker is about to stop.
        """
        announced, answer = decode_announcements(message), b""
        is_question = all(not entry.seq and entry.body for entry in announced)
        if (self._is_closing or self.membership.is_leaving) and is_question:
            raise ForwardRefused("this broker is about to stop")
        for entry in announced:
            if not entry.seq:
                if entry.header:
                    self.membership.on_notice(decode_notice(entry.header))
                elif entry.body:
                    answer = self.beats.on_beat(entry.body)
                elif entry.tick is not None:
                    self._on_hurry(entry.tick)
                continue
            self.announcer.counters.received += 1
            old_seq = self.wal.state.seq
            self._on_announcement(entry)
            self.announcer.counters.useful += self.wal.state.seq > old_seq
        return answer

    def _on_hurry(self, tick: Tick) -> None:
        """Let the drafts of peers wait for `tick.next_ms` at most."""
        until_s = self.clock.boot_s() + tick.next_ms / 1000
        for waiting in self._queue:
            waiting.until_s = min(waiting.until_s, until_s)
        self._is_due_earlier.set()

    def _on_announcement(self, entry: EntryAnnouncement) -> None:
        if entry.tick is not None:
            self.pace.on_tick(entry.tick)
        # The body first: the header ends long polls, which then read the body.
        self._tail_objects.add(object_keys.wal(entry.seq), len(entry.header), entry.body)
        self.wal.on_announced(entry.seq, entry.header)

    def _announce(self, committed: Committed) -> None:
        """Announce an entry of this broker. Call this only after the entry's PUT is done."""
        self.counters.commits += 1
        entry, header = committed.entry, committed.header
        size = sum(len(body) for body in committed.bodies)
        is_small = len(header) <= ANNOUNCED_ENTRY_BYTES_MAX
        is_whole = is_small and size <= ANNOUNCED_BODY_BYTES_MAX
        body = b"".join(committed.bodies) if is_whole else b""
        self._newest = EntryAnnouncement(entry.seq, header if is_small else b"", body)
        self._tail_objects.add(object_keys.wal(entry.seq), len(header), body)
        if self.membership.others:
            origin_ids = {origin.origin_id for origin in entry.origins}
            tick = self.pace.tick() if self.target is None else None
            announced = msgspec.structs.replace(self._newest, tick=tick)
            self.announcer.announce(announced, but=origin_ids)

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        if entry.writer != self.wal.writer:
            self.pace.on_entry()
        if not entry.origins:
            return
        newest_numbers = dict[str, int]()
        for origin, commits in shares(entry):
            newest_numbers[origin.origin_id] = max(
                origin.number, newest_numbers.get(origin.origin_id, 0)
            )
            if origin.origin_id == self.membership.me.id:
                self._answer_forwarded(entry, origin, commits, applied)
        for waiting in [waiting for waiting in self._queue if waiting.origin is not None]:
            origin = waiting.draft.origins[0]
            if origin.number <= newest_numbers.get(origin.origin_id, 0):
                self._finish(waiting, entry.seq)

    def _answer_forwarded(
        self, entry: Entry, origin: DraftId, commits: range, applied: Applied
    ) -> None:
        """Answer this broker's forwarded draft that has the number of `origin`.

        If the draft of that number in the entry has other commits, or this process has not used the
        number yet, a copy of this process forwarded that draft. `apply` then skips this process's
        own draft of that number in each later entry.
        """
        own = self._own
        if own is not None and origin.number == own.number:
            if own.done.done():
                return
            commit_ids = [entry.commits[index].commit_id for index in commits]
            if commit_ids == [commit.commit_id for commit in own.draft.commits]:
                outcomes = applied.outcomes[commits.start : commits.stop]
                if own.is_void and all(o.is_duplicate and not o.placements for o in outcomes):
                    # An entry that the view skipped has the draft, and its placements.
                    own.done.set_exception(CommitUnknown(SKIPPED))
                else:
                    own.done.set_result(outcomes)
                return
            self.wal.clone_fence.fence(entry.seq)
            own.done.set_exception(Fenced(self.wal.writer, entry.seq))
        elif origin.number > self._number:
            self.wal.clone_fence.fence(entry.seq)

    def on_reset(self) -> None:
        """Handle a reload of the view.

        Waiting drafts of peers may be in the entries that the view skipped. If the state has a
        draft number of this broker that this process did not use, a copy of this process used it.
        """
        state, own = self.wal.state, self._own
        is_unused = own is not None and not (own.is_in_doubt or own.is_in_own_put)
        if state.origins.number(self.membership.me.id) > self._number - is_unused:
            self.wal.clone_fence.fence(state.seq)
        unknown = ForwardOutcomeUnknown("the sequencer's view of the WAL had expired")
        foreign = [waiting for waiting in self._queue if waiting.origin is not None]
        self._fail(foreign, unknown, unknown)
        if self._own is not None:
            self._own.is_void = True


def _tick_in(seconds: float) -> Tick:
    return Tick(math.ceil(seconds * 1000))
