"""The groups that this broker coordinates, of every kind.

Each group has one coordinator, a broker, which holds soft state: a `CoordinatedGroup`. The cluster
state names the coordinator and its term. Brokers may disagree on which brokers are live, but only
one can act as coordinator. The reason is that the actions of a coordinator carry the term, and that
a broker drops its soft state of an older term. Heartbeats never reach the WAL.

This module takes groups (`TakeGroup`), calls their timers, and drops them when another broker has
taken them. It does not know what a group does: each kind of groups is a `GroupKind`, in one module.

Session timeouts use the boot clock and pause while the process is suspended, so a resumed broker
does not expire members at once. **On a crash**: another broker takes the group on the next request,
or within ADOPT_S after it sees the coordinator gone. Session timers start again.
"""

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Protocol

from tidelog.storage.codec.entry import Entry
from tidelog.storage.core.actions import AnyAction, TakeGroup
from tidelog.storage.core.errors import (
    BoundReached,
    CommitUnknown,
    Corrupt,
    LogError,
    StoreUnfit,
    Throttled,
    Unavailable,
    UnknownMember,
)
from tidelog.storage.groups.coordinator_choice import Coordinators
from tidelog.storage.log_engine import Log
from tidelog.storage.runtime.tasks import retrieve_exception, surviving
from tidelog.storage.state.cluster_state import Applied
from tidelog.storage.state.group_state import ConsumerGroup

log = logging.getLogger("tidelog.groups")

TICK_S = 0.25
"""The shortest time until a group whose members have changed looks for sessions that have ended.
Also the period in which a suspension of the process is noticed."""
ADOPT_S = 1.0
"""Period in which the broker takes the groups whose coordinator is gone."""
ADOPTS_AT_ONCE = 1_000
"""Groups that the broker compares with its own in one step of the event loop."""
TICKS_AT_ONCE = 50
"""Groups that have their timers in one step of the event loop. Clients can let many end at one
time."""
AWAKE_S = 5.0
"""If two rounds of the background task are further apart, the process was suspended or blocked: all
sessions begin again."""
TIMER_S = 0.001
"""The shortest timer. Timers of 0 s would occupy the loop if its clock is ahead of `boot_s`."""
RETRY_S = 1.0
"""Time until a failed removal of members is committed again."""


class GroupKind(Protocol):
    """A kind of groups."""

    def serves(self, group: ConsumerGroup) -> bool:
        """Return whether the group, which has members, is of this kind."""

    def open(
        self, group_id: str, group: ConsumerGroup | None, *, is_alone: bool
    ) -> "CoordinatedGroup":
        """Return the soft state of a group at the beginning of this broker's term.

        `group` is None if the cluster state does not have the group yet. If `is_alone`, no other
        broker serves its members any more. Raises UnknownMember if a group of this kind cannot be
        new.
        """


class CoordinatedGroup(ABC):
    """A group that this broker coordinates, in one term: the soft state of its members."""

    def __init__(self, group_id: str, kind: GroupKind) -> None:
        self.group_id = group_id
        self.kind = kind
        self.timer: asyncio.TimerHandle | None = None
        self.timer_s = math.inf
        """The boot time at which `timer` ends."""

    @property
    @abstractmethod
    def term(self) -> int:
        """The term, or 0 until the cluster state has the group."""

    @property
    def wake_s(self) -> float:
        """The boot time at which `tick` must be called."""
        return math.inf

    @property
    @abstractmethod
    def look_s(self) -> float:
        """No session ends before this boot time.

        Requests may move the first end to a later time.
        """

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether the coordinator may drop this soft state."""

    @abstractmethod
    def tick(self, now_s: float) -> None:
        """End what ends at this boot time."""

    @abstractmethod
    def restart_sessions(self, began_s: float) -> None:
        """Let each session begin at `began_s`, unless its member sent a request later."""

    @abstractmethod
    def follow(self, group: ConsumerGroup | None, actions: Sequence[AnyAction]) -> None:
        """Follow the cluster state, in which the group has changed.

        `actions` are the actions on the group in the entry that changed it.
        """

    @abstractmethod
    def close(self) -> None:
        """End all waits, because this broker does not coordinate the group any more."""


class Coordinator:
    """The groups that this broker coordinates; owned by the log's event loop.

    `run` is its background task; requests also work without it.
    """

    def __init__(self, log: Log, coordinators: Coordinators) -> None:
        self.coordinators = coordinators
        self.groups: dict[str, CoordinatedGroup] = {}
        self._log = log
        self._kinds: list[GroupKind] = []
        self._released_kinds: list[GroupKind] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking: dict[str, asyncio.Task[None]] = {}
        # By group: the term in which no other broker serves members, if this broker begins it.
        self._handed_over: dict[str, int] = {}
        self._due: deque[CoordinatedGroup] = deque()
        self._context = copy_context()  # timers are in no client's name
        self._looked_s = math.inf
        """When `run` looked at the clock last."""
        self._awake_s = -math.inf
        """When the process was awake again after it was suspended."""

    def add_kind(self, kind: GroupKind) -> None:
        self._kinds.append(kind)

    # -- which broker

    def broker_of(self, group_id: str) -> str:
        """Return the broker that coordinates the group, or that would coordinate it."""
        group = self._log.state.members.get(group_id)
        return self.coordinators.of(group_id, "" if group is None else group.coordinator)

    def other_broker_of(self, group_id: str) -> str | None:
        """Return the broker that coordinates the group if it is not this one, else None."""
        broker = self.broker_of(group_id)
        return None if broker == self.coordinators.me else broker

    def is_released(self, kind: GroupKind) -> bool:
        return kind in self._released_kinds

    def check_serving(self, kind: GroupKind) -> None:
        """Raise Unavailable after `release`."""
        if self.is_released(kind):
            raise Unavailable("this broker is shutting down: retry at another broker")

    async def coordinate(self, group_id: str, kind: GroupKind) -> CoordinatedGroup:
        """Return the group, after this broker has become its coordinator.

        Callers ask `broker_of` first. Raises UnknownMember if the group has members of another
        kind, and Unavailable if another broker has the group now.
        """
        self.check_serving(kind)
        group = self._log.state.members.get(group_id)
        if group is not None and group.coordinator != self.coordinators.me:
            await self.take(group_id)
            self.check_serving(kind)
            group = self._log.state.members.get(group_id)
        if group is not None and group.coordinator != self.coordinators.me:
            raise moved(group_id)
        if group is not None and group.members and not kind.serves(group):
            raise UnknownMember(f"group {group_id!r} has members of another kind")
        coordinated_group = self.groups.get(group_id)
        if coordinated_group is not None and coordinated_group.kind is kind:
            return coordinated_group
        return self._open(group_id, group, kind)

    def _open(
        self, group_id: str, group: ConsumerGroup | None, kind: GroupKind
    ) -> CoordinatedGroup:
        term = 1 if group is None else group.term
        # In the first term, no other coordinator served the members before.
        is_alone = term in (1, self._handed_over.pop(group_id, 1))
        coordinated_group = kind.open(group_id, group, is_alone=is_alone)
        if (former_group := self.groups.get(group_id)) is not None:
            self.drop(former_group)
        self.groups[group_id] = coordinated_group
        self.set_timer(coordinated_group)
        return coordinated_group

    async def take(self, group_id: str) -> None:
        """Commit that this broker coordinates the group from now on."""
        taking = self._taking.get(group_id)
        if taking is None:
            old_group = self._log.state.members.get(group_id)
            if old_group is not None and self.coordinators.has_released(old_group.coordinator):
                # The former coordinator never takes a group again. If the next term is this
                # broker's, no other broker had a term between the two.
                self._handed_over[group_id] = old_group.term + 1
            take = TakeGroup(group_id, self.coordinators.me)
            taking = asyncio.create_task(self._log.submit(take))
            self._taking[group_id] = taking
            taking.add_done_callback(lambda _: self._taking.pop(group_id, None))
            taking.add_done_callback(retrieve_exception)
        await asyncio.shield(taking)

    def has(self, coordinated_group: CoordinatedGroup) -> bool:
        """Return whether the group is not dropped."""
        return self.groups.get(coordinated_group.group_id) is coordinated_group

    def drop(self, coordinated_group: CoordinatedGroup) -> None:
        """Forget the group."""
        if self.has(coordinated_group):
            del self.groups[coordinated_group.group_id]
        if coordinated_group.timer is not None:
            coordinated_group.timer.cancel()
        coordinated_group.close()

    def release(self, kind: GroupKind) -> None:
        """Drop all groups of a kind. From now on, this broker serves none of them."""
        if not self.is_released(kind):
            self._released_kinds.append(kind)
        for coordinated_group in list(self.groups.values()):
            if coordinated_group.kind is kind:
                self.drop(coordinated_group)

    def start(self, commits: Coroutine[None, None, None]) -> None:
        """Start the commits of a group in a task, which `stop` ends."""
        task = asyncio.create_task(commits, name="tidelog-group")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> list[asyncio.Task[None]]:
        """Release all groups. Cancel the commits under way, and return their tasks."""
        tasks = list(self._tasks)
        for kind in self._kinds:
            self.release(kind)
        for task in tasks:
            task.cancel()
        return tasks

    async def close(self) -> None:
        """Release all groups, and end the commits under way."""
        await asyncio.gather(*self.stop(), return_exceptions=True)

    # -- events of the log

    def on_applied(self, entry: Entry, applied: Applied) -> None:
        actions_by_group: dict[str, list[AnyAction]] = {
            group_id: [] for group_id in applied.groups if group_id in self.groups
        }
        if actions_by_group:
            for commit in entry.commits:
                for action in commit.actions:
                    actions = actions_by_group.get(getattr(action, "group_id", ""))
                    if actions is not None:
                        actions.append(action)
        for group_id, actions in actions_by_group.items():
            self._follow(self.groups[group_id], actions)

    def on_reset(self) -> None:
        for coordinated_group in list(self.groups.values()):
            self._follow(coordinated_group, [])

    def _follow(self, coordinated_group: CoordinatedGroup, actions: Sequence[AnyAction]) -> None:
        group = self._log.state.members.get(coordinated_group.group_id)
        if group is not None and (
            group.coordinator != self.coordinators.me
            or coordinated_group.term not in (0, group.term)
            or (group.members and not coordinated_group.kind.serves(group))
        ):
            self.drop(coordinated_group)
            return
        coordinated_group.follow(group, actions)
        self.go_on(coordinated_group)

    # -- timers

    def go_on(self, coordinated_group: CoordinatedGroup) -> None:
        """Drop the group if it is idle, or else set its timer."""
        if not self.has(coordinated_group):
            return
        if coordinated_group.is_idle:
            self.drop(coordinated_group)
        else:
            self.set_timer(coordinated_group)

    def set_timer(self, coordinated_group: CoordinatedGroup) -> None:
        """Let the group tick when it must, and when a session may end.

        If its timer ends before, it is set again then.
        """
        now_s = self._log.clock.boot_s()
        wake_s = min(coordinated_group.wake_s, max(coordinated_group.look_s, now_s + TICK_S))
        if wake_s >= coordinated_group.timer_s:
            return
        if coordinated_group.timer is not None:
            coordinated_group.timer.cancel()
        coordinated_group.timer_s = wake_s
        coordinated_group.timer = asyncio.get_running_loop().call_later(
            max(wake_s - now_s, TIMER_S), self._add_due, coordinated_group, context=self._context
        )

    def _add_due(self, coordinated_group: CoordinatedGroup) -> None:
        self._due.append(coordinated_group)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._tick_due)

    def _tick_due(self) -> None:
        self._look_at_clock()
        for _ in range(min(TICKS_AT_ONCE, len(self._due))):
            with surviving(log, "the timer of a group"):
                self._tick(self._due.popleft())
        if self._due:
            asyncio.get_running_loop().call_soon(self._tick_due)

    def _tick(self, coordinated_group: CoordinatedGroup) -> None:
        if not self.has(coordinated_group):
            return
        coordinated_group.timer_s = math.inf
        coordinated_group.restart_sessions(self._awake_s)
        coordinated_group.tick(self._log.clock.boot_s())
        self.go_on(coordinated_group)

    def _look_at_clock(self) -> None:
        now_s = self._log.clock.boot_s()
        if now_s - self._looked_s > AWAKE_S:
            self._awake_s = now_s

    # -- background work

    async def run(self, duties: Callable[[], Awaitable[None]]) -> None:
        """Each ADOPT_S, do the `duties` and take the groups whose coordinator is gone.

        Meanwhile, note whether the process was suspended.
        """
        await asyncio.gather(self._watch_clock(), self._work(duties))

    async def _watch_clock(self) -> None:
        while True:
            self._looked_s = self._log.clock.boot_s()
            await asyncio.sleep(TICK_S)
            self._look_at_clock()

    async def _work(self, duties: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(ADOPT_S)
            with surviving(log, "the duties of groups"):
                await duties()
            with surviving(log, "the takeover of groups"):
                await self.adopt()

    async def adopt(self) -> None:
        """Take groups whose coordinator is gone and that this broker should coordinate."""
        groups = list(self._log.state.members)
        for first in range(0, len(groups), ADOPTS_AT_ONCE):
            orphans = [
                self.coordinate(group.group_id, kind)
                for group in groups[first : first + ADOPTS_AT_ONCE]
                if group.members
                and group.group_id not in self.groups
                and self.other_broker_of(group.group_id) is None
                for kind in self._kinds
                if kind.serves(group) and not self.is_released(kind)
            ]
            with surviving(log, "the takeover of some groups"):
                await all_of(orphans)
            await asyncio.sleep(0)


def moved(group_id: str) -> Unavailable:
    """Return the error of a request for a group that another broker coordinates now."""
    return Unavailable(f"group {group_id!r} has moved to another coordinator: retry")


async def all_of(duties: Sequence[Awaitable[object]]) -> None:
    """Run all duties concurrently, so one flush serves all.

    If a duty is refused, the others continue.
    """
    for failed in await asyncio.gather(*duties, return_exceptions=True):
        if isinstance(failed, LogError) and not is_of_all(failed):
            log.info("a duty of a group is refused: %s", failed)  # normal: the state has changed
        elif isinstance(failed, BaseException):
            raise failed


def is_of_all(error: LogError) -> bool:
    """Return whether an error concerns all duties, and not only the one that raised it."""
    if isinstance(error, BoundReached):  # another commit may need no more of the bound
        return False
    return isinstance(error, (Unavailable, CommitUnknown, Throttled, Corrupt, StoreUnfit))
