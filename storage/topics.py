"""The topics of a cluster: create, change and delete them, and move their log starts."""

from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    CreateTopic,
    DeleteTopic,
    MoveLogStart,
    SetTopicDefaults,
)
from tidelog.storage.core.errors import TopicExists
from tidelog.storage.log_engine import Log
from tidelog.storage.state.topic import Topic
from tidelog.storage.state.topic_checks import check_new_name, check_partitions


class ClusterTopics:
    """Changes of topics through one broker.

    Owned by its event loop. A view has the topics as `state.topics`. Each change raises the errors
    of `ClusterRecords.append` too.
    """

    def __init__(self, log: Log) -> None:
        self._log = log

    def table_uri(self, topic: Topic) -> str | None:
        """Return the URI of the topic's Delta table, or None if the store has none (memory).

        Before the first seal there is nothing at the URI.
        """
        store = self._log.store
        return f"{store.url}/{topic.prefix}" if hasattr(store, "table_uri") else None

    async def create(
        self, name: str, partitions: int, configs: dict[str, str], *, validate_only: bool = False
    ) -> Topic | None:
        """Create and return a topic.

        If `validate_only`, only check the request and return None. Raises TopicExists,
        InvalidTopicName, InvalidPartitions, InvalidConfig.
        """
        log = self._log
        check_new_name(name)
        check_partitions(partitions)
        configs = {
            key: topic_configs.canonical(key, value, log.state.level)
            for key, value in configs.items()
        }
        if name in log.state.topics:
            await log.wal.refresh()  # another broker may have just deleted it
        if name in log.state.topics:
            raise TopicExists(f"Topic '{name}' already exists.")
        if validate_only:
            return None
        await log.submit(CreateTopic(name, log.clock.new_id().hex(), partitions, configs))
        return log.state.topic(name)

    async def delete(self, name: str) -> None:
        """Delete the topic with its records. Raises UnknownTopic."""
        topic = await self._log.topic(name)
        await self._log.submit(DeleteTopic(topic.topic_id))

    async def alter(self, name: str, configs: dict[str, str | None]) -> None:
        """Set configs of the topic; None removes one. Raises UnknownTopic, InvalidConfig."""
        changes = topic_configs.canonical_changes(configs, self._log.state.level)
        await self._log.submit(AlterTopic((await self._log.topic(name)).topic_id, changes))

    async def set_defaults(self, values: dict[str, str | None]) -> None:
        """Set defaults of topics, by the names of `topic_configs.DEFAULTS`.

        None removes a default. Other defaults stay, so two callers at once lose no change. Raises
        InvalidConfig.
        """
        changes = topic_configs.canonical_defaults(values, self._log.state.level)
        if changes:
            await self._log.submit(SetTopicDefaults(changes))

    async def add_partitions(self, name: str, partitions: int) -> None:
        """Grow the topic to `partitions`. Raises InvalidPartitions if it has that many or more."""
        check_partitions(partitions)
        await self._log.submit(AddPartitions((await self._log.topic(name)).topic_id, partitions))

    async def delete_records(self, topic: str, number: int, offset: int) -> int:
        """Move the log start of a partition up to `offset`, -1 for the high watermark.

        Return the log start. Retention removes the records below it from the table later.

        Raises UnknownTopic, UnknownPartition, OffsetOutOfRange. After CommitUnknown the call may be
        repeated, because a log start never moves back.
        """
        log = self._log
        await log.wal.refresh()  # -1 stands for all records acknowledged before this call (I3)
        partition = log.state.partition(topic, number)
        end = partition.high_watermark if offset == -1 else offset
        if not 0 <= end <= partition.log_start_offset:
            partition.check_range(topic, number, end)
            await log.submit(MoveLogStart(log.state.topic(topic).topic_id, number, end))
        return max(end, partition.log_start_offset)
