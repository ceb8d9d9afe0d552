"""Checks of topics: the rule for their names, and why a topic cannot be created or grown. Pure."""

import re

from tidelog.storage.core import topic_configs
from tidelog.storage.core.actions import AddPartitions, CreateTopic
from tidelog.storage.core.errors import InvalidRequest, LogError

PARTITIONS_MAX = 10_000
"""Bound of a topic's partitions (I10); ~200 bytes each, in memory and in each checkpoint."""

_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")

TOPIC_NAME_MAX = 222
"""Longest name of a new topic. With a dash and the topic id it is a folder name of 255 bytes, the
limit of file systems. `apply` accepts Kafka's 249: existing topics may have longer names."""


def is_topic_name(name: str) -> bool:
    """Check Kafka's rule: 1 to 249 of `[a-zA-Z0-9._-]`, and neither `.` nor `..`."""
    return _NAME.fullmatch(name) is not None and name not in {".", ".."}


def _check_name(name: str) -> InvalidRequest | None:
    """Return why the name is no valid topic name. If it is valid, return None."""
    if is_topic_name(name):
        return None
    return InvalidRequest(
        f"topic name {name!r} is illegal: use 1 to 249 characters of a-z A-Z 0-9 . _ - "
        "but not the name . or .."
    )


def check_new_name(name: str) -> None:
    """Raise InvalidRequest unless a new topic may have this name. A folder store cannot seal topics
    with longer names. The limit is the same on every store, so that data can be copied."""
    if not is_topic_name(name) or len(name) > TOPIC_NAME_MAX:
        raise InvalidRequest(
            f"topic name {name!r} is illegal: use 1 to {TOPIC_NAME_MAX} characters of "
            "a-z A-Z 0-9 . _ - but not the name . or .."
        )


def check_create(action: CreateTopic, level: int) -> LogError | None:
    """Return why the topic cannot be created, or None. The caller checks that the name is free."""
    if not 1 <= action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"a topic has 1 to {PARTITIONS_MAX} partitions, not {action.partitions}"
        )
    return _check_name(action.name) or topic_configs.check_all(action.configs, level)


def check_growth(action: AddPartitions, name: str, partitions: int) -> LogError | None:
    """Return why the topic `name` with `partitions` partitions cannot grow, or None."""
    if not partitions < action.partitions <= PARTITIONS_MAX:
        return InvalidRequest(
            f"topic {name!r} has {partitions} partitions: the number must be greater and at most "
            f"{PARTITIONS_MAX}, not {action.partitions}"
        )
    return None


def check_partitions(partitions: int) -> None:
    """Raise InvalidRequest if a topic cannot have so many partitions."""
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidRequest(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")
