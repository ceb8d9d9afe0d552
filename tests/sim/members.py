"""Members of consumer groups in a simulated cluster, and clients that ask for committed offsets.

A member does what clients of consumer instances do: it joins, reads, commits, and joins
again after an unknown outcome.
"""

import contextlib
import hashlib
from collections.abc import Awaitable, Callable
from typing import NamedTuple, TypeVar

from tests.sim import history
from tests.sim.clients import TOPIC, Client, Load, places_of, reads_of, rows_of
from tests.sim.history import Place, Portion, Written
from tests.sim.network import Refusal, Silence
from tests.sim.world import Broker, World
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core.actions import CommitOffsets, GroupOffset, MemberConfig
from tidelog.storage.core.errors import CommitUnknown, LogError, StaleCommit, UnknownMember
from tidelog.storage.core.model import AppendedRange, ReadBounds, TopicPartition
from tidelog.storage.topics import ClusterTopics

T = TypeVar("T")

RESULTS = "results"
"""Where workers produce to."""


SEEKING = 0.05
"""How often who seeks does it after a read."""
POLL_BYTES = 1 << 20
FEW_BYTES = 2_000
"""The bytes that a member asks for after a poll without an answer; twice as many after each poll
with records. Without caches, an answer of hundreds of chunks takes longer than it waits."""
TOPICS_MAX = 3
PARTITIONS_MAX = 5


class Habits(NamedTuple):
    """Behaviour of the members of a group."""

    is_auto: bool = False
    """They commit by themselves."""
    is_static: bool = False
    """They come again in their own place."""
    is_seeking: bool = False
    """They read again what they have read, now and then."""
    pattern: str = ""
    """The pattern they subscribe to, instead of the common topic."""


PLAIN = Habits()


class Member(Client):
    """A consumer instance after the other, in one group: joins, reads, commits what it has."""

    def __init__(
        self, world: World, name: str, load: Load, group: str, habits: Habits = PLAIN
    ) -> None:
        super().__init__(world, name, load)
        self.group = group
        self.habits = habits
        self.reached: dict[tuple[str, int], int] = {}
        self._poll_bytes = POLL_BYTES

    async def run(self) -> None:
        life = 0
        while not self.is_over:
            await self.pause()
            life += 1
            with contextlib.suppress(LogError, Refusal, Silence):
                await self._live(f"{self.name}.{life}")

    def known_as(self, member: str) -> str:
        """Return the name in the history: a static member keeps its name when it joins again."""
        return self.name if self.habits.is_static else member

    async def _live(self, member: str) -> None:
        await self._join(member)
        draws = self.world.draws
        while not self.is_over:
            await self.pause()
            polled = await self._poll(member)
            # Records of a lost answer cannot be given to this member again: it leaves. It also
            # leaves after an unknown outcome of its work.
            if polled is None or not await self._work(member, *polled):
                return
            if self.habits.is_seeking and draws.random() < SEEKING:
                await self._seek_back(member)
            if draws.random() < 0.03:
                await self._call(lambda b: b.consumers.leave(self.group, member))
                return
            if draws.random() < 0.02:
                return  # silently

    async def _join(self, member: str) -> None:
        self.reached.clear()
        config = MemberConfig(
            auto_offset_reset="earliest",
            auto_commit=self.habits.is_auto,
            session_timeout_ms=3000,
            max_poll_interval_ms=6000,
        )
        instance = self.name if self.habits.is_static else ""
        pattern = self.habits.pattern
        topics = [] if pattern else [TOPIC]
        await self._call(
            lambda b: b.consumers.join(self.group, member, config, instance_id=instance)
        )
        await self._call(lambda b: b.consumers.subscribe(self.group, member, topics, pattern))

    async def _work(self, member: str, generation: int, portions: list[Portion]) -> bool:
        """Process records; return whether the outcome is known."""
        if not self.habits.is_auto:
            await self._commit(member, generation, portions)
        return True

    async def _seek_back(self, member: str) -> None:
        if self.reached:
            partition = self.world.draws.choice(list(self.reached))
            offset = self.world.draws.randrange(self.reached[partition] + 1)
            await self._seek(member, Place(*partition, offset))

    async def _seek(self, member: str, to: Place) -> None:
        op = self.begin(history.Seek, self.group, self.known_as(member), [to])
        offset_by_partition = {TopicPartition(to.topic, to.partition): to.offset}
        try:
            await self._call(lambda b: b.consumers.seek(self.group, member, offset_by_partition))
        except (CommitUnknown, Silence) as error:  # it may take effect later
            self.end(history.Unknown, op, repr(error))
        except (LogError, Refusal) as error:
            self.end(history.Refused, op, repr(error))
        else:
            self.end(history.Sought, op)

    async def _call(self, call: Callable[[Broker], Awaitable[T]]) -> T:
        """Call the group's coordinator through any broker. Raises LogError, Refusal, Silence."""
        broker = self.world.anyone()
        if broker is None:
            raise Refusal("no broker is up")
        return await self.world.ask(
            broker.address, lambda b: self._forward(b, call), timeout_s=self.load.patience_s
        )

    async def _forward(self, broker: Broker, call: Callable[[Broker], Awaitable[T]]) -> T:
        await broker.consumers.requests.until_decided()
        to = broker.consumers.coordinator.broker_of(self.group)
        for peer in broker.log._membership.others:
            if peer.id == to:
                with contextlib.suppress(Refusal):  # it has not got it: this broker takes over
                    return await self.world.ask(peer.address, lambda b: self._take(b, call))
        with broker.consumers.requests.serving():
            return await call(broker)

    async def _take(self, broker: Broker, call: Callable[[Broker], Awaitable[T]]) -> T:
        """Serve a forwarded request, as the listener for peers does."""
        requests = broker.consumers.requests
        await requests.until_decided()
        if requests.is_released:
            raise Refusal("the broker has given its groups to others")
        with requests.serving():
            return await call(broker)

    async def _poll(self, member: str) -> tuple[int, list[Portion]] | None:
        op = self.begin(history.Poll, self.group, self.known_as(member))
        bytes_max = self.world.draws.choice([60, self._poll_bytes])

        async def poll(broker: Broker) -> tuple[int, list[Portion]]:
            bounds = ReadBounds(bytes_max)
            reading = broker.consumers.reading(self.group, member, bounds=bounds, wait_s=1.0)
            async with reading as read:
                portions = [
                    Portion(
                        portion.topic,
                        portion.where.partition,
                        reads_of(portion.fetched),
                        portion.fetched.next_offset,
                    )
                    for portion in read.portions
                ]
                return read.generation, portions

        try:
            polled = await self._call(poll)
        except (LogError, Refusal) as error:
            self.end(history.Refused, op, repr(error))
            if isinstance(error, UnknownMember):
                return None
            return -1, []  # nothing was given
        except Silence as error:
            self.end(history.Unknown, op, repr(error))
            self._poll_bytes = FEW_BYTES
            return None
        self.end(history.Polled, op, *polled)
        if polled[1]:
            self._poll_bytes = min(2 * self._poll_bytes, POLL_BYTES)
        for portion in polled[1]:
            self.reached[portion.topic, portion.partition] = portion.next_offset
        return polled

    async def _commit(self, member: str, generation: int, portions: list[Portion]) -> None:
        places = ends_of(portions)
        broker = self.world.anyone()
        if not places or broker is None:
            return
        name = self.known_as(member)
        op = self.begin(history.Commit, self.group, name, generation, places, broker.name)

        async def commit(broker: Broker) -> bool:
            action = self._offsets(broker, member, generation, places)
            await broker.log.records.transact([], [action], size=1, is_json=False)
            return True

        with contextlib.suppress(StaleCommit):
            if await self.ask(op, broker, commit):
                self.end(history.Committed, op)

    def _offsets(
        self, broker: Broker, member: str, generation: int, places: list[Place]
    ) -> CommitOffsets:
        """As of what the broker knows of topics."""
        state = broker.log.state
        rows = [
            GroupOffset(state.topic(place.topic).topic_id, place.partition, place.offset)
            for place in places
        ]
        return CommitOffsets(self.group, generation, rows, member)


class Worker(Member):
    """Consumes, transforms and produces: results and offsets are one request.

    It retries the same request until the outcome is known. A worker that is refused leaves and
    joins again: it has read beyond the committed offset, and another member may own it.
    """

    def __init__(
        self, world: World, name: str, load: Load, group: str, habits: Habits = PLAIN
    ) -> None:
        super().__init__(world, name, load, group, habits)
        self._requests = 0

    async def _work(self, member: str, generation: int, portions: list[Portion]) -> bool:
        places = ends_of(portions)
        if not places:
            return True
        self._requests += 1
        key = f"{self.name}/{self._requests}"
        sources = [
            Place(portion.topic, portion.partition, read.offset)
            for portion in portions
            for read in portion.records
        ]
        records = [
            Written(RESULTS, f"{key}.{number}", 0, source=source)
            for number, source in enumerate(sources)
        ]
        offsets = history.Offsets(self.group, self.known_as(member), generation, places)

        async def transact(broker: Broker) -> list[AppendedRange]:
            log = broker.log
            digest = hashlib.blake2b(repr((records, offsets)).encode()).digest()[:16]
            return await log.records.transact(
                [(log.state.topic(RESULTS), 0, rows_of(records))],
                [self._offsets(broker, member, generation, places)],
                size=10 * len(records),
                is_json=False,
                key=IdempotencyKey(key, digest, [1]),
            )

        for _ in range(8):
            broker = self.world.anyone()
            if broker is not None:
                op = self.begin(
                    history.Append, self.name, records, key, broker.name, commit=offsets
                )
                try:
                    placed = await self.ask(op, broker, transact)
                except StaleCommit:
                    await self._call(lambda b: b.consumers.leave(self.group, member))
                    return False
                if placed is not None:
                    self.end(history.Acked, op, places_of(placed))
                    return True
            await self.pause()
        return False


def ends_of(portions: list[Portion]) -> list[Place]:
    return [Place(portion.topic, portion.partition, portion.next_offset) for portion in portions]


async def ask_for(client: Client, group: str, broker: Broker | None = None) -> list[Place] | None:
    """Return the group's committed offsets from any broker; None without an answer."""
    broker = broker or client.world.anyone()
    if broker is None:
        return None
    op = client.begin(history.Ask, group, broker.name)

    async def ask(broker: Broker) -> list[Place]:
        await broker.log._log.wal.refresh()
        committed_offsets = broker.log.groups.committed_offsets(group)
        return [
            Place(*partition, committed_offset.offset)
            for partition, committed_offset in committed_offsets.items()
        ]

    told = await client.ask(op, broker, ask)
    if told is not None:
        client.end(history.Told, op, told)
    return told


class Asker(Client):
    """Asks where a group is."""

    def __init__(self, world: World, name: str, load: Load, group: str) -> None:
        super().__init__(world, name, load)
        self.group = group

    async def run(self) -> None:
        while not self.is_over:
            await self.pause(1.0)
            _ = await ask_for(self, self.group)


class Gardener(Client):
    """Adds partitions, and makes and deletes topics: others than the first."""

    async def run(self) -> None:
        topic_count = 0
        while not self.is_over:
            await self.pause(2.5)
            draws, topics = self.world.draws, self.world.inputs()
            other_topics = [name for name in topics if name != TOPIC]
            match draws.choice(["make", "make", "grow", "delete"]):
                case "make" if len(other_topics) < TOPICS_MAX:
                    topic_count += 1
                    name, count = f"{TOPIC}{topic_count}", draws.choice([1, 2])
                    await self._tend(ClusterTopics.create, name, count, {})
                case "grow" if topics[name := draws.choice(list(topics))] < PARTITIONS_MAX:
                    partition_count = topics[name] + 1
                    await self._tend(ClusterTopics.add_partitions, name, partition_count)
                case "delete" if other_topics:
                    name = draws.choice(other_topics)
                    self.world.record(history.Deletion(self.world.now_s, name))
                    await self._tend(ClusterTopics.delete, name)
                case _:
                    pass

    async def _tend(self, call: Callable[..., Awaitable[object]], *arguments: object) -> None:
        """Call a method of one broker's `ClusterTopics`."""

        async def served(broker: Broker) -> object:
            return await call(broker.log.topics, *arguments)

        broker = self.world.anyone()
        if broker is not None:
            with contextlib.suppress(LogError, Refusal, Silence):
                await self.world.ask(broker.address, served, timeout_s=self.load.patience_s)
