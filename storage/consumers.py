"""Consumer instances: what a group's coordinator does for them, on top of the log.

Members, generations and committed offsets are in the cluster state (storage.group_members,
storage.groups); any broker knows them. Where each instance stands is soft, and known to the group's
coordinator alone (storage.coordinator, storage.positions).

And if the coordinator dies? The next one reads on from where the instance said (`Seek`), else from
the committed offset, else as `auto.offset.reset` has it. What was returned after the last commit is
returned again; nothing is passed over. Commits by themselves are made every second, all instances'
in one flush; dying before that repeats a second of records.

I10: instances are bounded by the state's members, reads by their callers' budget.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from storage import patterns
from storage.assignors import Owned
from storage.chunk import sizes_before
from storage.coordinator import Coordinator, Coordinators, Heard, Instance
from storage.entry import (
    AssignByHand,
    GroupOffset,
    JoinGroup,
    LeaveGroup,
    MemberConfig,
    Seek,
    Sought,
    Subscribe,
)
from storage.errors import (
    InvalidRequest,
    LogError,
    NotAssigned,
    OffsetOutOfRange,
    UnknownMember,
    UnknownPartition,
    UnknownTopic,
)
from storage.group import GroupMember
from storage.group_members import TOPICS_MAX
from storage.log import Fetched, Log
from storage.model import TopicPartition
from storage.offset_commits import OffsetCommits

log = logging.getLogger("tidelog.consumers")

TICK_S = 1.0
"""How often delivered offsets are committed, orphans taken, patterns looked at."""
LOOKS = 4
"""In a tick, for members that are silent: their partitions wait for it."""
AWAKE_FACTOR = 5
"""Looks so many ticks apart were no silence of the members: this broker slept, or was stuck."""
AUTO_COMMITS_MAX = 2000
"""In one tick, ~25 us each: who is not among them is among the first of the next. 10,000 instances
that read all the time commit every five seconds, as Kafka's do by default."""

ARRIVAL_S = 10.0
"""So long a read waits to hear what became of the answer before it (I10): longer than brokers take
to tell each other (service.group_forwarding)."""


class Portion(NamedTuple):
    """Records of one partition."""

    where: Owned
    topic: str
    offset: int
    fetched: Fetched


class Read(NamedTuple):
    """What a read returns, of the partitions that the member has in this generation."""

    portions: list[Portion]
    generation: int


class Consumers:
    """Instances of the groups that this broker coordinates. Owned by the log's event loop, between
    `start` and `close`. Whoever calls for a group of another coordinator takes it over."""

    def __init__(self, broker: Log, coordinators: Coordinators) -> None:
        self.coordinators = coordinators
        self._log = broker
        self._coordinator = Coordinator(broker, coordinators)
        self._commits = OffsetCommits(broker, self._coordinator)
        self.task: asyncio.Task[None] | None = None
        self.may_see: Callable[[str, str], bool] = lambda principal, topic: True
        """Whether patterns of this principal's instances find this topic."""

    def start(self) -> None:
        self._log.listeners.append(self._coordinator.on_applied)
        self.task = asyncio.create_task(self._run(), name="tidelog-consumers")

    async def close(self) -> None:
        """Commit what is delivered, and let go."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self._log.listeners.remove(self._coordinator.on_applied)
        with contextlib.suppress(LogError):
            await self.commit_delivered()

    # -- membership

    async def join(
        self,
        group_id: str,
        member_id: str,
        config: MemberConfig,
        *,
        instance_id: str = "",
        assignor: str = "",
    ) -> None:
        """Create the instance. Raises MemberExists, InvalidRequest, Throttled."""
        me = self.coordinators.me
        await self._coordinator.submit(
            JoinGroup(group_id, member_id, me, config, instance_id, assignor)
        )
        led = await self._coordinator.lead(group_id)
        led.instances[member_id] = self._coordinator.new_instance()

    async def leave(self, group_id: str, member_id: str) -> None:
        """Commit what it read, if it wants that, and remove it. Raises UnknownMember."""
        heard = await self._coordinator.hear(group_id, member_id)
        if heard.member.config.auto_commit:
            await self._acknowledge(heard.instance)
            with contextlib.suppress(LogError):  # it lost them meanwhile: another reads them
                await self._commits.commit_due(heard)
        await self._coordinator.submit(LeaveGroup(group_id, member_id))
        self._coordinator.drop(group_id, member_id)

    async def subscribe(
        self, group_id: str, member_id: str, topics: Sequence[str], pattern: str = ""
    ) -> None:
        """Share these topics, or those that the pattern finds now and later; neither: read
        nothing. When it returns the member has its assignment, and starts where the log ends now
        if it starts at the end. Raises UnknownMember, AssignedOtherwise, InvalidRequest."""
        heard = await self._coordinator.hear(group_id, member_id)
        if pattern:
            await self._log.wal.refresh()
            topics = self._found(pattern, heard.member.config.principal)
        await self._hand_in(group_id)
        await self._coordinator.submit(Subscribe(group_id, member_id, list(topics), pattern))
        heard.instance.polled_s = self._log.clock.boot_s()
        await self._settle(heard)

    async def assign(
        self, group_id: str, member_id: str, partitions: Sequence[TopicPartition]
    ) -> None:
        """Read these, whoever else does. Raises UnknownTopic, UnknownPartition, AssignedOtherwise,
        UnknownMember."""
        heard = await self._coordinator.hear(group_id, member_id)
        owned = [await self._owned(where) for where in partitions]
        await self._coordinator.submit(AssignByHand(group_id, member_id, owned))
        await self._settle(heard)

    async def hear(self, group_id: str, member_id: str) -> Heard:
        """The member says something, and so lives. Raises UnknownMember."""
        return await self._coordinator.hear(group_id, member_id)

    # -- positions

    async def seek(
        self, group_id: str, member_id: str, positions: Mapping[TopicPartition, int]
    ) -> None:
        """Go on there, on any broker. Raises NotAssigned, UnknownMember."""
        heard = await self._coordinator.hear(group_id, member_id)
        await self._seek(heard, {await self._owned(at): to for at, to in positions.items()})

    async def seek_to_end(
        self,
        group_id: str,
        member_id: str,
        partitions: Sequence[TopicPartition],
        *,
        is_beginning: bool,
    ) -> None:
        """Go on at the first record that is kept, or after the last."""
        await self._log.wal.refresh()
        found = {}
        for where in partitions:
            held = self._log.state.partition(where.topic, where.partition)
            found[where] = held.log_start_offset if is_beginning else held.high_watermark
        await self.seek(group_id, member_id, found)

    async def _seek(self, heard: Heard, positions: Mapping[Owned, int]) -> None:
        heard = await self._coordinator.alone(heard)
        said = [Sought(at.topic, at.partition, offset) for at, offset in positions.items()]
        await self._coordinator.submit(Seek(heard.group.group_id, heard.member.member_id, said))
        self._begin(heard, positions)
        heard.instance.wake()

    def _begin(self, heard: Heard, positions: Mapping[Owned, int]) -> None:
        """Of partitions that it has still: what stayed behind of others would count when they come
        back. Raises Unavailable where another coordinator may have looked too early."""
        _, member, instance, _ = self._coordinator.still(heard)
        owned = set(member.owned)
        for where, offset in positions.items():
            if where in owned:
                instance.positions.begin(where, offset)

    async def _settle(self, heard: Heard) -> None:
        """Its assignment has changed by its own will: find where it starts."""
        heard.instance.wake()
        _ = await self._position(self._coordinator.still(heard))

    async def _position(self, heard: Heard) -> Heard:
        """Know where each partition that it has goes on. Where that is the end of the log it is
        written down: another coordinator must not begin at a later end."""
        heard.instance.positions.retain(heard.member.owned)
        if not _unknown(heard):
            return heard
        async with heard.instance.finding:
            heard = await self._coordinator.alone(heard)
            await self._find(heard)
        return self._coordinator.still(heard)

    async def _find(self, heard: Heard) -> None:
        _, member, instance, _ = heard
        committed = self._log.state.groups.offsets(heard.group.group_id)
        ends: list[Owned] = []
        for where in _unknown(heard):
            held = committed.get(where.topic, {}).get(where.partition)
            sought = member.position(where)
            if sought is not None:
                instance.positions.begin(where, sought)
            elif held is not None:
                instance.positions.begin(where, held.offset)
            else:
                ends.append(where)
        await self._reset(heard, ends)

    async def _reset(self, heard: Heard, partitions: Sequence[Owned]) -> None:
        """Begin where `auto.offset.reset` says."""
        if not partitions:
            return
        is_earliest = heard.member.config.auto_offset_reset == "earliest"
        if not is_earliest:
            await self._log.wal.refresh()
        found = {}
        for where in partitions:
            topic = self._log.state.topic_of_id(where.topic)
            if topic is not None:
                held = topic.partitions[where.partition]
                found[where] = held.log_start_offset if is_earliest else held.high_watermark
        if is_earliest:
            self._begin(heard, found)
        elif found:
            with contextlib.suppress(NotAssigned):  # just now: its next look finds others
                await self._seek(heard, found)

    # -- records

    @contextlib.asynccontextmanager
    async def reading(
        self, group_id: str, member_id: str, *, bytes_max: int, wait_s: float
    ) -> AsyncIterator[Read]:
        """The next records of the member's partitions: about `bytes_max` bytes, at least one when
        there is any, waiting up to `wait_s` for the first. Leave the context without an error when
        they are sent: then they are not returned again. One read of a member at a time: another
        waits, and that counts; what does not is waiting to hear that the answer before arrived,
        which a client may know before this broker does. Raises UnknownMember, Corrupt,
        Unavailable."""
        deadline = asyncio.get_running_loop().time() + wait_s
        heard = await self._coordinator.hear(group_id, member_id)
        instance = heard.instance
        instance.under_way += 1
        try:
            # Without it a read that waits for nothing finds nothing, and says of nothing that it
            # arrived: the last records of all would never be committed.
            await _until_sent(instance)
            try:
                async with asyncio.timeout_at(deadline):
                    await instance.lock.acquire()
            except TimeoutError:
                yield Read([], heard.group.generation)
                return
            try:
                instance.polled_s = self._log.clock.boot_s()
                instance.positions.acknowledge()
                read = await self._read(heard, bytes_max, deadline)
                instance.sending = asyncio.get_running_loop().create_future()
                yield read
                for portion in read.portions:
                    after = portion.fetched.next_offset
                    instance.positions.advance(portion.where, portion.offset, after)
            finally:
                if instance.sending is not None:
                    instance.sending.set_result(None)
                    instance.sending = None
                instance.lock.release()
        finally:
            instance.under_way -= 1
            instance.heard_s = instance.polled_s = self._log.clock.boot_s()

    async def _read(self, heard: Heard, bytes_max: int, deadline: float) -> Read:
        loop = asyncio.get_running_loop()
        is_asked = False
        while True:
            heard = await self._position(self._coordinator.still(heard))
            portions = await self._take_records(heard, bytes_max)
            heard = await self._coordinator.fresh(heard)
            owned = set(heard.member.owned)
            portions = [one for one in portions if one.where in owned]  # I8: as of now
            read = Read(portions, heard.group.generation)
            wanted = min(max(heard.member.config.fetch_min_bytes, 1), bytes_max)
            if is_asked and loop.time() >= deadline:
                return read
            if portions and (wanted == 1 or sum(map(portion_bytes, portions)) >= wanted):
                return read
            if not is_asked:
                await self._log.wal.refresh()  # whoever was acked before must be seen (I3)
                is_asked = True
                continue
            taken = {one.where for one in portions}
            await self._wait(heard.member, heard.instance, taken, deadline)

    async def _wait(
        self, member: GroupMember, instance: Instance, taken: set[Owned], deadline: float
    ) -> None:
        """Until there is more, the assignment changes, or it is time."""
        keys = []
        for where in member.owned:
            topic = self._log.state.topic_of_id(where.topic)
            if topic is None:
                continue
            end = topic.partitions[where.partition].high_watermark
            at = instance.positions.next_of(where)
            if where not in taken and (at is None or at < end):
                return  # it came while we looked elsewhere
            keys.append((topic.name, where.partition))
        instance.waiter = asyncio.get_running_loop().create_future()
        try:
            await self._log.wait_any(keys, instance.waiter, deadline)
        finally:
            instance.waiter = None

    async def _take_records(self, heard: Heard, bytes_max: int) -> list[Portion]:
        """Of one partition after the other, each time beginning with another. One that fails fails
        the read only where no other has anything."""
        _, member, instance, _ = heard
        owned, portions, budget = list(member.owned), [], bytes_max
        failure: LogError | None = None
        first = instance.turn % max(len(owned), 1)
        for where in owned[first:] + owned[:first]:
            topic = self._log.state.topic_of_id(where.topic)
            offset = instance.positions.next_of(where)
            if topic is None or offset is None:
                continue
            if offset == topic.partitions[where.partition].high_watermark:
                continue
            try:
                fetched = await self._log.fetch(
                    topic.name, where.partition, offset, bytes_max=budget
                )
            except OffsetOutOfRange:
                await self._reset(heard, [where])
                continue
            except (UnknownTopic, UnknownPartition):
                continue  # deleted just now
            except LogError as error:
                failure = failure or error
                continue
            if not fetched.pieces:
                instance.positions.advance(where, offset, fetched.next_offset)
                continue
            portions.append(Portion(where, topic.name, offset, fetched))
            budget -= portion_bytes(portions[-1])
            instance.turn += 1
            if budget <= 0:
                break
        if failure is not None and not portions:
            raise failure
        return portions

    # -- commits

    async def commit(
        self, heard: Heard, offsets: Mapping[TopicPartition, tuple[int, str]] | None = None
    ) -> None:
        """Commit these offsets (of the next records) with their metadata; None: of all that was
        returned. Raises UnknownTopic, UnknownPartition, UnknownMember, IllegalGeneration."""
        if offsets is None:
            await self._acknowledge(heard.instance)
            await self._commits.commit_due(heard)
            return
        said = [
            GroupOffset(owned.topic, owned.partition, offset, metadata=metadata)
            for where, (offset, metadata) in offsets.items()
            for owned in (self._known(where) or await self._owned(where),)
        ]
        if said:
            await self._commits.commit(heard, said)

    async def _acknowledge(self, instance: Instance) -> None:
        """It has what it was sent. Whether it has what is on the way is heard in a moment."""
        await _until_sent(instance)
        instance.positions.acknowledge()

    async def _hand_in(self, group_id: str) -> None:
        """The assignment is about to change: commit what members have, while it is theirs."""
        group, led = self._log.state.members.get(group_id), self._coordinator.led.get(group_id)
        if group is not None and led is not None:
            await self._commits.commit_delivered([(group, led)])

    async def commit_delivered(self) -> None:
        """What instances that commit by themselves have got, all in few flushes."""
        await self._commits.commit_delivered(self._coordinator.ours())

    # -- what happens by itself

    async def _run(self) -> None:
        looked_s = self._log.clock.boot_s()
        for number in itertools.count(1):
            await asyncio.sleep(TICK_S / LOOKS)
            now_s = self._log.clock.boot_s()
            if now_s - looked_s > AWAKE_FACTOR * TICK_S:
                self._coordinator.forgive(now_s)
            looked_s = now_s
            try:
                if number % LOOKS == 0:
                    await self._tick()
                await self._coordinator.expire(now_s)
            except LogError as error:
                log.warning("groups are not looked after: %s", error)

    async def _tick(self) -> None:
        await self._commits.commit_delivered(self._coordinator.ours(), AUTO_COMMITS_MAX)
        await self._coordinator.take_orphans()
        await self._look_at_patterns()

    async def _look_at_patterns(self) -> None:
        """Topics have come or gone, or may be seen: patterns find others."""
        found: dict[tuple[str, str], list[str]] = {}
        for group, _ in self._coordinator.ours():
            for member in list(group.members.values()):
                if not member.pattern:
                    continue
                asked = (member.pattern, member.config.principal)
                if asked not in found:
                    try:
                        found[asked] = self._found(*asked)
                    except InvalidRequest as error:  # it finds too many by now
                        log.warning("group %s keeps its topics: %s", group.group_id, error)
                        continue
                names = found[asked]
                if names != member.topics:
                    action = Subscribe(group.group_id, member.member_id, names, member.pattern)
                    with contextlib.suppress(UnknownMember):
                        await self._coordinator.submit(action)

    # -- small things

    def _found(self, pattern: str, principal: str) -> list[str]:
        names = patterns.matching(pattern, self._log.state.topics)
        names = [name for name in names if self.may_see(principal, name)]
        if len(names) > TOPICS_MAX:
            raise InvalidRequest(f"{len(names)} topics match the pattern: {TOPICS_MAX} at most")
        return names

    def _known(self, where: TopicPartition) -> Owned | None:
        topic = self._log.state.topics.get(where.topic)
        if topic is None or not 0 <= where.partition < len(topic.partitions):
            return None
        return Owned(topic.topic_id, where.partition)

    async def _owned(self, where: TopicPartition) -> Owned:
        """By the topic's id; before it is said not to exist, the WAL is asked (I3)."""
        if (known := self._known(where)) is not None:
            return known
        await self._log.wal.refresh()
        self._log.state.partition(where.topic, where.partition)
        return Owned(self._log.state.topic(where.topic).topic_id, where.partition)


def _unknown(heard: Heard) -> list[Owned]:
    """Partitions that the member has, and of which nobody here knows where it stands."""
    return [where for where in heard.member.owned if where not in heard.instance.positions]


async def _until_sent(instance: Instance) -> None:
    """Wait for what is on the way, which is soon there or lost, unless its client takes nothing."""
    if instance.sending is not None:
        await asyncio.wait([instance.sending], timeout=ARRIVAL_S)


def portion_bytes(portion: Portion) -> int:
    """Of its keys and values."""
    return sum(int(sizes_before(piece.batch)[-1]) for piece in portion.fetched.pieces)
