"""REST groups: how a group's coordinator serves their members, which are consumer instances.

Members, generations and committed offsets are in the cluster state (state.group_members,
state.committed_offsets), so every broker has them. An instance's positions are soft state of the
group's coordinator alone (groups.rest_members, groups.positions). I10: the bound of the state's
members bounds the instances, the callers' memory budget bounds the reads.

**On a coordinator crash**: the next coordinator resumes at the last `Seek`, else at the committed
offset, else where `auto.offset.reset` says. Records returned after the last commit are returned
again; no record is skipped. Each second, up to AUTO_COMMITS_MAX instances are auto-committed
together. So with at most that many instances, a crash repeats the records of one second.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence

from tidelog.storage.core.actions import (
    AssignByHand,
    GroupOffset,
    JoinGroup,
    LeaveGroup,
    MemberConfig,
    Seek,
    SeekPosition,
    Subscribe,
)
from tidelog.storage.core.errors import (
    Corrupt,
    LogError,
    NotAssigned,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import ReadBounds, TopicIdPartition, TopicPartition
from tidelog.storage.groups import delivery_outcome
from tidelog.storage.groups.coordinator import Coordinator
from tidelog.storage.groups.group_release import GroupRequests
from tidelog.storage.groups.join_backoff import client_of
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.pattern_topics import PatternTopics
from tidelog.storage.groups.read_result import Portion, PortionCheck, Read, SentRead
from tidelog.storage.groups.rest_members import Instance, MemberSession, RestMembers
from tidelog.storage.log_engine import Log
from tidelog.storage.records import ClusterRecords
from tidelog.storage.state.access import TopicFilter, all_topics
from tidelog.storage.state.group_state import GroupMember

log = logging.getLogger("tidelog.consumers")

AUTO_COMMITS_MAX = 2000
"""Most auto-commits in a second, ~25 us each. The members that are left out come first in the next
second. So 10,000 instances that read all the time commit every five seconds, which is Kafka's
default."""


class RestGroups:
    """The REST groups that this broker coordinates, owned by the log's event loop.

    A call takes the group over from another coordinator.
    """

    def __init__(
        self,
        log: Log,
        records: ClusterRecords,
        coordinator: Coordinator,
        commits: OffsetCommits,
        may_describe: TopicFilter = all_topics,
    ) -> None:
        self.coordinator = coordinator
        self.members = RestMembers(log, coordinator)
        self.requests = GroupRequests()
        self._log = log
        self._records = records
        self._commits = commits
        self._patterns = PatternTopics(log, may_describe)

    def release(self) -> None:
        """Serve no member from now on."""
        self.coordinator.release(self.members)

    # -- membership

    async def join(
        self,
        group_id: str,
        member_id: str,
        config: MemberConfig,
        *,
        instance_id: str = "",
        assignor: str = "",
        host: str | None = None,
    ) -> None:
        """Create the instance.

        `host` is the client's address; if it is None, the join is not held. Raises MemberExists,
        InvalidRequest, Throttled (also as MemberHeld).
        """
        client = None if host is None else client_of(config, instance_id, host)
        self.members.admit(group_id, member_id, client)
        me = self.coordinator.coordinators.me
        await self._log.submit(JoinGroup(group_id, member_id, me, config, instance_id, assignor))
        rest_group = await self.members.coordinate(group_id)
        rest_group.instances[member_id] = self.members.new_instance(client)

    async def leave(self, group_id: str, member_id: str) -> None:
        """Commit what the member read, if it has auto-commit.

        Then remove it. Raises UnknownMember.
        """
        session = await self.members.heartbeat(group_id, member_id)
        if session.member.config.auto_commit:
            await delivery_outcome.acknowledge(session.instance)
            with contextlib.suppress(LogError):  # another member may own the partitions
                await self._commits.commit_due(session)
        await self._log.submit(LeaveGroup(group_id, member_id))

    async def subscribe(
        self, group_id: str, member_id: str, topics: Sequence[str], pattern: str = ""
    ) -> None:
        """Subscribe to these topics, or to the topics that match the pattern now and later.

        With neither topics nor a pattern, the member reads nothing. Return when the assignment is
        made and its start positions are found, so a start at the end of the log means the end at
        this time. Raises UnknownMember, AssignedOtherwise, InvalidRequest, MemberHeld.
        """
        session = await self.members.heartbeat(group_id, member_id)
        if pattern:
            await self._log.wal.refresh()
            principal = session.member.config.principal
            self._patterns.add_new_names()
            topics = await self._patterns.find(pattern, principal)
        if topics or pattern:
            self.members.admit_change(session, topics, pattern)
        await self._hand_in(group_id)
        await self._log.submit(Subscribe(group_id, member_id, list(topics), pattern))
        session.instance.polled_s = self._log.clock.boot_s()
        await self._settle(session)

    async def assign(
        self, group_id: str, member_id: str, partitions: Sequence[TopicPartition]
    ) -> None:
        """Assign partitions manually; other members may read them too.

        Raises UnknownTopic, UnknownPartition, AssignedOtherwise, UnknownMember.
        """
        session = await self.members.heartbeat(group_id, member_id)
        owned_partitions = [await self._owned(topic_partition) for topic_partition in partitions]
        await self._log.submit(AssignByHand(group_id, member_id, owned_partitions))
        await self._settle(session)

    async def heartbeat(self, group_id: str, member_id: str) -> MemberSession:
        """Record a heartbeat of the member. Raises UnknownMember."""
        return await self.members.heartbeat(group_id, member_id)

    # -- positions

    async def seek(
        self, group_id: str, member_id: str, positions: Mapping[TopicPartition, int]
    ) -> None:
        """Set positions.

        They are in the WAL, so the next coordinator has them too. Raises NotAssigned,
        UnknownMember.
        """
        session = await self.members.heartbeat(group_id, member_id)
        await self._seek(
            session,
            {await self._owned(topic_partition): to for topic_partition, to in positions.items()},
        )

    async def seek_to_end(
        self,
        group_id: str,
        member_id: str,
        partitions: Sequence[TopicPartition],
        *,
        is_beginning: bool,
    ) -> None:
        """Seek to the log start offset if `is_beginning`, else to the end of the log."""
        await self._log.wal.refresh()
        positions = {}
        for topic_partition in partitions:
            partition = self._log.state.partition(topic_partition.topic, topic_partition.partition)
            positions[topic_partition] = (
                partition.log_start_offset if is_beginning else partition.high_watermark
            )
        await self.seek(group_id, member_id, positions)

    async def _seek(
        self, session: MemberSession, positions: Mapping[TopicIdPartition, int]
    ) -> None:
        session = await self.members.wait_for_exclusive(session)
        seeks = [SeekPosition(*partition, offset) for partition, offset in positions.items()]
        await self._log.submit(Seek(session.group.group_id, session.member.member_id, seeks))
        self._begin(session, positions)
        session.instance.wake()

    def _begin(self, session: MemberSession, positions: Mapping[TopicIdPartition, int]) -> None:
        """Set positions, but not of partitions that the member lost.

        The member would read from these positions when it gets the partitions back. Raises
        UnknownMember, or Unavailable if the group has moved to another coordinator, which may have
        read the old positions.
        """
        _, member, instance, _ = self.members.revalidate(session)
        owned_partitions = set(member.owned)
        for partition, offset in positions.items():
            if partition in owned_partitions:
                instance.positions.begin(partition, offset)

    async def _settle(self, session: MemberSession) -> None:
        """Find the start positions after the member changed its own assignment."""
        session.instance.wake()
        _ = await self._position(self.members.revalidate(session))

    async def _position(self, session: MemberSession) -> MemberSession:
        """Find unknown positions of the member's partitions.

        A start at the end of the log is committed as a `Seek`, because another coordinator must not
        start at a later end.
        """
        session.instance.positions.retain(session.member.owned)
        if not _unknown(session):
            return session
        async with session.instance.finding:
            session = await self.members.wait_for_exclusive(session)
            await self._find(session)
        return self.members.revalidate(session)

    async def _find(self, session: MemberSession) -> None:
        _, member, instance, _ = session
        committed = self._log.state.committed_offsets.of_group(session.group.group_id)
        ends: list[TopicIdPartition] = []
        for partition in _unknown(session):
            committed_offset = committed.get(partition.topic_id, {}).get(partition.partition)
            sought = member.position(partition)
            if sought is not None:
                instance.positions.begin(partition, sought)
            elif committed_offset is not None:
                instance.positions.begin(partition, committed_offset.offset)
            else:
                ends.append(partition)
        await self._reset(session, ends)

    async def _reset(self, session: MemberSession, partitions: Sequence[TopicIdPartition]) -> None:
        """Set positions by `auto.offset.reset`."""
        if not partitions:
            return
        is_earliest = session.member.config.auto_offset_reset == "earliest"
        if not is_earliest:
            await self._log.wal.refresh()
        positions = {}
        for topic_partition in partitions:
            topic = self._log.state.topic_of_id(topic_partition.topic_id)
            if topic is not None:
                partition = topic.partitions[topic_partition.partition]
                positions[topic_partition] = (
                    partition.log_start_offset if is_earliest else partition.high_watermark
                )
        if is_earliest:
            self._begin(session, positions)
        elif positions:
            with contextlib.suppress(NotAssigned):  # the partition was lost just now
                await self._seek(session, positions)

    # -- records

    @contextlib.asynccontextmanager
    async def reading(
        self,
        group_id: str,
        member_id: str,
        *,
        bounds: ReadBounds,
        wait_s: float,
        check: PortionCheck | None = None,
        received: str | None = None,
    ) -> AsyncIterator[Read]:
        """Yield the next records of the member's partitions within the bounds.

        They are at least one record if there is any. Waits up to `wait_s` for the first record. If
        the context ends without an error, and the records then arrive (groups.delivery_outcome),
        they are not returned again. `received` is the `read_id` of the last records that the member
        has. One read of a member runs at a time; a second one waits, within `wait_s`. The wait for
        the previous response is not part of `wait_s`, because the client may have this response
        before this broker knows. Raises UnknownMember, Unavailable. The error of a partition
        (Corrupt, or from `check`) is raised only if no other partition has records.
        """
        deadline = asyncio.get_running_loop().time() + wait_s
        session = await self.members.heartbeat(group_id, member_id)
        instance = session.instance
        instance.under_way += 1
        try:
            # Without this wait, a read with `wait_s` 0 would return nothing and acknowledge
            # nothing, so the last records of a partition would never be committed.
            await delivery_outcome.until_sent(instance)
            try:
                async with asyncio.timeout_at(deadline):
                    await instance.lock.acquire()
            except TimeoutError:
                yield Read([], session.group.generation)
                return
            try:
                instance.polled_s = self._log.clock.boot_s()
                await delivery_outcome.decide(instance, received)
                read = await self._read(session, bounds, deadline, check)
                if read.portions:
                    read.read_id = self._log.clock.new_id().hex()
                instance.sending = asyncio.get_running_loop().create_future()
                yield read
                for portion in read.portions:
                    next_offset = portion.fetched.next_offset
                    instance.positions.advance(portion.where, portion.offset, next_offset)
                if read.portions:
                    instance.sent = SentRead(read.read_id, read.records, read.arrival)
            finally:
                if instance.sending is not None:
                    instance.sending.set_result(None)
                    instance.sending = None
                instance.lock.release()
        finally:
            instance.under_way -= 1
            instance.heard_s = instance.polled_s = self._log.clock.boot_s()

    async def _read(
        self,
        session: MemberSession,
        bounds: ReadBounds,
        deadline: float,
        check: PortionCheck | None,
    ) -> Read:
        loop = asyncio.get_running_loop()
        is_fresh = False
        while True:
            session = await self._position(self.members.revalidate(session))
            if session.instance.is_awaited:
                self.members.has_read(session)
            portions, failure = await self._take_records(session, bounds, check)
            if portions:  # I8: to the current owner
                session = await self.members.refresh(session)
            owned_partitions = set(session.member.owned)
            portions = [portion for portion in portions if portion.where in owned_partitions]
            read = Read(portions, session.group.generation, failure)
            if failure is not None and (portions or is_fresh):
                if not portions:
                    raise failure
                return read  # do not wait for more: the failed partition would end the wait at once
            weight_min = min(max(session.member.config.fetch_min_bytes, 1), bounds.bytes_max)
            if is_fresh and loop.time() >= deadline:
                return read
            if read.weight >= weight_min or read.records >= bounds.records_max:
                return read
            if not is_fresh:
                if loop.time() < deadline:
                    await self._log.refresh_to_wait()
                else:
                    await self._log.wal.refresh()  # to see every acked record (I3)
                is_fresh = True
                continue
            read_partitions = {portion.where for portion in portions} | session.instance.damaged
            if not await self._wait(session.member, session.instance, read_partitions, deadline):
                await self._log.refresh_to_wait()
                deadline = loop.time()

    async def _wait(
        self,
        member: GroupMember,
        instance: Instance,
        read_partitions: set[TopicIdPartition],
        deadline: float,
    ) -> bool:
        """Wait for more records or a changed assignment. Return False if the wait ended before."""
        keys = []
        for partition in member.owned:
            topic = self._log.state.topic_of_id(partition.topic_id)
            if topic is None:
                continue
            end = topic.partitions[partition.partition].high_watermark
            position = instance.positions.next_of(partition)
            if partition not in read_partitions and (position is None or position < end):
                return True  # records arrived during the reads
            keys.append((topic.name, partition.partition))
        instance.waiter = asyncio.get_running_loop().create_future()
        try:
            return await self._records.wait_any(keys, instance.waiter, deadline)
        finally:
            instance.waiter = None

    async def _take_records(
        self, session: MemberSession, bounds: ReadBounds, check: PortionCheck | None
    ) -> tuple[list[Portion], LogError | None]:
        """Read the partitions in turn; each portion lets the next call begin one partition later.

        After an error, continue with the next partition. Return the portions and the first error.
        Damage counts as an error only if all partitions are damaged.
        """
        _, member, instance, _ = session
        owned_partitions, portions, (budget, records, _) = list(member.owned), [], bounds
        failure: LogError | None = None
        first = instance.turn % max(len(owned_partitions), 1)
        for partition in owned_partitions[first:] + owned_partitions[:first]:
            topic = self._log.state.topic_of_id(partition.topic_id)
            offset = instance.positions.next_of(partition)
            if topic is None or offset in {
                None,
                topic.partitions[partition.partition].high_watermark,
            }:
                continue
            try:
                fetched = await self._records.fetch(
                    topic.name, partition.partition, offset, bytes_max=budget, records_max=records
                )
                portion = Portion(partition, topic.name, offset, fetched)
                if check is not None and fetched.pieces:
                    check(portion)
            except OffsetOutOfRange:
                await self._reset(session, [partition])
                continue
            except (UnknownTopic, UnknownPartition):
                continue  # deleted just now
            except Corrupt as error:
                if partition not in instance.damaged:
                    log.error("group %s: %s", session.group.group_id, error)
                instance.damaged.add(partition)
                if instance.damaged.issuperset(owned_partitions):
                    failure = failure or error
                continue
            except LogError as error:
                failure = failure or error
                continue
            instance.damaged.discard(partition)
            if not fetched.pieces:
                instance.positions.advance(partition, offset, fetched.next_offset)
                continue
            portions.append(portion)
            budget -= fetched.weight
            records -= fetched.records
            instance.turn += 1
            if budget <= 0 or records <= 0:
                break
        return portions, failure

    # -- commits

    async def commit(
        self,
        session: MemberSession,
        offsets: Mapping[TopicPartition, tuple[int, str]] | None = None,
    ) -> None:
        """Commit these offsets (each of the next record to read) with metadata.

        If `offsets` is None, commit all records that were returned. Raises UnknownTopic,
        UnknownPartition, UnknownMember, IllegalGeneration.
        """
        if offsets is None:
            await delivery_outcome.acknowledge(session.instance)
            await self._commits.commit_due(session)
            return
        commits = [
            GroupOffset(*topic_id_partition, offset, metadata=metadata)
            for topic_partition, (offset, metadata) in offsets.items()
            for topic_id_partition in (
                self._known(topic_partition) or await self._owned(topic_partition),
            )
        ]
        if commits:
            for commit in commits:
                topic_partition = TopicIdPartition(commit.topic_id, commit.partition)
                session.instance.positions.deliver(topic_partition, commit.offset)
            await self._commits.commit(session, commits)

    async def _hand_in(self, group_id: str) -> None:
        """Commit delivered offsets before the assignment changes, while the members own them."""
        group, rest_group = self._log.state.members.get(group_id), self.members.group(group_id)
        if group is not None and rest_group is not None:
            await self._commits.commit_delivered([(group, rest_group)])

    async def commit_delivered(self) -> None:
        """Auto-commit delivered offsets of all instances in few flushes."""
        await self._commits.commit_delivered(self.members.groups())

    async def do_duties(self) -> None:
        """Auto-commit, and match patterns against topics. Called once a second."""
        await self._commits.commit_delivered(self.members.groups(), AUTO_COMMITS_MAX)
        await self._patterns.update([group for group, _ in self.members.groups()])

    def _known(self, topic_partition: TopicPartition) -> TopicIdPartition | None:
        topic = self._log.state.topics.get(topic_partition.topic)
        is_known = topic is not None and 0 <= topic_partition.partition < len(topic.partitions)
        return (
            TopicIdPartition(topic.topic_id, topic_partition.partition)
            if topic and is_known
            else None
        )

    async def _owned(self, topic_partition: TopicPartition) -> TopicIdPartition:
        """Look up the topic's id.

        If the partition is not known, refresh the WAL (I3) and look again.
        """
        if (partition := self._known(topic_partition)) is not None:
            return partition
        await self._log.wal.refresh()
        self._log.state.partition(topic_partition.topic, topic_partition.partition)
        return TopicIdPartition(
            self._log.state.topic(topic_partition.topic).topic_id, topic_partition.partition
        )


def _unknown(session: MemberSession) -> list[TopicIdPartition]:
    return [
        partition
        for partition in session.member.owned
        if partition not in session.instance.positions
    ]
