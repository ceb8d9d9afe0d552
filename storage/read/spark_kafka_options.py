"""The options of Spark's Kafka source, parsed and resolved to offsets. Pure.

Names, JSON and meanings are as in Spark's Structured Streaming + Kafka integration guide, so a
query written for `format("kafka")` means the same here. An invalid option raises InvalidRequest
with the option's name; an unknown topic, partition or offset raises UnknownTopic, UnknownPartition
or OffsetOutOfRange.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidelog.storage.core.errors import (
    InvalidRequest,
    OffsetOutOfRange,
    UnknownPartition,
    UnknownTopic,
)
from tidelog.storage.core.model import TopicPartition
from tidelog.storage.read.log_snapshot import LogSnapshot
from tidelog.storage.read.plan import OffsetRange

LATEST = -1
EARLIEST = -2

PerPartition = dict[str, dict[str, int]]
_WORDS = {"earliest": EARLIEST, "latest": LATEST}
_OFFSETS = msgspec.json.Decoder(PerPartition)
_ASSIGNED = msgspec.json.Decoder(dict[str, list[int]])


class TopicSelection(NamedTuple):
    """The selected topics, given as names, as a pattern, or as names with partitions."""

    names: Sequence[str] = ()
    pattern: str | None = None
    assigned: Mapping[str, Sequence[int]] | None = None

    def topics(self) -> "Sequence[str] | re.Pattern[str]":
        return self.names if self.pattern is None else re.compile(self.pattern)

    def partitions(self, snapshot: LogSnapshot) -> list[TopicPartition]:
        """Return the partitions, sorted by topic and number. Raises UnknownPartition."""
        if self.assigned is None:
            return snapshot.all_partitions()
        topic_partitions = [
            TopicPartition(name, n) for name, ns in self.assigned.items() for n in set(ns)
        ]
        for name, number in topic_partitions:
            count = len(snapshot.topics[name].partitions)
            if not 0 <= number < count:
                raise UnknownPartition(name, number, count)
        return sorted(topic_partitions)


class Boundary(NamedTuple):
    """The start or end of a read, from the options. Exactly one field is set. Times are in ms."""

    everywhere: int | None = None
    offsets: Mapping[TopicPartition, int] | None = None
    timestamp: int | None = None
    timestamps: Mapping[TopicPartition, int] | None = None

    def time_at(self, of: TopicPartition) -> int | None:
        """Return the time that sets the partition's boundary, or None if an offset sets it."""
        return self.timestamp if self.timestamps is None else self.timestamps.get(of)

    def named(self) -> Mapping[TopicPartition, int] | None:
        return self.timestamps if self.offsets is None else self.offsets


Found = Mapping[tuple[TopicPartition, int], int | None]
"""The first offset at or after a time, by (partition, time in ms). None if no record is that
late."""


class OffsetSpan(NamedTuple):
    """Both boundaries of a read.

    If no record is at or after the start time, `is_latest_without_match` lets the read start at the
    partition's end. If `fail_on_data_loss`, an offset below the log start is an error.
    """

    start: Boundary
    end: Boundary = Boundary(everywhere=LATEST)
    is_latest_without_match: bool = False
    fail_on_data_loss: bool = True

    def times(self, partitions: Sequence[TopicPartition]) -> set[tuple[TopicPartition, int]]:
        """Return the (partition, time) pairs to look up before `resolve`."""
        return {
            (of, time)
            for of in partitions
            for boundary in (self.start, self.end)
            if (time := boundary.time_at(of)) is not None
        }


# -- options


def selection_of(options: Mapping[str, str]) -> TopicSelection:
    """Parse `topic`, `subscribe`, `subscribePattern` or `assign`. Keys must be in lower case."""
    option_names = [
        name for name in ("topic", "subscribe", "subscribepattern", "assign") if name in options
    ]
    if len(option_names) != 1:
        raise InvalidRequest(
            "give exactly one of the options topic (or subscribe), subscribePattern and assign, "
            f"not {' and '.join(option_names) or 'none'}"
        )
    text = options[option_names[0]]
    match option_names[0]:
        case "subscribepattern":
            try:
                re.compile(text)
            except re.error as error:
                raise InvalidRequest(f"option subscribePattern: {text!r}: {error}") from error
            return TopicSelection(pattern=text)
        case "assign":
            try:
                assigned = _ASSIGNED.decode(text)
            except msgspec.MsgspecError as error:
                raise InvalidRequest(
                    f'option assign: expected JSON such as {{"logs":[0,1]}}, got {text!r}: {error}'
                ) from error
            return TopicSelection(names=sorted(assigned), assigned=assigned)
        case _:
            names = sorted({name.strip() for name in text.split(",")} - {""})
            if not names:
                raise InvalidRequest(f"option {option_names[0]}: no topic in {text!r}")
            return TopicSelection(names=names)


def span_of(options: Mapping[str, str], *, is_streaming: bool) -> OffsetSpan:
    """Parse both boundaries.

    Keys must be in lower case. By default a batch starts at the earliest offset and a stream at the
    latest. A stream has no end.
    """
    if is_streaming:
        end_options = [name for name in options if name.startswith("ending")]
        if end_options:
            raise InvalidRequest(f"option {end_options[0]} is not for streams: a stream has no end")
    start = _boundary(options, "starting", LATEST if is_streaming else EARLIEST)
    end = _boundary(options, "ending", LATEST)
    if not is_streaming and (
        start.everywhere == LATEST or LATEST in (start.offsets or {}).values()
    ):
        raise InvalidRequest("option startingOffsets: a batch cannot start at the latest offset")
    if end.everywhere == EARLIEST or EARLIEST in (end.offsets or {}).values():
        raise InvalidRequest("option endingOffsets: a batch cannot end at the earliest offset")
    strategy = options.get("startingoffsetsbytimestampstrategy", "error")
    if strategy not in {"error", "latest"}:
        raise InvalidRequest(
            f"option startingOffsetsByTimestampStrategy: must be error or latest, not {strategy!r}"
        )
    return OffsetSpan(
        start, end, strategy == "latest", flag(options, "failOnDataLoss", default=True)
    )


def flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    """Parse true or false; raises InvalidRequest."""
    text = options.get(name.lower(), str(default)).lower()
    if text not in {"true", "false"}:
        raise InvalidRequest(f"option {name}: must be true or false, not {text!r}")
    return text == "true"


def number(options: Mapping[str, str], name: str, *, default: int | None = None) -> int | None:
    """Parse a positive integer; raises InvalidRequest."""
    text = options.get(name.lower())
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise InvalidRequest(f"option {name}: must be a positive integer, not {text!r}")
    return int(text)


def _boundary(options: Mapping[str, str], end: str, default: int) -> Boundary:
    """Parse a boundary. Precedence as in Kafka: a timestamp, offsets by timestamp, offsets."""
    timestamp = options.get(f"{end}timestamp")
    if timestamp is not None:
        if not timestamp.isascii() or not timestamp.isdigit():
            raise InvalidRequest(
                f"option {end}Timestamp: expected milliseconds since the epoch, got {timestamp!r}"
            )
        return Boundary(timestamp=int(timestamp))
    by_time = options.get(f"{end}offsetsbytimestamp")
    if by_time is not None:
        return Boundary(timestamps=_per_partition(by_time, f"{end}OffsetsByTimestamp", least=0))
    text = options.get(f"{end}offsets")
    if text is None:
        return Boundary(everywhere=default)
    word = _WORDS.get(text.strip().lower())
    if word is not None:
        return Boundary(everywhere=word)
    return Boundary(offsets=_per_partition(text, f"{end}Offsets", least=EARLIEST))


def _per_partition(text: str, option: str, *, least: int) -> dict[TopicPartition, int]:
    try:
        decoded = _OFFSETS.decode(text)
        value_by_partition = {
            TopicPartition(topic, int(partition)): value
            for topic, partitions in decoded.items()
            for partition, value in partitions.items()
        }
    except ValueError as error:  # an error of msgspec, or a partition that is no number
        words = "earliest, latest or " if option.endswith("Offsets") else ""
        raise InvalidRequest(
            f'option {option}: expected {words}JSON such as {{"logs":{{"0":23,"1":42}}}}, '
            f"got {text!r}: {error}"
        ) from error
    for of, value in value_by_partition.items():
        if value < least:
            raise InvalidRequest(f"option {option}: {value} for {of} is not a valid value")
    return value_by_partition


# -- offsets


def resolve(
    snapshot: LogSnapshot, partitions: Sequence[TopicPartition], span: OffsetSpan, offsets: Found
) -> list[OffsetRange]:
    """Resolve the span to offsets in the snapshot: one range per partition, which may be empty.

    Raises UnknownTopic, UnknownPartition, InvalidRequest. Raises OffsetOutOfRange for an offset
    after the end. If `fail_on_data_loss`, raises OffsetOutOfRange also for an offset before the log
    start offset.
    """
    _check_named(snapshot, partitions, span.start, "startingOffsets")
    _check_named(snapshot, partitions, span.end, "endingOffsets")
    return [OffsetRange(*of, *_resolve_one(snapshot, of, span, offsets)) for of in partitions]


def _check_named(
    snapshot: LogSnapshot, partitions: Sequence[TopicPartition], boundary: Boundary, option: str
) -> None:
    """Check Kafka's rule: an option with offsets must name exactly the partitions of the read."""
    named = boundary.named()
    if named is None:
        return
    if boundary.timestamps is not None:
        option += "ByTimestamp"
    for topic, partition in sorted(named.keys() - set(partitions)):
        if topic not in snapshot.topics:
            raise UnknownTopic(topic)
        count = len(snapshot.topics[topic].partitions)
        if not 0 <= partition < count:
            raise UnknownPartition(topic, partition, count)
        raise InvalidRequest(f"option {option}: {topic}-{partition} is not selected for the read")
    missing = sorted(set(partitions) - named.keys())
    if missing:
        raise InvalidRequest(
            f"option {option}: must name every partition, but {missing[0]} is missing; "
            "-2 is the earliest offset, -1 is the latest"
        )


def _resolve_one(
    snapshot: LogSnapshot, of: TopicPartition, span: OffsetSpan, offsets: Found
) -> tuple[int, int]:
    high = snapshot.partition(of).high_watermark
    start = _start_of(snapshot, of, span, offsets)
    end_time = span.end.time_at(of)
    if end_time is None:
        offset = _offset_of(span.end, of)
        end = high if offset == LATEST else _checked(snapshot, of, offset, span)
    else:
        first = offsets[of, end_time]
        end = high if first is None else first
    if start > end and span.is_latest_without_match and span.start.time_at(of) is not None:
        return end, end
    if start > end:
        raise InvalidRequest(f"{of} starts at offset {start}, after its end {end}")
    return start, end


def _start_of(snapshot: LogSnapshot, of: TopicPartition, span: OffsetSpan, offsets: Found) -> int:
    view = snapshot.partition(of)
    time = span.start.time_at(of)
    if time is not None:
        first = offsets[of, time]
        if first is not None:
            return first
        if span.is_latest_without_match:
            return view.high_watermark
        raise InvalidRequest(
            f"{of} has no record at or after timestamp {time}: with the option "
            "startingOffsetsByTimestampStrategy = latest, the read starts at the partition's end"
        )
    offset = _offset_of(span.start, of)
    if offset == EARLIEST:
        return view.log_start_offset
    return view.high_watermark if offset == LATEST else _checked(snapshot, of, offset, span)


def _offset_of(boundary: Boundary, of: TopicPartition) -> int:
    if boundary.offsets is not None:
        return boundary.offsets[of]
    assert boundary.everywhere is not None
    return boundary.everywhere


def _checked(snapshot: LogSnapshot, of: TopicPartition, offset: int, span: OffsetSpan) -> int:
    view = snapshot.partition(of)
    low, high = view.log_start_offset, view.high_watermark
    if offset < low and not span.fail_on_data_loss:
        return low
    if not low <= offset <= high:
        raise OffsetOutOfRange(*of, offset, log_start_offset=low, high_watermark=high)
    return offset
