"""The write path of a broker: requests wait in the open hot segment, one flush commits them all.

One flush runs at a time. Requests that arrive during a flush go into the next one. So the batch
grows with the load and the store's latency. The pace of commits (wal.commit_pace) spaces flushes to
bound the cost of the PUTs; a request may have a class, the time for which it waits at most. I10:
buffered bytes are bounded; at the bound callers get Throttled.

**On a crash** before the commit, acks=all callers have no answer, and acks=1 requests are in the
hot log. During the commit, the store has the entry or not (wal.view). After it, the records are in
the log, and a retry with the same Idempotency-Key gets the first answer.

`WriterCounters` are for metrics.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.entry import Draft, draft_header_bytes_max
from tidelog.storage.core.actions import RetireHotLog
from tidelog.storage.core.errors import (
    CommitUnknown,
    Corrupt,
    LogError,
    StoreUnfit,
    Throttled,
    Unavailable,
)
from tidelog.storage.core.histogram import BYTES, COUNTS, Histogram
from tidelog.storage.core.log_settings import PaceSettings, WriterSettings
from tidelog.storage.core.model import Acks, AppendedRange
from tidelog.storage.runtime.tasks import (
    TASK_ENDS,
    begin_duty,
    retrieve_exception,
    surviving,
    wait_for,
)
from tidelog.storage.runtime.tracer_interface import NO_OBSERVER, Observer
from tidelog.storage.state.idempotency_records import another_request, recall
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.wal.chunk_uploads import ChunkUploads
from tidelog.storage.wal.commit_pace import NEAR_S, CommitPace
from tidelog.storage.wal.merged_drafts import merge
from tidelog.storage.wal.view import Committer, WalView
from tidelog.storage.write.flush_classes import OpenClasses
from tidelog.storage.write.hot_log import HotLog
from tidelog.storage.write.hot_log_file import Recovered
from tidelog.storage.write.hot_segment import ClosedSegment, EncodedDraft
from tidelog.storage.write.requests import AppendRequest, check_timestamps
from tidelog.storage.write.segment_parts import BegunPart, EncodedPart, SegmentParts
from tidelog.storage.write.set_aside_requests import KEPT_MAX, SetAsideRequests
from tidelog.storage.write.waiters import Waiter, Waiters, log_refusal

__all__ = ["Writer", "WriterCounters", "WriterSettings"]


@dataclass
class WriterCounters:
    """Counters since the process started."""

    flushes: int = 0
    flushes_failed: int = 0
    requests: int = 0
    throttled: int = 0
    records: int = 0
    flush_bytes: int = 0
    commit_latency: Histogram = field(default_factory=Histogram)
    queue_wait: Histogram = field(default_factory=Histogram)
    """Wait of the oldest request in each flush."""
    batch_requests: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_records: Histogram = field(default_factory=lambda: Histogram(COUNTS))
    batch_bytes: Histogram = field(default_factory=lambda: Histogram(BYTES))

    def flushed(self, requests: int, draft: Draft, seconds: float) -> None:
        """Count a flush of `requests` requests, whose commit took `seconds`."""
        size = sum([chunk.size for chunk in draft.chunks])
        records = sum([chunk.rows for chunk in draft.chunks])
        self.flushes += 1
        self.flush_bytes += size
        self.records += records
        self.commit_latency.add(seconds)
        self.batch_requests.add(requests)
        self.batch_records.add(records)
        self.batch_bytes.add(size)


log = logging.getLogger("tidelog.writer")

GATHER_TURNS = 2
"""Turns of the event loop before a flush: one reads a socket, the next handles its request."""
GATHER_TURNS_MAX = 5
"""Turns of the event loop before a flush that expects more requests."""

FLUSH_PARTS_MAX = 100_000
"""Maximum sum of `AppendRequest.pieces` in one entry. Each piece takes 20 to 300 bytes of the
header, and no reader accepts a header above its bound (I10)."""

FAILED_PAUSE_S = 0.1
FAILED_FLUSHES_MAX = 3
"""After this many failed flushes in a row the broker cannot write (`why_failing`). The store may
refuse a single flush because of its requests."""
TRIAL_S = 2.0
"""Pause between trial flushes of a writer that fails and has no requests."""
LAST_ANSWERS_S = 5.0
"""Timeout of answers during shutdown: supervisors kill a process after 10 to 30 s."""


OnCommitted: TypeAlias = Callable[[ClosedSegment, EncodedDraft, Sequence[Outcome]], None]


class Writer:
    """The writer of one broker, from `start` to `close`. Owned by one event loop."""

    def __init__(
        self,
        wal: WalView,
        settings: WriterSettings,
        on_committed: OnCommitted,
        *,
        committer: Committer | None = None,
        pace: CommitPace | None = None,
        uploads: ChunkUploads | None = None,
        hot_dir: Path | None = None,
        observer: Observer = NO_OBSERVER,
    ) -> None:
        """`committer` is the WAL view unless it is given. Without `hot_dir`, acks=1 is acks=all.

        Without `uploads`, all records of a flush go to the committer.
        """
        self.wal = wal
        self.clock = wal.clock
        self.settings = settings
        self.counters = WriterCounters()
        self.hot_log: HotLog | None = None
        if hot_dir is not None:
            cluster_id, log_id = wal.cluster.cluster_id, wal.clock.new_id().hex()
            self.hot_log = HotLog(
                hot_dir,
                cluster_id,
                log_id,
                on_durable=self._enqueue,  # committed even if its caller goes away
                on_failed=lambda request, error: self.answer(request, [], error),
                level=lambda: wal.state.level,
            )
        self.buffered_bytes = 0
        self._committer = committer or wal
        self._observer = observer
        self._on_committed = on_committed
        self._open: list[AppendRequest] = []
        self._open_bytes = 0
        self._classes = OpenClasses()
        self._pace = pace or CommitPace(wal.clock, PaceSettings())
        self._parts = SegmentParts(wal.clock.new_id, settings.codec, uploads)
        self._expected = 0  # waiting requests, once the clients of the last flush send the next
        self._opened_s = 0.0
        self._waiters = Waiters(settings.answer_timeout_s, lambda: wal.state)
        self._wake = asyncio.Event()
        self._is_due_earlier = asyncio.Event()
        self._is_hurried = False
        self._closing = False
        self._flushing_s: float | None = None  # boot time at which the flush under way began
        self._failures: list[LogError] = []  # of the last flushes; none after a success
        self._recovering: set[bytes] = set()
        """Commit ids of requests that a recovery enqueued."""
        self.refused = SetAsideRequests(self, wal, self._committer, self.hot_log)
        self.on_enqueued: Callable[[], None] | None = None
        """Called when a request waits for the next flush: what it submits goes into this flush."""
        self.task: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = begin_duty("commit", self._run())
        self._watch = asyncio.create_task(self._watch_deadlines(), name="tidelog-deadlines")

    def flush_without_delay(self) -> None:
        """Prepare shutdown: flush without an interval, and answer all callers within seconds."""
        self._is_hurried = True
        self._is_due_earlier.set()
        self._pace.hurry(-math.inf)
        self._waiters.limit_all(self.clock.boot_s() + LAST_ANSWERS_S)

    async def close(self) -> None:
        """Flush the open segment, then stop. New requests are refused from now on."""
        self._closing = True
        self.flush_without_delay()
        if self.hot_log is not None:
            await self.hot_log.drain()  # its last requests are flushed below
        self._wake.set()
        if self.task is not None:
            await self.task
        if self._watch is not None:
            self._watch.cancel()
        self._parts.drop()
        if self.hot_log is not None:
            await self.hot_log.close(is_drained=not self._open and not self.refused)

    async def release_files(self) -> None:
        """Stop without a flush; free the hot log's files and their locks."""
        tasks = [task for task in (self.task, self._watch) if task is not None]
        for task in tasks:
            task.cancel()
        self._parts.drop()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.hot_log is not None:
            await self.hot_log.close(is_drained=False)

    def why_failing(self) -> str:
        """Return why this broker cannot write; empty if it can.

        It cannot write after FAILED_FLUSHES_MAX failed flushes in a row, or in a flush longer than
        `answer_timeout_s`, until a flush succeeds. If clients send no request, the writer flushes
        without records.
        """
        if len(self._failures) == FAILED_FLUSHES_MAX:
            return str(self._failures[-1])
        if self._flushing_s is not None:
            flushing_s = self.clock.boot_s() - self._flushing_s
            if flushing_s > self.settings.answer_timeout_s:
                return f"a flush has had no outcome for {flushing_s:.0f} s"
        return ""

    # -- taking requests

    async def append(self, request: AppendRequest, acks: Acks) -> list[AppendedRange] | None:
        """Commit the request; return its appended ranges, or None if they are not known yet.

        Raises InvalidTimestamp, IdempotencyMismatch, Throttled and RecordTooLarge (nothing done),
        Unavailable (definitely not done), CommitUnknown, or the refusal that `apply` recorded.
        Cancelling the caller does not cancel the commit.
        """
        if request.key is not None:
            state, principal = self.wal.state, request.principal
            if (key_record := state.idempotency_record(request.key.key, principal)) is not None:
                outcome = recall(key_record, request.key.fingerprint)
                if outcome.refusal is not None:
                    raise outcome.refusal
                return outcome.placements
            under_way = self._waiters.first_with(request.key.key, principal)
            if under_way is not None:
                if under_way.fingerprint != request.key.fingerprint:
                    raise another_request(request.key.key)
                if acks is Acks.LOCAL and under_way.request.hot is not None:
                    return None  # the first request is durable, so this one is too
                return await self._waiters.outcome_of(under_way)
            # Checked here: `apply` does not check the share of a hot log's commit, nor placements.
            if (refusal := state.check_new_key(principal, len(request.parts))) is not None:
                raise refusal
        if request.has_timestamps:  # a retry is not checked: it gets the first request's answer
            self._check_timestamps(request)
        self._admit(request)
        # At the bound of requests that are set aside (I10), acks=1 waits for the commit.
        if acks is Acks.LOCAL and self.hot_log is not None and len(self.hot_log.kept) < KEPT_MAX:
            # Registered under its key from now on: a retry must get this request's outcome.
            self._waiters.expect(request).add_done_callback(log_refusal)
            request.commit_id = self.clock.new_id()
            await self.hot_log.append(request)
            return None
        waiter = self._enqueue(request)
        if acks is Acks.NONE:
            waiter.add_done_callback(log_refusal)
            return None
        # Shielded: the waiter may be shared by a retry with the same key.
        return await asyncio.shield(waiter) if request.key is not None else await waiter

    def submit(self, request: AppendRequest) -> Waiter:
        """Begin to commit a request without an idempotency key, for acks=all.

        Raises the errors of `append` before the commit; the future has its result. To cancel the
        future does not cancel the commit.
        """
        self._check_timestamps(request)
        self._admit(request)
        return self._enqueue(request)

    async def retire(self, log_ids: Iterable[str]) -> None:
        """Retire the marks of hot logs that have no files.

        Does not wait for the commit, because it only frees memory, and a flush may take a minute.
        """
        actions = [RetireHotLog(log_id) for log_id in sorted(log_ids)]
        if actions and not self._closing:
            await self.append(AppendRequest((), 0, actions=actions), Acks.NONE)

    def check_marks(self, marks: Mapping[str, int], seq: int, *, is_reset: bool) -> None:
        """Fence this process if a copy of it used its hot log, as `marks` show.

        They are those of entry `seq`, or if `is_reset`, of the state after this entry (see
        `HotLog.has_copy`).
        """
        if self.hot_log is not None and self.hot_log.has_copy(marks, is_reset=is_reset):
            self.wal.clone_fence.fence(seq)
        if is_reset and self._recovering:
            why = "the view of the WAL expired while a hot log was recovered"
            self.wal.clone_fence.stop(Unavailable(f"{why}: start this broker again"))

    def recover(self, requests: Sequence[AppendRequest]) -> list[Waiter]:
        """Enqueue requests that no client of this process sent, also above the buffer's bound.

        They do not wait for their turn: another process may have a copy of them, and the longer
        they wait, the more likely it commits them, too.
        """
        for request in requests:
            request.linger_s = 0.0
        self.buffered_bytes += sum(request.cost for request in requests)
        return [self._enqueue(request) for request in requests]

    def begin_recovery(self, requests: Sequence[AppendRequest]) -> None:
        """Note that other processes may commit these requests, until `end_recovery`."""
        self._recovering |= {request.commit_id for request in requests}

    def end_recovery(self) -> None:
        """Note that all recovered requests have an outcome."""
        self._recovering.clear()

    def check_recovered(self, commit_id: bytes, seq: int) -> None:
        """Stop this process if entry `seq` of another process committed a recovered request.

        Both processes have a copy of the file, and searched the WAL before either of them
        committed. The next start of this process finds the commit.
        """
        if commit_id in self._recovering:
            why = f"entry {seq} has requests of a hot log that this process is recovering"
            self.wal.clone_fence.stop(Unavailable(f"{why}, too: start this broker again"))

    def adopt(self, files: Sequence[Recovered]) -> None:
        """Take over requests that a crashed process had set aside; try them every minute."""
        assert self.hot_log is not None, "the files are in its directory"
        for file in files:
            self.hot_log.set_aside(file)
        self._wake.set()

    def _check_timestamps(self, request: AppendRequest) -> None:
        """Raise InvalidTimestamp for the first record whose timestamp its topic does not accept."""
        state, now_ms = self.wal.state, self.wal.store_time.now_ms()
        for part in request.parts:
            topic = state.topic_of_id(part.topic_id)
            if topic is not None:  # else `apply` refuses the request
                check_timestamps(topic.name, part.rows, topic.config, now_ms)

    def _admit(self, request: AppendRequest) -> None:
        if self._closing:
            raise Unavailable("this broker is shutting down: retry at another broker")
        request.check_size()
        state = self.wal.state
        if not state.tail_chunks.has_room(request.pieces):
            refusal = state.tail_chunks.refusal(request.chunks(), state.access.quota)
            if refusal is not None:
                raise refusal
        is_over = self._left_bytes < request.cost
        if is_over and self.buffered_bytes:  # an empty buffer accepts any request
            self.counters.throttled += 1
            raise Throttled(
                f"the write buffer is full: {self.buffered_bytes} of "
                f"{self.settings.buffer_bytes_max} bytes wait for their commit: retry later",
                retry_after_ms=1000,
            )
        self.buffered_bytes += request.cost
        self.counters.requests += 1

    def _enqueue(self, request: AppendRequest) -> Waiter:
        waiter = self._waiters.expect(request)
        if not self._open:
            self._opened_s = self.clock.boot_s()
        self._open.append(request)
        self._open_bytes += request.size
        self._wake.set()
        if self._classify(request) or self._open_bytes >= self.settings.flush_bytes:
            self._is_due_earlier.set()
        is_behind = self._flushing_s is not None
        if self._parts.is_due(self._open_bytes, self._left_bytes, is_behind=is_behind):
            self._begin_part()
        if request.hot is None:  # requests of the hot log are committed without a time limit
            self._waiters.limit(waiter, self.clock.boot_s() + self.settings.answer_timeout_s)
        if self.on_enqueued is not None:
            self.on_enqueued()
        return waiter

    def _classify(self, request: AppendRequest) -> bool:
        """Note how long the request may wait; return whether that ends the wait for a flush."""
        now_s = self.clock.boot_s()
        is_earlier = self._classes.add(
            request, self.wal.state, now_s, self.settings.answer_timeout_s
        )
        if self._flushing_s is not None:
            # Its flush begins after this one, whose entry may still wait for its turn.
            self._pace.hurry(max(request.until_s, self._pace.floor_s))
        return is_earlier

    async def _watch_deadlines(self) -> None:
        # One check a second for all: a timer for each request would cost as much as its commit.
        while True:
            await asyncio.sleep(min(1.0, self.settings.answer_timeout_s / 4))
            with surviving(log, "the timeouts"):
                if late := self._waiters.pop_late(self.clock.boot_s()):
                    self._time_out(late)

    def _time_out(self, overdue: Mapping[AppendRequest, None]) -> None:
        """Answer callers after their timeout. Requests that no flush has taken are withdrawn."""
        delay = f"after {self.settings.answer_timeout_s:.0f} s"
        withdrawn = {request: None for request in self._open if request in overdue}
        self._open = [request for request in self._open if request not in overdue]
        self._open_bytes -= sum(request.size for request in withdrawn)
        if withdrawn:
            self._parts.drop()
        for request in withdrawn:
            why = f"request timed out {delay} in the write queue; nothing was written"
            self.answer(request, [], Unavailable(why))
        for request in overdue:
            if request not in withdrawn:
                why = f"commit outcome unknown {delay}: retry with the same Idempotency-Key"
                self._waiters.time_out(request, CommitUnknown(why))

    @property
    def _left_bytes(self) -> int:
        """Return the bytes of memory that the write buffer has left."""
        return self.settings.buffer_bytes_max - self.buffered_bytes - self._parts.bytes

    def _begin_part(self) -> None:
        """Begin to upload a part of the open segment (write.segment_parts)."""
        with surviving(log, "an upload ahead of its flush"):  # the caller's request is enqueued
            if self.refused or self.fitting(self._open) < len(self._open):
                self._parts.wait_for_flush()
            else:
                self._parts.begin(self._open)

    # -- flushing

    async def _run(self) -> None:
        while not self._closing or self._open or self.refused:
            try:
                if not await self._turn():
                    return
            except TASK_ENDS:
                raise
            except BaseException as error:  # no caller handles it
                log.critical("bug in the writer", exc_info=error)
                await asyncio.sleep(FAILED_PAUSE_S)

    async def _turn(self) -> bool:
        """Flush the waiting requests. Return False to stop: the rest stays in the hot log."""
        wait_s = self.refused.due_s - self.clock.boot_s()
        if not self._open and wait_s > 0 and not self._closing:
            await self._wait_for_requests(wait_s)
            return True
        if wait_s <= 0 or not self._open:
            is_done = await self.refused.retry()
            if not is_done:
                self._refuse_held()
            if not self._open:
                return is_done or not self._closing
        await self._wait_until_due()
        await self._gather()
        started_s = self.clock.boot_s()
        self.counters.queue_wait.add(started_s - self._opened_s)
        until_s = -math.inf if self._is_urgent else self._classes.until_s
        if not (requests := self._take()):
            await self._wait_for_requests(max(self.refused.due_s - self.clock.boot_s(), 0.0))
            return True
        self._classes.restart(self._open, started_s)
        self._pace.begin_flush(until_s)
        self._flushing_s = started_s
        is_done = await self.flush(requests)
        self._flushing_s = None
        self._classes.end_flush(self.clock.boot_s())
        if not is_done and self._closing:
            # The requests of the hot log stay in it for the next start.
            error = Unavailable("this broker is shutting down")
            self._failed(self._take_first(len(self._open)), error)
        return is_done or not self._closing

    @property
    def _is_urgent(self) -> bool:
        """Whether the open segment waits for nothing: it is full, or the broker stops."""
        return self._is_hurried or self._open_bytes >= self.settings.flush_bytes

    async def _wait_until_due(self) -> None:
        """Wait until the pace, or the class of a request, closes the open segment."""
        while self._open and not self._is_urgent:
            pause_s = self._classes.due_s(self._pace) - self.clock.boot_s()
            if pause_s <= NEAR_S:
                return
            self._is_due_earlier.clear()
            await wait_for(self._is_due_earlier, pause_s)

    def _refuse_held(self) -> None:
        """Refuse requests that must wait for requests of the hot log, which the store refuses."""
        self._parts.drop()
        self._open, held_requests = self.refused.split(self._open)
        self._open_bytes = sum(request.size for request in self._open)
        cause = f": {self._failures[-1]}" if self._failures else ""
        why = "not written: acknowledged requests to the same partition wait for their commit"
        error = Unavailable(f"{why}{cause}")
        for request in held_requests:
            self.answer(request, [], error)

    async def _wait_for_requests(self, wait_s: float) -> None:
        """Wait for a request, at most `wait_s`.

        A writer that fails enqueues an empty request after TRIAL_S. Otherwise a broker that is not
        ready, and so gets no requests, would not find that writes succeed again.
        """
        self._wake.clear()
        is_failing = len(self._failures) >= FAILED_FLUSHES_MAX
        await wait_for(self._wake, min(wait_s, TRIAL_S) if is_failing else wait_s)
        if is_failing and not self._wake.is_set() and wait_s >= TRIAL_S:
            (trial,) = self.recover([AppendRequest((), 0)])
            trial.add_done_callback(retrieve_exception)

    async def _gather(self) -> None:
        """Wait for requests that have arrived but are not parsed yet.

        Clients send the next requests after an answer, and a flush of one request costs as much as
        a flush of many.
        """
        for turn in range(GATHER_TURNS_MAX):
            is_full = self._open_bytes >= self.settings.flush_bytes
            if turn >= GATHER_TURNS and (is_full or len(self._open) >= self._expected):
                return
            await asyncio.sleep(0)

    def _take(self) -> list[AppendRequest]:
        """Take the requests that can be flushed now (`refused.split`) and fit into one entry."""
        if not self.refused:
            return self._take_first(self.fitting(self._open))
        self._parts.drop()
        passing, held_requests = self.refused.split(self._open)
        count = self.fitting(passing)
        self._open = [*passing[count:], *held_requests]
        self._open_bytes = sum(request.size for request in self._open)
        return passing[:count]

    def fitting(self, requests: Sequence[AppendRequest]) -> int:
        """Return how many of the requests fit into one entry, at least one."""
        # One chunk may have all their records, and a reader must be able to unpack it.
        left_bytes = min(self.settings.flush_bytes_max, chunks.RAW_SIZE_MAX)
        left_parts, left_header = FLUSH_PARTS_MAX, draft_header_bytes_max()
        for count, request in enumerate(requests):
            left_bytes -= request.size
            left_parts -= request.pieces
            left_header -= request.header_bytes
            if count and (left_bytes < 0 or left_parts < 0 or left_header < 0):
                return count
        return len(requests)

    def _take_first(self, count: int) -> list[AppendRequest]:
        requests, self._open = self._open[:count], self._open[count:]
        self._open_bytes -= sum(request.size for request in requests)
        return requests

    async def flush(self, requests: list[AppendRequest]) -> bool:
        """Commit the requests and answer each, even after an error; return whether it succeeded."""
        try:
            with self._observer.flush(requests):
                committed_parts = await self.commit(requests)
            for part, outcomes in committed_parts:
                for answer in part.segment.answers(outcomes):
                    self.answer(answer.request, answer.placements, answer.error)
            self._expected = len(self._open) + len(requests)
            if self.hot_log is not None:
                marks = [request.hot for request in requests if request.hot is not None]
                self.hot_log.committed(marks)
        except TASK_ENDS:
            raise
        except (Unavailable, CommitUnknown) as error:
            self._failed(requests, error)
            await asyncio.sleep(FAILED_PAUSE_S)  # the cause, like a full disk, lasts for a while
            return False
        except BaseException as error:
            log.critical("bug in a flush", exc_info=error)
            self._failed(requests, CommitUnknown(f"the outcome is unknown: {error!r}"))
            return False
        self._failures.clear()
        return True

    async def commit(
        self, requests: list[AppendRequest]
    ) -> list[tuple[EncodedPart, Sequence[Outcome]]]:
        """Commit the requests as one draft; return its parts and their outcomes.

        Raises Unavailable if they are definitely not in the WAL, and CommitUnknown after any other
        failure.
        """
        with self._parts.taken(requests) as begun:
            return await self._commit_parts(requests, begun)

    async def _commit_parts(
        self, requests: list[AppendRequest], begun: list[BegunPart]
    ) -> list[tuple[EncodedPart, Sequence[Outcome]]]:
        started_s = self.clock.boot_s()
        try:
            parts = await self._parts.encode(requests, begun)
            draft = merge([part.draft for part in parts])
        except TASK_ENDS:
            raise
        except BaseException as error:  # before the PUT
            log.critical("a flush cannot be encoded", exc_info=error)
            raise Unavailable(f"not written, the flush cannot be encoded: {error!r}") from error
        try:
            with self._observer.commit(draft):
                outcomes = await self._committer.commit(draft)
            if any(request.hot is not None for request in requests):
                # If it raises, the requests stay in the file: a copy may have used their marks.
                self.wal.clone_fence.check_fence()
        except (Unavailable, CommitUnknown, *TASK_ENDS):
            raise
        except (Corrupt, StoreUnfit) as error:
            # The chain cannot be read further, so it is unknown whether the entry is in it.
            raise CommitUnknown(f"the WAL cannot be continued: {error}") from error
        except BaseException as error:
            log.critical("bug in a commit", exc_info=error)
            raise CommitUnknown(f"the commit failed, its outcome is unknown: {error!r}") from error
        self.counters.flushed(len(requests), draft, self.clock.boot_s() - started_s)
        first = 0
        committed_parts: list[tuple[EncodedPart, Sequence[Outcome]]] = []
        for part in parts:
            last = first + len(part.draft.commits)
            committed_parts.append((part, outcomes[first:last]))
            first = last
        try:
            for part, part_outcomes in committed_parts:
                self._on_committed(part.segment, part.encoded, part_outcomes)
        except TASK_ENDS:
            raise
        except BaseException as error:  # the tail cache lacks the records: reads use the store
            log.critical("bug after a commit", exc_info=error)
        return committed_parts

    def _failed(self, requests: Sequence[AppendRequest], error: LogError) -> None:
        """Answer callers that wait for the commit; keep acknowledged requests for further attempts.

        Requests that have an answer are not changed.
        """
        self.counters.flushes_failed += 1
        self._failures = [*self._failures, error][-FAILED_FLUSHES_MAX:]
        log.error("flush of %d requests failed: %s", len(requests), error)
        waiting = [request for request in requests if request in self._waiters]
        acked = [request for request in waiting if request.hot is not None]
        for request in waiting:
            if request.hot is None:
                self.answer(request, [], error)
        if acked:
            self.refused.failed(acked, is_alone=len(requests) == 1)

    def answer(
        self, request: AppendRequest, placements: list[AppendedRange], error: LogError | None
    ) -> None:
        self.buffered_bytes -= request.cost
        self._waiters.answer(request, placements, error)
