"""Group commit of offsets: the offset commits of many members become one commit of the log.

Commits that arrive in one turn of the event loop go together. If many members commit, all commits
within `PAUSE_S` go together, because a flush costs a broker as much CPU as ten offsets, and each
PUT costs money. `apply` applies a commit of the log whole or refuses it. After a refusal, this
module sends each member's commit again alone, so that a member's mistake does not stop the commits
of other members.

A rebalance may overtake a commit: the commit names the generation before it, and is refused. A
client of the REST dialects names no generation, so it cannot know. If the member still owns all
partitions of the commit in the very next generation, this module sends the commit again with that
generation: no other member owned these partitions in between.

**On a crash**: a client without an answer commits again, which sets the same offsets.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextvars import Context, copy_context
from typing import NamedTuple

from msgspec import structs

from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import CommitUnknown, IllegalGeneration, LogError
from tidelog.storage.core.model import TopicIdPartition
from tidelog.storage.groups.coordinator import all_of, is_of_all
from tidelog.storage.groups.rest_members import MemberSession, RestGroup
from tidelog.storage.log_engine import Log
from tidelog.storage.runtime.request_context import PRINCIPAL
from tidelog.storage.runtime.tasks import TASK_ENDS
from tidelog.storage.state.group_state import NO_GENERATION, ConsumerGroup

log = logging.getLogger("tidelog.groups")

PAUSE_S = 0.02
"""While commits wait for this pause, they cause at most about 50 flushes a second. If records wait
for a flush too, one flush commits records and offsets."""
BUSY_MEMBERS = 50
WINDOW_S = 0.1
"""Commits wait for PAUSE_S only if BUSY_MEMBERS different members committed in the previous window.
After fewer members, a commit does not wait for other commits."""
TOGETHER_MAX = 5_000
"""Offsets in one commit of the log: about 0.5 MiB of an entry's header (I10)."""
AT_ONCE = 100
"""After this many commits, the event loop may run other tasks."""


class _WaitingCommit(NamedTuple):
    action: CommitOffsets
    principal: str
    done: "asyncio.Future[None]"


class OffsetCommits:
    """Offset commits of this broker's groups. Owned by the log's event loop; needs no start."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._turn = 0
        self._open: list[_WaitingCommit] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._members: set[tuple[str, str]] = set()
        self._is_busy = False
        self._window_ends_s = 0.0
        self._sent_s = 0.0

    def commit(
        self, session: MemberSession, offsets: list[GroupOffset], principal: str | None = None
    ) -> "asyncio.Future[None]":
        """Commit offsets of the member in the name of `principal`.

        If `principal` is None, commit in the name of the request's client. The future is done when
        the log has committed or refused the offsets; cancelling it does not stop the commit.
        """
        group, member, instance, _ = session
        generation = group.generation if member.is_subscribed else NO_GENERATION
        action = CommitOffsets(group.group_id, generation, offsets, member.member_id)
        old_positions = instance.positions.commit(
            [TopicIdPartition(offset.topic_id, offset.partition) for offset in offsets]
        )
        future = self.add(action, principal)

        def look(future: "asyncio.Future[None]") -> None:
            if future.cancelled() or future.exception() is not None:
                instance.positions.uncommit(old_positions)

        future.add_done_callback(look)
        return future

    def add(self, action: CommitOffsets, principal: str | None = None) -> "asyncio.Future[None]":
        """Commit offsets in the name of `principal`, or of the request's client if it is None."""
        principal = PRINCIPAL.get() if principal is None else principal
        if self._log.state.committed_offsets.check(action) is None:
            return self._add(action, principal)
        # The log would refuse it: send it alone, to delay no other member.
        return asyncio.create_task(self._submit(action), context=_context(principal))

    async def commit_due(self, session: MemberSession) -> None:
        """Commit the member's delivered offsets."""
        if due := self._due(session):
            await self.commit(session, _rows(due))

    async def commit_delivered(
        self, groups: Sequence[tuple[ConsumerGroup, RestGroup]], most: int | None = None
    ) -> None:
        """Auto-commit delivered offsets of members of these groups.

        Each commit is in the name of the client that created the member, because the first commit
        of a group decides for whose share the group's offsets count. At most `most` members commit;
        the next call begins with the member after them.
        """
        due = [
            MemberSession(group, member, instance, rest_group.term)
            for group, rest_group in groups
            for member_id, instance in rest_group.instances.items()
            if (member := group.members.get(member_id)) is not None
            and member.config.auto_commit
            and instance.positions.is_due
        ]
        if most is not None and len(due) > most:
            first = self._turn % len(due)
            due = (due[first:] + due[:first])[:most]
            self._turn = first + most
        commits = []
        for number, session in enumerate(due, start=1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            if offsets := self._due(session):  # current values
                principal = session.member.config.principal
                commits.append(self.commit(session, _rows(offsets), principal))
        await all_of(commits)

    async def _submit(self, *actions: CommitOffsets) -> None:
        """Submit the commits. A single one is sent again if a rebalance has overtaken it."""
        try:
            await self._log.submit(*actions)
        except IllegalGeneration:
            if len(actions) > 1 or (again := self._in_next_generation(actions[0])) is None:
                raise
            await self._log.submit(again)

    def _in_next_generation(self, action: CommitOffsets) -> CommitOffsets | None:
        """Return the commit in the group's current generation, if that is the next one.

        Return None also if the member does not own all partitions of the commit.
        """
        group = self._log.state.members.get(action.group_id)
        member = None if group is None else group.members.get(action.member_id)
        if group is None or member is None or group.generation != action.generation + 1:
            return None
        if group.is_assigned_by_clients:  # Kafka's clients name their generation
            return None
        are_owned = (member.owns(offset.topic_id, offset.partition) for offset in action.offsets)
        return structs.replace(action, generation=group.generation) if all(are_owned) else None

    def _due(self, session: MemberSession) -> dict[TopicIdPartition, int]:
        """Return the member's delivered offsets that are not committed, without deleted topics."""
        due, topic_of_id = session.instance.positions.due(), self._log.state.topic_of_id
        return {
            partition: offset
            for partition, offset in due.items()
            if topic_of_id(partition.topic_id)
        }

    def _add(self, action: CommitOffsets, principal: str) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        if not self._open:
            self._plan(loop)
        self._open.append(_WaitingCommit(action, principal, future))
        self._members.add((action.group_id, action.member_id))
        return future

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        now_s = loop.time()
        if now_s >= self._window_ends_s:
            is_next = now_s < self._window_ends_s + WINDOW_S
            self._is_busy = is_next and len(self._members) >= BUSY_MEMBERS
            self._members.clear()
            self._window_ends_s = now_s + WINDOW_S
        if self._is_busy:
            loop.call_at(max(self._sent_s + PAUSE_S, now_s), self._send)
        else:
            loop.call_soon(self._send)

    def _send(self) -> None:
        waiting, self._open = self._open, []
        self._sent_s = asyncio.get_running_loop().time()
        for together in _portions(waiting):
            context = _context(together[0].principal)
            task = asyncio.create_task(self._commit(together), context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _commit(self, together: Sequence[_WaitingCommit]) -> None:
        actions = [waiting.action for waiting in together]
        try:
            await self._submit(*actions)
        except LogError as error:
            if len(together) == 1 or is_of_all(error):
                _fail(together, error)
            else:
                await asyncio.gather(*(self._commit([waiting]) for waiting in together))
        except TASK_ENDS:
            raise
        except BaseException as error:  # if the task gave no answer, callers would wait forever
            log.critical("bug in a commit of offsets", exc_info=error)
            _fail(together, CommitUnknown(f"the commit failed: {error!r}"))
        else:
            for waiting in together:
                if not waiting.done.done():
                    waiting.done.set_result(None)


def _context(principal: str) -> Context:
    """Return a copy of the current context in which `principal` is the client."""
    context = copy_context()
    context.run(PRINCIPAL.set, principal)
    return context


def _rows(offsets: Mapping[TopicIdPartition, int]) -> list[GroupOffset]:
    return [GroupOffset(*partition, offset) for partition, offset in offsets.items()]


def _portions(waiting: Sequence[_WaitingCommit]) -> list[list[_WaitingCommit]]:
    portions: list[list[_WaitingCommit]] = [[]]
    size = 0
    for commit in waiting:
        size += len(commit.action.offsets)
        is_same = not portions[-1] or portions[-1][-1].principal == commit.principal
        if portions[-1] and (size > TOGETHER_MAX or not is_same):
            portions.append([])
            size = len(commit.action.offsets)
        portions[-1].append(commit)
    return portions


def _fail(together: Sequence[_WaitingCommit], error: LogError) -> None:
    for waiting in together:
        if not waiting.done.done():
            waiting.done.set_exception(error)
