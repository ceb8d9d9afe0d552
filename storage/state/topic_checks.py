"""Checks of an action on one topic: why the topic cannot be created or grown. Pure."""

from tidelog.storage.core import topic_configs, topic_names
from tidelog.storage.core.actions import AddPartitions, CreateTopic
from tidelog.storage.core.errors import InvalidRequest, LogError

PARTITIONS_MAX = 10_000
"""Bound of a topic's partitions (I10); ~200 bytes each, in memory and in each checkpoint."""


def check_create(action: CreateTopic, level: int) -> LogError | None:
    """Return why the topic cannot be created, or None. The caller checks that the name is free."""
    if not 1 <= action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"a topic has 1 to {PARTITIONS_MAX} partitions, not {action.partitions}"
        )
    return topic_names.check_name(action.name) or topic_configs.check_all(action.configs, level)


def check_growth(action: AddPartitions, name: str, partitions: int) -> LogError | None:
    """Return why the topic `name` with `partitions` partitions cannot grow, or None."""
    if not partitions < action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"topic {name!r} has {partitions} partitions: the number must be greater and at most "
            f"{PARTITIONS_MAX}, not {action.partitions}"
        )
    return None
