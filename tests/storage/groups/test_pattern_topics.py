"""Subscriptions by pattern follow the topics, each member's by itself."""

import asyncio

import pytest

from tests.support import vloop
from tests.support.instances import RunningGroups, SingleBroker
from tests.support.logs import closing, opened
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.groups.coordinator import ADOPT_S
from tidelog.storage.state import group_members
from tidelog.storage.store.memory import MemoryStore


def test_a_pattern_with_too_many_partitions_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_members, "GROUP_PARTITIONS_MAX", 2)

    async def main() -> None:
        log = await opened(MemoryStore())
        async with closing(log):
            consumers = RunningGroups(log, SingleBroker("me"))
            for name, pattern in (("a", "big.*"), ("b", "new.*")):
                await consumers.join(name, name, MemberConfig())
                await consumers.subscribe(name, name, [], pattern)
            await log.topics.create("big", 3, {})
            await log.topics.create("new", 1, {})
            await asyncio.sleep(2 * ADOPT_S)
            topics_by_member = {
                name: member.topics
                for name in ("a", "b")
                if (member := log.state.members.member(name, name)) is not None
            }
            assert topics_by_member == {"a": [], "b": ["new"]}
            await consumers.close()

    vloop.run(main)
