"""Topics: the rule for their names, and refusals of actions on them. Pure."""

import re
from collections.abc import Mapping, Sequence

from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    Append,
    Chunk,
    CreateTopic,
    SetTopicDefaults,
)
from tidelog.storage.core.errors import (
    InvalidPartitions,
    InvalidRequest,
    InvalidTopicName,
    LogError,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.topic_configs import (
    PARTITIONS_MAX,
)
from tidelog.storage.state.topic import DeletedTopic, Topic

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

TOPIC_NAME_MAX = 222
"""Longest name of a new topic. With a dash and the topic id it is a folder name of 255 bytes, the
limit of file systems. `apply` accepts Kafka's 249, because existing topics may have longer names.
"""


def is_topic_name(name: str) -> bool:
    """Check Kafka's rule: 1 to 249 of `[a-zA-Z0-9._-]`, and neither `.` nor `..`."""
    return _NAME.fullmatch(name) is not None and name not in {".", ".."}


def is_new_topic_name(name: str) -> bool:
    """Check whether a new topic may have this name."""
    return is_topic_name(name) and len(name) <= TOPIC_NAME_MAX


def _check_name(name: str) -> InvalidTopicName | None:
    """Return why the name is no valid topic name. If it is valid, return None."""
    if is_topic_name(name):
        return None
    return InvalidTopicName(
        f"topic name {name!r} is illegal: use 1 to 249 characters of a-z A-Z 0-9 . _ - "
        "but not the name . or .."
    )


def check_new_name(name: str) -> None:
    """Raise InvalidTopicName unless a new topic may have this name.

    A folder store cannot have the table of a topic with a longer name. The limit is the same on
    every store, so that a cluster can be copied to any store.
    """
    if not is_new_topic_name(name):
        raise InvalidTopicName(
            f"topic name {name!r} is illegal: use 1 to {TOPIC_NAME_MAX} characters of "
            "a-z A-Z 0-9 . _ - but not the name . or .."
        )


def check_create(action: CreateTopic, level: int) -> LogError | None:
    """Return why the topic cannot be created, or None. The caller checks that the name is free."""
    if not 1 <= action.partitions <= PARTITIONS_MAX:
        return InvalidPartitions(
            f"a topic has 1 to {PARTITIONS_MAX} partitions, not {action.partitions}"
        )
    return _check_name(action.name) or topic_configs.check_all(action.configs, level)


def check_growth(action: AddPartitions, name: str, partitions: int) -> LogError | None:
    """Return why the topic `name` with `partitions` partitions cannot grow, or None."""
    if not partitions < action.partitions <= PARTITIONS_MAX:
        return InvalidPartitions(
            f"topic {name!r} has {partitions} partitions: the number must be greater and at most "
            f"{PARTITIONS_MAX}, not {action.partitions}"
        )
    return None


class TopicChecks:
    """Checks of actions on partitions. Owned by the cluster state, whose topics it reads."""

    def __init__(self, by_id: Mapping[str, Topic], deleted: Sequence[DeletedTopic]) -> None:
        self._by_id = by_id
        self._deleted = deleted

    def check_configs(self, action: AlterTopic | SetTopicDefaults, level: int) -> LogError | None:
        """Return why configs of a topic, or defaults of the cluster, cannot be changed, or None.

        Removing is always possible, also of a name that this version does not know.
        """
        if isinstance(action, AlterTopic):
            if action.topic_id not in self._by_id:
                return self.unknown(action.topic_id)
            return topic_configs.check_all(_given(action.configs), level)
        return topic_configs.check_defaults(_given(action.values), level)

    def check_append(self, action: Append, chunks: Sequence[Chunk]) -> LogError | None:
        if not 0 <= action.chunk < len(chunks):
            return InvalidRequest(f"no chunk {action.chunk} to append: the entry has {len(chunks)}")
        chunk, first_row, count = chunks[action.chunk], action.first_row, action.count
        if first_row < 0 or count < 1 or first_row + count > chunk.rows:
            return InvalidRequest("an action appends rows that the chunk does not have")
        return self.check_partition(chunk.topic_id, chunk.partition)

    def check_offset(self, topic_id: str, partition: int, offset: int) -> LogError | None:
        refusal = self.check_partition(topic_id, partition)
        if refusal is not None:
            return refusal
        if offset > self._by_id[topic_id].partitions[partition].high_watermark:
            return InvalidRequest(f"offset {offset} is beyond the high watermark")
        return None

    def check_partition(self, topic_id: str, partition: int) -> LogError | None:
        topic = self._by_id.get(topic_id)
        if topic is None:
            return self.unknown(topic_id)
        if not 0 <= partition < len(topic.partitions):
            return UnknownPartition(topic.name, partition, len(topic.partitions))
        return None

    def unknown(self, topic_id: str) -> UnknownTopic:
        """Return an error with the topic's name, not its id, because clients do not see ids."""
        names = (topic.name for topic in self._deleted if topic.topic_id == topic_id)
        return UnknownTopic(next(names, topic_id))


def _given(changes: Mapping[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in changes.items() if value is not None}


def check_partitions(partitions: int) -> None:
    """Raise InvalidPartitions if a topic cannot have this number of partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
