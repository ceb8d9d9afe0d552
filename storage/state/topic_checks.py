"""Topics: the rule for their names, refusals of actions on them, and their owners. Pure."""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TypeAlias

import msgspec

from tidelog.storage.core import object_keys, topic_configs
from tidelog.storage.core.actions import (
    AddPartitions,
    AlterTopic,
    AnyAction,
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
    NO_DEFAULTS,
    PARTITIONS_MAX,
    TopicConfig,
    TopicDefaults,
)
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state.partition import Partition
from tidelog.storage.state.principal_shares import Need, Shares

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


class Topic(msgspec.Struct, array_like=True, forbid_unknown_fields=True, dict=True):
    """One topic.

    If a topic is created again under the same name, it gets another `topic_id`. `configs` are the
    configs that the topic sets; `config` has the effective ones.
    """

    name: str
    topic_id: str
    created_ms: int
    configs: dict[str, str]
    partitions: list[Partition]

    @property
    def prefix(self) -> str:
        return object_keys.topic(self.name, self.topic_id)

    def alter(self, changes: Mapping[str, str | None]) -> None:
        """Set these configs. None resets a config to its default."""
        self.configs = self._configs_after(changes)
        self.inherit(self.defaults)

    def config_after(self, changes: Mapping[str, str | None]) -> TopicConfig:
        """Return the effective configs that the topic would have after `alter`."""
        return topic_configs.effective(self._configs_after(changes), self.defaults)

    def _configs_after(self, changes: Mapping[str, str | None]) -> dict[str, str]:
        entries = (self.configs | dict(changes)).items()
        return {name: text for name, text in entries if text is not None}

    @cached_property
    def defaults(self) -> TopicDefaults:
        """The cluster's defaults. The state sets them; a deleted topic keeps its last ones."""
        return NO_DEFAULTS

    @cached_property
    def config(self) -> TopicConfig:
        """The effective configs. All code that obeys configs reads this."""
        return topic_configs.effective(self.configs, self.defaults)

    def inherit(self, defaults: TopicDefaults) -> None:
        """Take these defaults of the cluster."""
        self.defaults = defaults
        self.__dict__.pop("config", None)

    def grow(self, partitions: int) -> int:
        """Grow to this number of partitions; return how many are new."""
        new_partitions = [Partition() for _ in range(len(self.partitions), partitions)]
        self.partitions += new_partitions
        return len(new_partitions)


class DeletedTopic(
    msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """The record of a deleted topic. It is kept until the topic's prefix has no objects."""

    name: str
    topic_id: str
    deleted_ms: int


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


PartitionsOf: TypeAlias = list[tuple[str, int]]
"""Principals and the number of partitions that each added, in the order of the actions: the first
principal created the topic."""


class TopicOwners:
    """The principals that created topics and partitions.

    Owned by the cluster state, whose topics it reads.
    """

    def __init__(self, topics: Mapping[str, Topic], shares: Shares) -> None:
        self._topics = topics
        self._shares = shares
        self.by_id: dict[str, PartitionsOf] = {}
        """By topic id. A topic is left out if no principal created it or one of its partitions."""

    def needs(self, action: AnyAction, principal: str, _: Sequence[Chunk]) -> list[Need]:
        """Return what the action adds to the principal's use of bounds. Call the checks before."""
        if isinstance(action, AddPartitions):
            added_partitions = action.partitions - len(self._topics[action.topic_id].partitions)
            return [Need(rules.PARTITIONS, principal, added_partitions, rules.PARTITIONS_MAX)]
        if isinstance(action, CreateTopic):
            return [
                Need(rules.TOPICS, principal, 1, rules.TOPICS_MAX),
                Need(rules.PARTITIONS, principal, action.partitions, rules.PARTITIONS_MAX),
            ]
        return []

    def owner(self, topic_id: str) -> str:
        """Return the principal that created a topic; empty if there is none."""
        owners = self.by_id.get(topic_id)
        return owners[0][0] if owners else ""

    def created(self, topic_id: str, principal: str) -> None:
        """Count a new topic for the principal. The state must have the topic already."""
        if principal:
            self.by_id[topic_id] = [(principal, len(self._topics[topic_id].partitions))]
        self._count(topic_id, 1)

    def grown(self, topic_id: str, added_count: int, principal: str) -> None:
        """Count new partitions for the principal. The topic must have them already."""
        if principal or topic_id in self.by_id:
            old_count = len(self._topics[topic_id].partitions) - added_count
            self.by_id[topic_id] = [
                *self.by_id.get(topic_id, [("", old_count)]),
                (principal, added_count),
            ]
        self._shares.add(rules.PARTITIONS, principal, added_count)

    def removed(self, topic_id: str) -> None:
        """Stop counting a topic. Call this while the state still has the topic."""
        self._count(topic_id, -1)
        self.by_id.pop(topic_id, None)

    def load(self, owners_by_id: Mapping[str, PartitionsOf]) -> None:
        """Restore the owners from a checkpoint. Call this after its topics are loaded."""
        self.by_id = {
            topic_id: owners
            for topic_id, owners in owners_by_id.items()
            if topic_id in self._topics
        }
        for topic_id in self._topics:
            self._count(topic_id, 1)

    def _count(self, topic_id: str, sign: int) -> None:
        owners = self.by_id.get(topic_id)
        if owners is None:
            owners = [("", len(self._topics[topic_id].partitions))]
        self._shares.add(rules.TOPICS, self.owner(topic_id), sign)
        for principal, count in owners:
            self._shares.add(rules.PARTITIONS, principal, sign * count)


def check_partitions(partitions: int) -> None:
    """Raise InvalidPartitions if a topic cannot have this number of partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
