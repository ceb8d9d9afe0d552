"""Lags of consumer groups: the records between a group's position and the end of the log.

The position is one of a partition. The v3 routes, the console, /metrics and the lag history read
lags from this module.

The position is the committed offset. If there is none and a member reads the partition, the
position is the offset at which the member starts. This is the offset of its seek or, without a
seek, the log start or the end, as its `auto.offset.reset` says. (If a member starts at the end, its
first read stores this offset in the cluster state as a seek.) A partition without a committed
offset and without such a member has no lag.

Computing a lag takes ~2 us. Lags are computed in slices of time, so the lags of one result may be
of different times.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from itertools import islice
from typing import Any, NamedTuple

from tidelog.service.slices import Slices, sliced
from tidelog.service.telemetry.lag_times import LagTimes, Unread
from tidelog.storage.broker import Broker
from tidelog.storage.core.model import TopicIdPartition, TopicPartition
from tidelog.storage.state.group_state import GroupMember
from tidelog.storage.state.topic import Topic

LAGS_AT_ONCE = 1_000
"""Lags that are computed between two checks whether the slice is over."""
SERIES_MAX = 2_000
"""Maximum pairs of group and partition with a lag series of their own (I10)."""
METRIC_GROUPS_MAX = 500
"""Maximum groups with series of their own. Groups with members come first. All other groups share
the label OTHER_GROUPS."""
OTHER_GROUPS = "(other)"
HISTORIES_MAX = 500
"""Maximum pairs of group and topic with a lag history."""
LOOKS = 20
"""Sealed records that the answer to one request reads for lags in seconds."""
UNREAD_MAX = 1_000
"""Maximum sealed records whose times a reading asks for."""
FEW_PARTITIONS = 10_000
REST_S = 40e-6
"""After a reading of more than FEW_PARTITIONS partitions, the next reading waits for this time
multiplied by the number of partitions. A reading takes ~2 us for each partition, so readings take
at most 5 % of the event loop's time."""


class Lag(NamedTuple):
    """A group's lag in a partition, and the member that reads the partition."""

    partition: TopicPartition
    current_offset: int
    end_offset: int
    member: GroupMember | None
    is_committed: bool
    seconds: float | None
    """The age (s) of the oldest unread record, 0 without lag, None if it is not known."""

    @property
    def unread(self) -> Unread:
        return Unread(self.partition.topic, self.partition.partition, self.current_offset)

    @property
    def lag(self) -> int:
        return max(self.end_offset - self.current_offset, 0)


def oldest(age_s: float | None, other_age_s: float | None) -> float | None:
    """Return the greater age, or the one that is known."""
    return max((age for age in (age_s, other_age_s) if age is not None), default=None)


class LagSummary:
    """The sum and the maximum of a group's lags.

    `largest` is None if the group has no lag in any partition. Of equal lags, `largest` is the
    first by topic and partition.
    """

    def __init__(self) -> None:
        self.partitions = 0
        self.total = 0
        self.largest: Lag | None = None
        self.topics: dict[str, int] = {}
        self.seconds: float | None = None
        """The largest lag in seconds that is known, None if none is known."""

    def add(self, lag: Lag) -> None:
        behind, largest = max(lag.end_offset - lag.current_offset, 0), self.largest
        self.seconds = oldest(self.seconds, lag.seconds)
        self.partitions += 1
        self.total += behind
        topic = lag.partition.topic
        self.topics[topic] = self.topics.get(topic, 0) + behind
        if largest is None or (behind, largest.partition) > (largest.lag, lag.partition):
            self.largest = lag


def any_topic(_: str) -> bool:
    """Show the lags in every topic."""
    return True


def group_ids(broker: Broker) -> list[str]:
    """Return the ids of all groups with members or committed offsets, first those with members.

    They are otherwise unsorted. This takes ~0.1 us for each id.
    """
    with_members = {group.group_id: None for group in broker.state.members if group.members}
    return [
        *with_members,
        *(group_id for group_id in broker.state.committed_offsets if group_id not in with_members),
    ]


class GroupLags:
    """The lags of one group, in topics that a caller may describe. Made by `of`, for one answer."""

    def __init__(
        self, broker: Broker, group_id: str, times: LagTimes, may_describe: Callable[[str], bool]
    ) -> None:
        self._broker = broker
        self._group_id = group_id
        self._times = times
        self._may_describe = may_describe
        self._readers: dict[TopicIdPartition, GroupMember] = {}
        self._read: dict[str, list[int]] = {}

    @classmethod
    async def of(
        cls,
        broker: Broker,
        group_id: str,
        may_describe: Callable[[str], bool],
        times: LagTimes | None = None,
    ) -> "GroupLags":
        """Find the member that reads each partition.

        Takes ~0.5 us for each partition. `may_describe` gets the name of a topic; `any_topic` shows
        all lags. `times` has times of sealed records.
        """
        lags = cls(broker, group_id, times or LagTimes(broker), may_describe)
        group = broker.state.members.get(group_id)
        async for member in sliced([] if group is None else list(group.members.values())):
            for partition in broker.state.members.partitions_of(member):
                if partition not in lags._readers:
                    lags._read.setdefault(partition.topic_id, []).append(partition.partition)
                lags._readers[partition] = member
        return lags

    def in_order(self, start_key: tuple[Any, ...] | None = None) -> Iterator[tuple[str, int]]:
        """Iterate over (topic name, partition), sorted, from the first pair after `start_key` on.

        In all topics, the partitions that have a committed offset or that a member reads.
        """
        committed = self._broker.state.committed_offsets.of_group(self._group_id)
        topics = map(self._broker.state.topic_of_id, list(committed.keys() | self._read.keys()))
        named = sorted((topic.name, topic.topic_id) for topic in topics if topic is not None)
        for name, topic_id in named:
            if start_key is not None and name < start_key[0]:
                continue
            least = start_key[1] + 1 if start_key is not None and name == start_key[0] else 0
            for number in sorted(self._numbers(topic_id)):
                if number >= least:
                    yield name, number

    def lag(self, topic: Topic, number: int) -> Lag | None:
        """Return the lag in a partition; None if there is none, or the topic is not shown."""
        return self._lag(topic, number) if self._may_describe(topic.name) else None

    def _lag(self, topic: Topic, number: int) -> Lag | None:
        topic_id_partition = TopicIdPartition(topic.topic_id, number)
        partition, reader = topic.partitions[number], self._readers.get(topic_id_partition)
        offsets = self._broker.state.committed_offsets.of_group(self._group_id).get(
            topic.topic_id, {}
        )
        committed, end_offset = offsets.get(number), partition.high_watermark
        if committed is not None:
            offset = committed.offset
        elif reader is None:
            return None
        elif (sought := reader.position(topic_id_partition)) is not None:
            offset = sought
        elif reader.config.auto_offset_reset == "earliest":
            offset = partition.log_start_offset
        else:
            offset = end_offset
        topic_partition = TopicPartition(topic.name, number)
        seconds = self._times.seconds(topic, number, offset)
        return Lag(topic_partition, offset, end_offset, reader, committed is not None, seconds)

    async def slices(self) -> AsyncIterator[list[Lag]]:
        """Yield all lags, at most LAGS_AT_ONCE in a list."""
        committed, slices = self._broker.state.committed_offsets, Slices()
        for topic_id in list(committed.of_group(self._group_id).keys() | self._read.keys()):
            numbers = list(self._numbers(topic_id))
            for first in range(0, len(numbers), LAGS_AT_ONCE):
                await slices.pause()
                topic = self._broker.state.topic_of_id(topic_id)  # it may be deleted meanwhile
                if topic is None or not self._may_describe(topic.name):
                    break
                batch = numbers[first : first + LAGS_AT_ONCE]
                yield [lag for number in batch if (lag := self._lag(topic, number)) is not None]

    async def look(self, reads_max: int = LOOKS) -> None:
        """Read the times of at most so many sealed records, for lags in seconds (LagTimes)."""
        unread: list[Unread] = []
        async for lags in self.slices():
            unread += (lag.unread for lag in lags if lag.seconds is None)
            if len(unread) >= reads_max:
                break
        await self._times.look(unread, reads_max)

    async def summary(self) -> LagSummary:
        """Return the sum and the maximum of the lags."""
        summary = LagSummary()
        async for lags in self.slices():
            for lag in lags:
                summary.add(lag)
        return summary

    def _numbers(self, topic_id: str) -> Collection[int]:
        """Return the topic's partitions with a committed offset or with a member that reads."""
        committed = self._broker.state.committed_offsets.of_group(self._group_id).get(topic_id, {})
        read = self._read.get(topic_id, ())
        return committed.keys() | read if read else committed.keys()


class TotalLag(NamedTuple):
    """The sum of the lags of a group in all its partitions, and the largest one."""

    total: int
    largest: int
    seconds: float | None = None
    """The age (s) of the oldest unread record, None if it is known in no partition."""


class LagTotals:
    """The lags of all groups, read for /metrics and for the lag history.

    The fields have the result of the last reading. Owned by one event loop.
    """

    def __init__(self, broker: Broker) -> None:
        self.partitions = 0
        """Number of lags of all groups. The first SERIES_MAX lags are in `series`."""
        self.series: list[tuple[tuple[str, str, str], float]] = []
        """((group, topic, partition), lag)"""
        self.groups: dict[str, TotalLag] = {}
        """By group. The first METRIC_GROUPS_MAX groups have a key of their own; all others together
        have the key OTHER_GROUPS."""
        self.topics: dict[tuple[str, str], int] = {}
        """By group and topic, for the first HISTORIES_MAX pairs."""
        self.times = LagTimes(broker)
        self._unread: list[Unread] = []
        self._broker = broker
        self._lock = asyncio.Lock()
        self._rests_until_s = 0.0

    async def refresh(self) -> None:
        """Read all lags, unless the time after the last reading (REST_S) has not passed yet."""
        async with self._lock:
            if self._broker.clock.boot_s() < self._rests_until_s:
                return
            totals = LagTotals(self._broker)
            async for group_id in sliced(group_ids(self._broker)):
                lags = await GroupLags.of(self._broker, group_id, any_topic, self.times)
                await totals._add(group_id, lags)
            self._unread = totals._unread
            self.partitions, self.series = totals.partitions, totals.series
            self.groups, self.topics = totals.groups, totals.topics
            if self.partitions > FEW_PARTITIONS:
                self._rests_until_s = self._broker.clock.boot_s() + REST_S * self.partitions

    async def refresh_and_look(self) -> None:
        """Read all lags, then some sealed records for lags in seconds, for one request."""
        await self.refresh()
        await self.look(LOOKS)

    async def look(self, reads_max: int) -> None:
        """Read at most so many sealed records for lags in seconds that the last reading lacked."""
        await self.times.look(self._unread, reads_max)

    async def _add(self, group_id: str, lags: GroupLags) -> None:
        label = group_id if len(self.groups) < METRIC_GROUPS_MAX else OTHER_GROUPS
        summary = LagSummary()
        async for batch in lags.slices():
            for lag in batch:
                summary.add(lag)
                if lag.seconds is None and len(self._unread) < UNREAD_MAX:
                    self._unread.append(lag.unread)
            remaining_series = SERIES_MAX - len(self.series)
            for lag in islice(batch, max(remaining_series, 0)):
                labels = (group_id, lag.partition.topic, str(lag.partition.partition))
                self.series.append((labels, lag.lag))
        self.partitions += summary.partitions
        total_lag = self.groups.get(label, TotalLag(0, 0))
        largest = 0 if summary.largest is None else summary.largest.lag
        self.groups[label] = TotalLag(
            total_lag.total + summary.total,
            max(total_lag.largest, largest),
            oldest(total_lag.seconds, summary.seconds),
        )
        for topic, total in islice(summary.topics.items(), HISTORIES_MAX - len(self.topics)):
            self.topics[group_id, topic] = total
