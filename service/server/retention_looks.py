"""The topics whose tables a round of retention has to look at: those in which something is due.

A look opens a table, and each opening costs requests to the store. Retention depends on the table's
segments, which the broker remembers as a time, and on the state, which it has. So a topic in which
nothing changes is not opened until its oldest segment expires. One broker looks at each topic. A
commit of another program to an idle table is found by the next reader or seal, by a collection, or
within LOOK_S.
"""

import math
from array import array
from typing import NamedTuple

from tidelog.compaction.plan import UNLIMITED
from tidelog.storage.broker import Broker
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.topic import Topic

LOOK_S = 7 * 86_400.0
"""Longest time between two looks of a topic's own broker at a table with segments."""
OTHERS_LOOK_S = 6 * 3600.0
"""The same for the other brokers, if the topic has new segments: its own broker may run no
retention."""
OTHERS_IDLE_LOOK_S = 4 * LOOK_S
"""The same if it has none."""


class _Look(NamedTuple):
    """A look at a table in which nothing was due, and the state of the topic then."""

    config: TopicConfig
    log_starts: "array[int]"
    sealed_ends: "array[int]"
    due_ms: float
    at_s: float

    @property
    def depends_on_seals(self) -> bool:
        """Whether a new segment, which is the newest, may make something due.

        That is so if there is a limit of bytes, if there was no segment that expires, and if
        deleted records were not sealed yet: their seal puts them into the table.
        """
        ends = zip(self.log_starts, self.sealed_ends, strict=True)
        return (
            self.config.retention_bytes != UNLIMITED
            or math.isinf(self.due_ms)
            or any(log_start > sealed_end for log_start, sealed_end in ends)
        )


class RetentionLooks:
    """The last look at each topic, of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._began_s = broker.clock.boot_s()
        self._looks: dict[str, _Look] = {}
        self._looked: list[str] = []  # in this round

    def begin_if_due(self, topic: Topic) -> bool:
        """Return whether this broker looks at the topic's table in this round."""
        is_due = self._is_due(topic)
        if is_due:
            self._looked.append(topic.name)
        return is_due

    def end_round(self) -> list[str]:
        """Return the topics of this round, and forget the looks at deleted topics (I10)."""
        topic_ids = {topic.topic_id for topic in self._broker.state.topics.values()}
        for topic_id in self._looks.keys() - topic_ids:
            del self._looks[topic_id]
        looked, self._looked = self._looked, []
        return looked

    def _is_due(self, topic: Topic) -> bool:
        if topic.name in self._broker.stored.doubts():
            return True
        if self._broker.cluster.owns(topic.topic_id):
            return self._needs_look(topic)
        look = self._looks.get(topic.topic_id)
        last_s = self._began_s if look is None else look.at_s
        sealed_ends = sealed_ends_of(topic)
        is_idle = look is not None and look.sealed_ends == sealed_ends
        pause_s = OTHERS_IDLE_LOOK_S if is_idle else OTHERS_LOOK_S
        return self._broker.clock.boot_s() >= last_s + pause_s and any(sealed_ends)

    def note(self, topic: Topic, due_ms: float) -> None:
        """Remember that nothing is due in a topic until `due_ms`."""
        self._looks[topic.topic_id] = _Look(
            topic.config,
            _log_starts(topic),
            sealed_ends_of(topic),
            due_ms,
            self._broker.clock.boot_s(),
        )

    def _needs_look(self, topic: Topic) -> bool:
        look = self._looks.get(topic.topic_id)
        sealed_ends = sealed_ends_of(topic)
        if look is None:
            return any(sealed_ends)  # else there is no table
        if look.config != topic.config or look.log_starts != _log_starts(topic):
            return True
        if look.sealed_ends != sealed_ends and look.depends_on_seals:
            return True
        now_ms = self._broker.store_time.now_ms()
        return now_ms >= look.due_ms or self._broker.clock.boot_s() >= look.at_s + LOOK_S


def _log_starts(topic: Topic) -> "array[int]":
    return array("q", [partition.log_start_offset for partition in topic.partitions])


def sealed_ends_of(topic: Topic) -> "array[int]":
    return array("q", [partition.sealed_end for partition in topic.partitions])
