"""Operations on consumer groups: of instances of REST, and of Kafka's clients.

A caller sees assignments, offsets and lags of a group only in topics that the caller may describe.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from tidelog.service.operations.change_request import Change, begin
from tidelog.service.operations.rights import (
    DELETE_GROUP,
    DESCRIBE_CLUSTER,
    DESCRIBE_GROUP,
    DESCRIBE_TOPIC,
    FETCH,
    JOIN_GROUP,
    check_all,
)
from tidelog.service.operations.topics import shown_topic
from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import Slices, in_order, sliced
from tidelog.service.telemetry.group_lags import GroupLags
from tidelog.service.telemetry.lag_times import LagTimes
from tidelog.storage.broker import Broker
from tidelog.storage.core.actions import CommitOffsets, GroupOffset
from tidelog.storage.core.errors import GroupNotEmpty, LogError
from tidelog.storage.core.model import TopicIdPartition, TopicPartition
from tidelog.storage.state.committed_offsets import CommittedOffset, check_group_id
from tidelog.storage.state.group_state import NO_GENERATION, GroupMember
from tidelog.storage.state.topic import Topic

NewOffset: TypeAlias = Callable[[TopicPartition], Awaitable[int]]
"""Returns the offset that a reset commits in a partition."""


class UnknownGroup(LogError):
    """The group has no members and no committed offsets."""

    status = 404
    code = 404

    def __init__(self, group_id: str) -> None:
        super().__init__(f"Consumer group {group_id} cannot be found.")


class GroupOperations:
    """Stateless."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    # -- what a caller may describe, as the view has it

    def is_shown(self, rights: CallerRights, group_id: str) -> bool:
        """Whether the caller may describe a group.

        As in Kafka, the right to describe the cluster covers all groups.
        """
        return rights.may(DESCRIBE_CLUSTER) or rights.may(DESCRIBE_GROUP, group_id)

    def shown_subscription(self, rights: CallerRights, member: GroupMember) -> list[str]:
        """Return the topics to which a member subscribes, and that the caller may describe."""
        return [topic for topic in member.topics if rights.may(DESCRIBE_TOPIC, topic)]

    async def shown_partitions(
        self, rights: CallerRights, owned_partitions: Iterable[TopicIdPartition]
    ) -> Iterator[TopicPartition]:
        """Return those of a member's partitions whose topic the caller may describe, sorted."""
        names: dict[str, str | None] = {}
        partitions: list[TopicPartition] = []
        async for partition in sliced(list(owned_partitions)):
            if partition.topic_id not in names:
                topic = self._shown_topic(rights, partition.topic_id)
                names[partition.topic_id] = None if topic is None else topic.name
            name = names[partition.topic_id]
            if name is not None:
                partitions.append(TopicPartition(name, partition.partition))
        return await in_order(partitions)

    async def committed_topics(self, rights: CallerRights, group_id: str) -> list[Topic]:
        """Return the topics of the group's committed offsets that the caller may describe."""
        topic_ids = list(self._broker.state.committed_offsets.of_group(group_id))
        topics = [self._shown_topic(rights, topic_id) async for topic_id in sliced(topic_ids)]
        return [topic for topic in topics if topic is not None]

    def committed_offset(
        self, rights: CallerRights, group_id: str, partition: TopicPartition
    ) -> CommittedOffset | None:
        """Return the group's committed offset in a partition.

        If there is none, or the caller may not describe the topic, return None.
        """
        state = self._broker.state
        topic = shown_topic(rights, state.topics.get(partition.topic))
        if topic is None:
            return None
        offsets = state.committed_offsets.of_group(group_id).get(topic.topic_id, {})
        return offsets.get(partition.partition)

    async def lags(self, rights: CallerRights, group_id: str, times: LagTimes) -> GroupLags:
        """Return the lags of the group in topics that the caller may describe."""
        may_describe = partial(rights.may, DESCRIBE_TOPIC)
        return await GroupLags.of(self._broker, group_id, may_describe, times)

    def _shown_topic(self, rights: CallerRights, topic_id: str) -> Topic | None:
        return shown_topic(rights, self._broker.state.topic_of_id(topic_id))

    # -- changes

    async def delete(self, change: Change, group_id: str) -> None:
        """Delete a group and its committed offsets.

        Raises Forbidden, QuotaExceeded, UnknownGroup, GroupNotEmpty, and the errors of a commit.
        """
        await begin(self._broker, change, DELETE_GROUP, group_id)
        if not self._exists(group_id):
            raise UnknownGroup(group_id)
        await change.commit(group_id, self._broker.groups.delete(group_id))

    async def delete_offsets(
        self,
        change: Change,
        group_id: str,
        partitions_of: Callable[[], Awaitable[Sequence[TopicIdPartition]]],
    ) -> None:
        """Delete the committed offsets of the partitions that `partitions_of` returns, all or none.

        Raises Forbidden, QuotaExceeded, the errors of `partitions_of`, and those of a commit.
        """
        await begin(self._broker, change, DELETE_GROUP, group_id)
        partitions = list(await partitions_of())
        if partitions:
            deletion = self._broker.groups.delete_offsets(group_id, partitions)
            await change.commit(group_id, deletion)

    async def reset_offsets(
        self,
        change: Change,
        group_id: str,
        topics: Sequence[str],
        partitions_of: Callable[[], Awaitable[Sequence[TopicPartition]]],
        new_offset: NewOffset,
        *,
        validate_only: bool = False,
    ) -> dict[TopicPartition, int]:
        """Commit offsets of a group without active members, all or none.

        `topics` are those that the request names. `partitions_of` returns the partitions in the
        newest state, and `new_offset` is called for each of them. Return the new offsets. Raises
        Forbidden, QuotaExceeded, InvalidRequest, GroupNotEmpty, the errors of the two functions,
        and those of a commit.
        """
        await begin(self._broker, change, JOIN_GROUP, group_id)
        self._check_reset(group_id)
        await check_all(change.rights, FETCH, topics)
        partitions = await partitions_of()
        await check_all(change.rights, FETCH, [partition.topic for partition in partitions])
        slices, offsets = Slices(), dict[TopicPartition, int]()
        for partition in partitions:
            offsets[partition] = await new_offset(partition)
            await slices.pause()
        if offsets and not validate_only:
            await change.commit(group_id, self._commit(group_id, offsets))
        return offsets

    def _exists(self, group_id: str) -> bool:
        state = self._broker.state
        if group_id in state.committed_offsets or state.members.has_members(group_id):
            return True
        return self._broker.groups.kafka.describe(group_id) is not None

    def _check_reset(self, group_id: str) -> None:
        refusal = check_group_id(group_id)
        if refusal is not None:
            raise refusal
        members = self._broker.state.members.get(group_id)
        if members is not None and members.is_active:
            raise GroupNotEmpty(f"group {group_id!r} has members: stop them first")

    async def _commit(self, group_id: str, offsets: Mapping[TopicPartition, int]) -> None:
        state = self._broker.state
        group_offsets = [
            GroupOffset(state.topic(partition.topic).topic_id, partition.partition, offset)
            for partition, offset in offsets.items()
        ]
        commit = CommitOffsets(group_id, NO_GENERATION, group_offsets)
        await self._broker.records.transact([], [commit], size=0, is_json=False)
