"""Commits of offsets on their way to the log: those of many members as one commit there.

What comes in one turn of the loop goes together. While very many members commit, what comes within
`PAUSE_S` does: a flush costs a broker as much CPU as ten offsets, and a PUT is somebody's money. A
commit of the log is whole or refused, so where one of several members is refused each goes again,
alone: nobody is kept from committing by another one's mistake.

And if we die here? Who has no answer commits again; offsets are not counted, only set.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from storage.assignors import Owned
from storage.coordinator import Coordinator, Heard, Led, all_of
from storage.entry import CommitOffsets, GroupOffset
from storage.errors import CommitUnknown, LogError, Throttled, Unavailable
from storage.group import Group
from storage.group_members import NO_GENERATION
from storage.hot import Request
from storage.log import Log
from storage.writer import Acks

PAUSE_S = 0.02
"""A bound of 50 flushes a second for commits alone; produces flush as they need, and take along
what waits there."""
BUSY_MEMBERS = 50
WINDOW_S = 0.1
"""So many different members in such a window: only then a commit waits. A few that commit after
each record are as fast as the store."""
TOGETHER_MAX = 5_000
"""Offsets in one commit of the log: about 0.5 MiB of an entry's header (I10)."""


AT_ONCE = 100
"""Commits made between two looks at what else the loop has to do."""


class _Waiting(NamedTuple):
    action: CommitOffsets
    done: "asyncio.Future[None]"


class OffsetCommits:
    """Of the groups that this broker coordinates. Owned by the log's event loop; needs no start."""

    def __init__(self, broker: Log, coordinator: Coordinator) -> None:
        self._log = broker
        self._coordinator = coordinator
        self._turn = 0
        self._open: list[_Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._members: set[tuple[str, str]] = set()
        self._is_busy = False
        self._window_ends_s = 0.0
        self._sent_s = 0.0

    def commit(self, heard: Heard, offsets: list[GroupOffset]) -> "asyncio.Future[None]":
        """The member says that it has come so far. Done when that is in the log, or refused; who no
        longer waits does not stop it."""
        group, member, instance, _ = heard
        generation = group.generation if member.is_subscribed else NO_GENERATION
        action = CommitOffsets(group.group_id, generation, offsets, member.member_id)
        before = instance.positions.commit(
            [Owned(each.topic_id, each.partition) for each in offsets]
        )
        if self._log.state.groups.check(action) is None:
            done = self._add(action)
        else:  # alone: it would keep others waiting
            done = asyncio.ensure_future(self._coordinator.submit(action))

        def look(done: "asyncio.Future[None]") -> None:
            if done.cancelled() or done.exception() is not None:
                instance.positions.uncommit(before)

        done.add_done_callback(look)
        return done

    async def commit_due(self, heard: Heard) -> None:
        """What the member has got."""
        due = heard.instance.positions.due()
        if due:
            await self.commit(heard, _rows(due))

    async def commit_delivered(
        self, groups: Sequence[tuple[Group, Led]], most: int | None = None
    ) -> None:
        """What members of these that commit by themselves have got: `most` of them, in turn."""
        due = [
            Heard(group, member, instance, led.term)
            for group, led in groups
            for member_id, instance in led.instances.items()
            if (member := group.members.get(member_id)) is not None
            and member.config.auto_commit
            and instance.positions.is_due
        ]
        if most is not None and len(due) > most:
            first = self._turn % len(due)
            due = (due[first:] + due[:first])[:most]
            self._turn = first + most
        commits = []
        for number, heard in enumerate(due, start=1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
            offsets = heard.instance.positions.due()  # as of now
            if offsets:
                commits.append(self.commit(heard, _rows(offsets)))
        await all_of(commits)

    def _add(self, action: CommitOffsets) -> "asyncio.Future[None]":
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        if not self._open:
            self._plan(loop)
        self._open.append(_Waiting(action, done))
        self._members.add((action.group_id, action.member_id))
        return done

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
            task = asyncio.create_task(self._commit(together))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _commit(self, together: Sequence[_Waiting]) -> None:
        actions = [waiting.action for waiting in together]
        request = Request(self._log.clock.new_id(), (), 0, actions=actions)
        try:
            await self._log.writer.append(request, Acks.ALL)
        except (Unavailable, CommitUnknown, Throttled) as error:
            _fail(together, error)
        except LogError as error:
            if len(together) == 1:
                _fail(together, error)
            else:
                await asyncio.gather(*(self._commit([waiting]) for waiting in together))
        else:
            for waiting in together:
                if not waiting.done.done():
                    waiting.done.set_result(None)


def _rows(offsets: Mapping[Owned, int]) -> list[GroupOffset]:
    return [GroupOffset(at.topic, at.partition, offset) for at, offset in offsets.items()]


def _portions(waiting: Sequence[_Waiting]) -> list[list[_Waiting]]:
    portions: list[list[_Waiting]] = [[]]
    size = 0
    for one in waiting:
        size += len(one.action.offsets)
        if size > TOGETHER_MAX and portions[-1]:
            portions.append([])
            size = len(one.action.offsets)
        portions[-1].append(one)
    return portions


def _fail(together: Sequence[_Waiting], error: LogError) -> None:
    for waiting in together:
        if not waiting.done.done():
            waiting.done.set_exception(error)
