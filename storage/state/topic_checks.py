"""Refusals of actions on one topic, given the topic. Pure."""

from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import AddPartitions, CreateTopic
from tidelog.storage.core.errors import InvalidRequest, LogError

PARTITIONS_MAX = 10_000
"""Partitions of one topic (I10): each costs ~200 bytes of state and checkpoint on every broker."""


def check_create(action: CreateTopic, level: int) -> LogError | None:
    """Return why no topic can be like this, or None. Whether the name is free is not checked."""
    if not 1 <= action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"a topic has 1 to {PARTITIONS_MAX} partitions, not {action.partitions}"
        )
    return topic_configs.check_name(action.name) or topic_configs.check_all(action.configs, level)


def check_growth(action: AddPartitions, name: str, partitions: int) -> LogError | None:
    """Return why the topic, which has so many partitions, cannot have more, or None."""
    if not partitions < action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"topic {name!r} has {partitions} partitions: the number can only grow, to "
            f"{PARTITIONS_MAX} at most, not to {action.partitions}"
        )
    return None
