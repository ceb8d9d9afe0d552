"""Operations on topics: create, delete, grow, and delete records.

The object store replicates, so an assignment of partitions to brokers only gives the number of
these partitions.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tidelog.service.operations.change_request import (
    Change,
    begin,
    begin_checked,
    decided,
    for_each,
)
from tidelog.service.operations.rights import (
    ALTER_TOPIC,
    CREATE_TOPIC,
    CREATE_TOPICS,
    DELETE_TOPIC,
    DESCRIBE_TOPIC,
)
from tidelog.service.security.caller import CallerRights
from tidelog.service.slices import sliced
from tidelog.storage.broker import Broker
from tidelog.storage.core.errors import (
    InvalidPartitions,
    InvalidRequest,
    LogError,
    TopicExists,
    UnknownTopic,
)
from tidelog.storage.core.topic_configs import AUTO_CREATE, NUM_PARTITIONS
from tidelog.storage.state.topic import Topic
from tidelog.storage.state.topic_checks import check_partitions

END = -1
"""As an offset: the end of the partition."""


class NewTopic(NamedTuple):
    """A topic to create.

    If `partitions` is None, it gets the default number. `assigned` are the partitions that the
    request assigns to brokers.
    """

    partitions: int | None
    configs: Mapping[str, str]
    assigned: Sequence[int] = ()


class LogStartMove(NamedTuple):
    """The log start of a partition before and after a deletion of records."""

    was: int
    log_start_offset: int


class InvalidAssignment(InvalidRequest):
    """Partitions are assigned to brokers that are not those of the request."""


class UnknownTopicId(UnknownTopic):
    """No topic of that id, or the caller may not describe it."""

    def __init__(self, topic_id: str) -> None:
        super().__init__(topic_id)
        self.args = (f"there is no topic of id {topic_id}",)


class TopicOperations:
    """The operations on topics, without state.

    `topic_defaults` are the defaults that the broker's settings give
    (`RequestSettings.topic_defaults`).
    """

    def __init__(self, broker: Broker, topic_defaults: Mapping[str, str]) -> None:
        self._broker = broker
        self._topic_defaults = topic_defaults

    # -- the topics that a caller may describe, as the view has them

    def is_shown(self, rights: CallerRights, name: str) -> bool:
        """Whether the caller may describe a topic of this name."""
        return rights.may(DESCRIBE_TOPIC, name)

    def shown(self, rights: CallerRights, name: str) -> Topic | None:
        """Return a topic, or None if there is none or the caller may not describe it."""
        return shown_topic(rights, self._broker.state.topics.get(name))

    def table_uri(self, rights: CallerRights, name: str) -> str | None:
        """Return the URI of a topic's table; empty if the store has none.

        Return None if there is no topic, or the caller may not describe it.
        """
        topic = self.shown(rights, name)
        return None if topic is None else self._broker.topics.table_uri(topic) or ""

    async def all_shown(self, rights: CallerRights) -> list[Topic]:
        """Return all topics that the caller may describe."""
        topics = sliced(list(self._broker.state.topics.values()))
        return [topic async for topic in topics if self.is_shown(rights, topic.name)]

    async def of_id(self, rights: CallerRights, topic_id: str) -> Topic:
        """Return the topic of an id.

        Raises UnknownTopicId also if the caller may not describe the topic.
        """
        if self._broker.state.topic_of_id(topic_id) is None:
            await self._broker.refresh()
        topic = shown_topic(rights, self._broker.state.topic_of_id(topic_id))
        if topic is None:
            raise UnknownTopicId(topic_id)
        return topic

    # -- changes

    async def create(
        self,
        change: Change,
        name: str,
        topic_of: Callable[[], NewTopic],
        *,
        validate_only: bool = False,
    ) -> int:
        """Create the topic of this name that `topic_of` returns.

        With `validate_only`, only check the request. Return the number of the topic's partitions.
        Raises Forbidden, QuotaExceeded, the errors of `topic_of`, InvalidTopicName,
        InvalidPartitions, InvalidAssignment, InvalidConfig, TopicExists, and the errors of a
        commit.
        """
        await begin_checked(self._broker, change, lambda: _check_creation(change.rights, name))
        topic = topic_of()
        count = _count(topic)
        partitions = self._default_partitions() if count is None else count
        creation = self._broker.topics.create(
            name, partitions, dict(topic.configs), validate_only=validate_only
        )
        await (decided(creation) if validate_only else change.commit(name, creation))
        return partitions

    async def create_on_demand(self, change: Change, name: str) -> Topic:
        """Create a topic that a client writes to or looks up, if `auto.create.topics.enable` is on.

        The caller has read the newest state, which has no such topic. Raises UnknownTopic if it is
        off, Forbidden, and the errors of a commit. Another client may create the same topic.
        """
        defaults = self._broker.state.defaults
        if not defaults.is_auto_create(self._topic_defaults[AUTO_CREATE] == "true"):
            raise UnknownTopic(name)
        await _check_creation(change.rights, name)
        creation = self._broker.topics.create(name, self._default_partitions(), {})
        try:
            topic = await change.commit(name, creation)
        except TopicExists:
            return self._broker.state.topic(name)
        assert topic is not None, "the topic is not only checked"
        return topic

    async def delete(self, change: Change, name: str, topic_id: str = "") -> Topic:
        """Delete the topic of this name, and of this id if one is given.

        Return the topic. Raises Forbidden, QuotaExceeded, UnknownTopic, UnknownTopicId, and the
        errors of a commit.
        """
        await begin(self._broker, change, DELETE_TOPIC, name)
        topic = self._broker.state.topics.get(name)
        if topic_id and (topic is None or topic.topic_id != topic_id):
            raise UnknownTopicId(topic_id)
        if topic is None:
            raise UnknownTopic(name)
        await change.commit(name, self._broker.topics.delete(name))
        return topic

    async def add_partitions(
        self,
        change: Change,
        name: str,
        count: int,
        *,
        assigned: int | None = None,
        validate_only: bool = False,
    ) -> None:
        """Grow a topic to `count` partitions.

        `assigned` is the number of new partitions that the request assigns to brokers. Raises
        Forbidden, QuotaExceeded, UnknownTopic, InvalidPartitions, InvalidAssignment, and the errors
        of a commit.
        """
        await begin(self._broker, change, ALTER_TOPIC, name)
        current = len(self._broker.state.topic(name).partitions)
        if count == current:
            raise InvalidPartitions(f"Topic already has {count} partition(s).")
        if count < current:
            raise InvalidPartitions(
                f"Topic currently has {current} partitions, which is higher than the requested "
                f"{count}."
            )
        check_partitions(count)
        if assigned not in {None, count - current}:
            raise InvalidAssignment(f"{assigned} assignments for {count - current} new partitions")
        if not validate_only:
            await change.commit(name, self._broker.topics.add_partitions(name, count))

    async def delete_records(
        self, change: Change, name: str, offsets: Sequence[tuple[int, int]]
    ) -> list[LogStartMove | LogError]:
        """Move the log start of each partition up to an offset, END for the end.

        Return the log start or the error, in the order of `offsets`. Raises Forbidden,
        QuotaExceeded, Unavailable.
        """
        await begin(self._broker, change, DELETE_TOPIC, name)
        return await for_each(offsets, lambda pair: self._move(change, name, *pair))

    async def planned_deletion(
        self, rights: CallerRights, name: str, offsets: Mapping[int, int]
    ) -> dict[int, LogStartMove]:
        """Return what `delete_records` would do now.

        Raises Forbidden, UnknownTopic, UnknownPartition, OffsetOutOfRange.
        """
        await rights.check(DELETE_TOPIC, name)
        await self._broker.refresh()
        moves: dict[int, LogStartMove] = {}
        for number, offset in offsets.items():
            partition = self._broker.state.partition(name, number)
            start = partition.log_start_offset
            end = partition.high_watermark if offset == END else offset
            if end > start:
                partition.check_range(name, number, end)
            moves[number] = LogStartMove(start, max(start, end))
        return moves

    async def _move(
        self, change: Change, name: str, number: int, offset: int
    ) -> LogStartMove | LogError:
        label = f"{name}-{number} below {offset}"
        try:
            old_start = self._broker.state.partition(name, number).log_start_offset
            deletion = self._broker.topics.delete_records(name, number, offset)
            return LogStartMove(old_start, await change.commit(label, deletion))
        except LogError as error:
            return error

    def _default_partitions(self) -> int:
        return self._broker.state.defaults.partitions(int(self._topic_defaults[NUM_PARTITIONS]))


def shown_topic(rights: CallerRights, topic: Topic | None) -> Topic | None:
    """Return the topic, or None if there is none or the caller may not describe it."""
    return topic if topic is not None and rights.may(DESCRIBE_TOPIC, topic.name) else None


async def _check_creation(rights: CallerRights, topic: str) -> None:
    """Raise Forbidden unless the caller may create every topic, or this topic."""
    if not rights.may(CREATE_TOPICS):
        await rights.check(CREATE_TOPIC, topic)


def _count(topic: NewTopic) -> int | None:
    """Return the number of partitions that a request gives, or None."""
    if not topic.assigned:
        return topic.partitions
    if {*topic.assigned} != {*range(len(topic.assigned))}:
        raise InvalidAssignment("assignments must name the partitions 0, 1, 2, ... each once")
    if topic.partitions not in {None, len(topic.assigned)}:
        raise InvalidRequest(
            f"{topic.partitions} partitions are wanted, but {len(topic.assigned)} are assigned to "
            "brokers"
        )
    return len(topic.assigned)
