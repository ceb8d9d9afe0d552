"""All groups of a broker, and what concerns a group of either protocol."""

from collections.abc import Sequence

from tidelog.storage.core.actions import DeleteOffsets
from tidelog.storage.core.model import TopicIdPartition, TopicPartition
from tidelog.storage.groups.coordinator import Coordinator
from tidelog.storage.groups.kafka_groups import KafkaGroups
from tidelog.storage.groups.offset_commits import OffsetCommits
from tidelog.storage.groups.rest_groups import RestGroups
from tidelog.storage.log_engine import Log
from tidelog.storage.records import ClusterRecords
from tidelog.storage.state.access import TopicFilter
from tidelog.storage.state.committed_offsets import CommittedOffset


class ClusterGroups:
    """The groups of a cluster through one broker.

    Owned by its event loop. `rest` and `kafka` serve the members of the groups that this broker
    coordinates.
    """

    def __init__(
        self,
        log: Log,
        records: ClusterRecords,
        coordinator: Coordinator,
        may_describe: TopicFilter,
        delay_s: float,
    ) -> None:
        """The first rebalance of an empty Kafka group waits `delay_s` for more members."""
        commits = OffsetCommits(log)
        self.rest = RestGroups(log, records, coordinator, commits, may_describe)
        self.kafka = KafkaGroups(log, coordinator, commits, delay_s)
        self._log = log
        self._coordinator = coordinator

    def coordinator_of(self, group_id: str) -> str:
        """Return the id of the broker that coordinates the group, or that would coordinate it."""
        return self._coordinator.broker_of(group_id)

    async def delete(self, group_id: str) -> None:
        """Delete the group with its committed offsets.

        Raises GroupNotEmpty, also for Kafka clients that join at this broker, before they are
        members in the cluster's state.
        """
        await self.kafka.delete(group_id)

    async def delete_offsets(self, group_id: str, partitions: Sequence[TopicIdPartition]) -> None:
        """Delete the group's committed offsets of these partitions."""
        await self._log.submit(DeleteOffsets(group_id, list(partitions)))

    def committed_offsets(self, group_id: str) -> dict[TopicPartition, CommittedOffset]:
        """Return the group's committed offsets, sorted by topic and partition."""
        state, offsets = self._log.state, {}
        for topic_id, partitions in state.committed_offsets.of_group(group_id).items():
            topic = state.topic_of_id(topic_id)
            assert topic is not None, "offsets go with their topic"
            for number, committed in partitions.items():
                offsets[TopicPartition(topic.name, number)] = committed
        return dict(sorted(offsets.items()))
