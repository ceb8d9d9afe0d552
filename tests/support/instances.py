"""Consumer instances without HTTP, as tests use them; and who coordinates their groups."""

import asyncio
import contextlib
from typing import NamedTuple

from tests.support import vloop
from tests.support.logs import closing, opened
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import MemberConfig
from tidelog.storage.core.errors import LogError
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.groups.coordinator import Coordinator
from tidelog.storage.groups.coordinator_choice import Coordinators
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.state.access import TopicFilter, all_topics
from tidelog.storage.store.memory import MemoryStore

CONFIG = MemberConfig(
    auto_offset_reset="earliest", session_timeout_ms=10_000, max_poll_interval_ms=30_000
)
BY_HAND = MemberConfig(
    auto_offset_reset="earliest",
    auto_commit=False,
    session_timeout_ms=10_000,
    max_poll_interval_ms=30_000,
)


class SingleBroker(NamedTuple):
    """Coordinators of a cluster of one broker."""

    me: str

    def of(self, group_id: str, holder: str) -> str:
        return self.me

    def has_released(self, holder: str) -> bool:
        return False


class Chosen:
    """Coordinators as the test says: shared by all brokers, or by some."""

    def __init__(self, me: str, live: list[str]) -> None:
        self.me = me
        self.live = live

    def of(self, group_id: str, holder: str) -> str:
        return holder if holder in self.live else self.live[0]

    def has_released(self, holder: str) -> bool:
        return False


class RunningGroups(RestGroups):
    """REST groups alone, with the background task of their coordinator."""

    def __init__(
        self, log: Broker, coordinators: Coordinators, may_describe: TopicFilter = all_topics
    ) -> None:
        engine, coordinator = log._log, Coordinator(log._log, coordinators)
        engine.wal.subscribers.append(coordinator)
        self.commits = OffsetCommits(engine)
        super().__init__(engine, log.records, coordinator, self.commits, may_describe)
        self.task = asyncio.create_task(self.coordinator.run(self.do_duties))

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        with contextlib.suppress(LogError):
            await self.commit_delivered()
        await self.coordinator.close()


async def started(log: Broker, coordinators: Chosen | None = None) -> RunningGroups:
    return RunningGroups(log, coordinators or SingleBroker(log.clock.new_id().hex()))


async def joined(
    consumers: RestGroups, *members: str, topics: tuple[str, ...] = ("t",), config=CONFIG
) -> None:
    for member in members:
        await consumers.join("g", member, config)
        await consumers.subscribe("g", member, topics)


@contextlib.asynccontextmanager
async def group_of(partitions: int = 1, *members: str):
    """A log with the topic "t", and its consumers: the members share the topic in the group "g"."""
    log = await opened(MemoryStore())
    async with closing(log):
        await log.topics.create("t", partitions, {})
        consumers = await started(log)
        await joined(consumers, *members)
        yield log, consumers
        await consumers.close()


async def read(
    consumers: RestGroups, member: str, wait_s: float = 0.0, bytes_max: int = 1 << 20
) -> list[str]:
    async with consumers.reading(
        "g", member, bounds=ReadBounds(bytes_max), wait_s=wait_s
    ) as result:
        return [
            (value or b"").decode()
            for portion in result.portions
            for piece in portion.fetched.pieces
            for value in piece.batch.column("value").to_pylist()
        ]


def members_of(log: Broker) -> set[str]:
    group = log.state.members.get("g")
    return set() if group is None else set(group.members)


def virtual(test):
    """Run the coroutine in virtual time."""

    def run() -> None:
        vloop.run(test)

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run
