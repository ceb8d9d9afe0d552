"""The topics that each pattern finds.

`PatternTopics` keeps the names that match a pattern, so later it compares only new names with the
pattern. It compares NAMES_AT_ONCE names at a time; other callbacks of the event loop run in
between.
"""

import asyncio
import contextlib
import logging
from collections.abc import Iterable
from typing import NamedTuple

from tidelog.storage.core.actions import Subscribe
from tidelog.storage.core.errors import BoundReached, InvalidRequest, UnknownMember
from tidelog.storage.groups import patterns
from tidelog.storage.log_engine import Log
from tidelog.storage.state.access import Access, TopicFilter
from tidelog.storage.state.group_members import GROUP_TOPICS_MAX
from tidelog.storage.state.group_state import ConsumerGroup

log = logging.getLogger("tidelog.consumers")

NAMES_AT_ONCE = 500
"""With the slowest pattern that was measured, to compare this many names takes at most 7 ms."""
MEMBERS_AT_ONCE = 200
"""Members with a pattern that `update` looks at before other callbacks of the event loop run."""
DELETED_MAX = 1_000
"""`PatternTopics` drops all names when its names of deleted topics exceed the number of topics by
more than this."""


class _Matches:
    """The names that match one pattern, among the first `compared` names."""

    __slots__ = ("compared", "names")

    def __init__(self) -> None:
        self.compared = 0
        self.names: list[str] = []


class _Found(NamedTuple):
    """The topics of a pattern and a principal.

    They are those of the first `compared` names, with the ACLs of this `version` of `access`.
    """

    compared: int
    access: Access
    version: int
    topics: list[str]


class PatternTopics:
    """The topics of subscriptions by pattern. Owned by the log's event loop."""

    def __init__(self, log: Log, may_describe: TopicFilter) -> None:
        self._log = log
        self._may_describe = may_describe
        self._names: list[str] = []  # of all topics since the last drop, also of deleted ones
        self._known: set[str] = set()  # the same names
        self._matches: dict[str, _Matches] = {}
        self._found: dict[tuple[str, str], _Found] = {}

    def add_new_names(self) -> None:
        """Add the names of new topics. Takes ~20 ns for each topic of the cluster."""
        topics = self._log.state.topics
        if len(self._names) > 2 * len(topics) + DELETED_MAX:
            self._names, self._known, self._matches, self._found = [], set(), {}, {}
        if not self._known.issuperset(topics):
            new = [name for name in topics if name not in self._known]
            self._names += new
            self._known.update(new)

    async def find(self, pattern: str, principal: str) -> list[str]:
        """Return, sorted, the topics that match the pattern and that the principal may describe.

        Only names that `add_new_names` added are compared. Raises InvalidRequest if the pattern is
        not valid, or if it finds more than GROUP_TOPICS_MAX topics.
        """
        names = await self._matching(pattern)
        state, compared = self._log.state, self._matches[pattern].compared
        last = self._found.get((pattern, principal))
        if (
            last is not None
            and (last.compared, last.version) == (compared, state.access.version)
            and last.access is state.access
            and all(name in state.topics for name in last.topics)
        ):
            return last.topics
        access, version, topics = state.access, state.access.version, []
        for first in range(0, len(names), NAMES_AT_ONCE):
            if first:
                await asyncio.sleep(0)
            state = self._log.state
            topics += [
                name
                for name in names[first : first + NAMES_AT_ONCE]
                if name in state.topics and self._may_describe(state.access, principal, name)
            ]
        if len(topics) > GROUP_TOPICS_MAX:
            raise InvalidRequest(
                f"{len(topics)} topics match the pattern: {GROUP_TOPICS_MAX} at most"
            )
        topics.sort()
        self._found[pattern, principal] = _Found(compared, access, version, topics)
        return topics

    def keep(self, used: set[tuple[str, str]]) -> None:
        """Keep the names found for these pairs of pattern and principal; drop all others."""
        for subject in self._found.keys() - used:
            del self._found[subject]
        for pattern in self._matches.keys() - {pattern for pattern, _ in used}:
            del self._matches[pattern]

    async def update(self, groups: Iterable[ConsumerGroup]) -> None:
        """Find the topics of all subscriptions by pattern again.

        Topics or permissions may have changed. Commit the changed subscriptions.
        """
        members = [
            (group, member)
            for group in groups
            for member in group.members.values()
            if member.pattern
        ]
        self.add_new_names()
        self.keep({(member.pattern, member.config.principal) for _, member in members})
        for number, (group, member) in enumerate(members):
            if number % MEMBERS_AT_ONCE == MEMBERS_AT_ONCE - 1:
                await asyncio.sleep(0)
            pattern = member.pattern
            try:
                names = await self.find(pattern, member.config.principal)
                current_member = self._log.state.members.member(group.group_id, member.member_id)
                if (
                    current_member is member
                    and member.pattern == pattern
                    and member.topics != names
                ):
                    action = Subscribe(group.group_id, member.member_id, names, pattern)
                    with contextlib.suppress(UnknownMember):
                        await self._log.submit(action)
            except (InvalidRequest, BoundReached) as error:  # too many topics or partitions
                log.warning("topics of group %s unchanged: %s", group.group_id, error)

    async def _matching(self, pattern: str) -> list[str]:
        while True:
            matches = self._matches.get(pattern)  # another task may have dropped them
            if matches is None:
                patterns.check(pattern)
                matches = self._matches[pattern] = _Matches()
            names = self._names[matches.compared : matches.compared + NAMES_AT_ONCE]
            if not names:
                return matches.names
            matches.names += patterns.matching(pattern, names)
            matches.compared += len(names)
            await asyncio.sleep(0)
