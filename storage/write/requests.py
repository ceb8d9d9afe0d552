"""Append requests: their records by topic, their checks and sizes, and their responses. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, cast

import msgspec
import pyarrow as pa

from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import partitioner, record_columns
from tidelog.storage.codec.entry import HotMark, IdempotencyKey, draft_header_bytes_max
from tidelog.storage.codec.partitioner import RecordPartitions
from tidelog.storage.codec.record_batch import Batch
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import (
    AnyAction,
    ProducerBatch,
)
from tidelog.storage.core.errors import (
    InvalidRequest,
    InvalidTimestamp,
    LogError,
    RecordTooLarge,
    UnknownPartition,
)
from tidelog.storage.core.model import AppendedRange
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.runtime.request_context import PRINCIPAL, TRACE
from tidelog.storage.state.producers import ProducerEpoch
from tidelog.storage.state.topic import Topic

PIECE_HEADER_BYTES = 300
"""Maximum number of bytes that a commit without its key and actions takes in an entry's header. A
chunk with its append action takes at most as many, too."""
PART_OVERHEAD_BYTES = 512
"""Bytes of memory that each piece of a request takes in addition to the request's `size`: lists, a
future."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True, eq=False)
class TopicRecords:
    """Records of a request for one topic: all for one partition, or each with its own partition.

    `tally` is (partition, record count), partitions ascending. If `batch` is set, the records are
    that producer batch. They all go to one partition, and no other part of the request has records
    for this partition. `rows` is a record batch of a Kafka producer (Batch) if the chunk keeps it
    as it came; it also goes to one partition.
    """

    topic_id: str
    partition: RecordPartitions
    rows: Rows | pa.RecordBatch | Batch
    batch: ProducerBatch | None = None
    tally: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        if isinstance(self.rows, Batch):
            assert isinstance(self.partition, int), "a record batch goes to one partition"
            self.tally = [(self.partition, self.rows.count)]
        else:
            self.tally = partitioner.tally(self.partition, record_columns.count(self.rows))

    @property
    def columns(self) -> Rows | pa.RecordBatch:
        """The records of a part that is no record batch of a Kafka producer."""
        assert not isinstance(self.rows, Batch), "a record batch is kept as it came"
        return self.rows

    def parted(self) -> list[tuple[int, Rows | pa.RecordBatch]]:
        if isinstance(self.partition, int):
            return [(self.partition, self.columns)]
        return list(partitioner.part(joined([self.columns]), self.partition))


def part_rows(
    topic: Topic,
    places: RecordPartitions,
    rows: Rows | pa.RecordBatch | Batch,
    batch: ProducerBatch | None = None,
) -> TopicRecords:
    """Make TopicRecords.

    Raises UnknownPartition; InvalidRequest for a partition without records.
    """
    part = TopicRecords(topic.topic_id, places, rows, batch)
    for partition, count in part.tally:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownPartition(topic.name, partition, len(topic.partitions))
        if not count:
            raise InvalidRequest(f"the request has no record for {topic.name}-{partition}")
    return part


def check_timestamps(
    topic: str, rows: Rows | pa.RecordBatch | Batch, config: TopicConfig, now_ms: int
) -> None:
    """Raise InvalidTimestamp for the first record whose timestamp is too far from `now_ms`.

    Kafka does the same. If the topic has LogAppendTime, check nothing, because its records get the
    time of their entry.
    """
    if config.is_log_append_time:
        return
    low = now_ms - config.message_timestamp_before_max_ms
    high = now_ms + config.message_timestamp_after_max_ms
    if isinstance(rows, Rows):
        stamps = rows.timestamps
        if max(stamps, default=now_ms) <= high and (low <= 0 or min(stamps, default=low) >= low):
            return
    elif isinstance(rows, Batch):
        stamps = [rows.timestamp_min, rows.timestamp_max]
    else:
        stamps_us = chunks.timestamps_us(rows.column("timestamp"))
        if not len(stamps_us) or (
            int(stamps_us.max()) <= high * record_columns.US_PER_MS
            and (low <= 0 or int(stamps_us.min()) >= low * record_columns.US_PER_MS)
        ):
            return
        stamps = (stamps_us // record_columns.US_PER_MS).tolist()
    for index, stamp in enumerate(stamps):
        if not low <= stamp <= high:
            side, limit = ("after", high - now_ms) if stamp > high else ("before", now_ms - low)
            raise InvalidTimestamp(
                f"record {index} for topic {topic!r} has timestamp {stamp}, "
                f"{abs(stamp - now_ms)} ms {side} the broker's time: the topic's "
                f"message.timestamp.{side}.max.ms is {limit}"
            )


@dataclass(slots=True, eq=False)
class AppendRequest:
    """One caller's atomic request.

    `size` in bytes counts against the buffer limit. The caller gives as `size` the greatest of
    three numbers: the weight of the records (chunk.weight), the size of the body, and the memory of
    the records. This class adds the sizes of key, actions and principal.

    Raises InvalidRequest if the actions cannot be encoded.

    `topic_id` is None if the request spans several topics. Consecutive requests of one topic and
    principal share a commit if they have no key, hot mark or actions, because no check in `apply`
    can refuse only some of them.
    """

    parts: Sequence[TopicRecords]
    size: int
    is_json: bool = False
    actions: Sequence[AnyAction] = ()
    key: IdempotencyKey | None = None
    hot: HotMark | None = None
    topic_id: str | None = None
    commit_id: bytes = b""
    """Generated when it is needed: before the request enters the hot log, or when it begins a
    commit. An id for each request would cost a system call per request."""
    producer: ProducerEpoch | None = None
    """The result of an InitProducer action; `answers` sets it."""
    trace: object = field(default_factory=TRACE.get)
    """The request's trace context, for the tracing of flushes."""
    principal: str = field(default_factory=PRINCIPAL.get)
    """The authenticated client. From level 2 on, the commit names it."""
    has_timestamps: bool = True
    """Whether a record may have a timestamp of the client. A timestamp of the broker needs no
    check."""
    linger_s: float | None = None
    """The time that the client allows for the wait before the commit; None: the topics decide."""
    until_s: float = math.inf
    """The boot time until which the request may wait for its commit; infinity without a class."""
    pieces: int = field(init=False)
    """1 for the request and 1 for each partition of its records. Each piece takes memory, and
    elements of an entry's header."""
    header_bytes: int = field(init=False)
    """Maximum bytes that the request adds to an entry's header."""

    def __post_init__(self) -> None:
        self.pieces = 1 + sum(len(part.tally) for part in self.parts)
        named = 0 if self.key is None else _key_bytes(self.key)
        if self.actions:
            named += _action_bytes(self.actions)
        if self.principal:
            named += 4 * len(self.principal)
        self.header_bytes = PIECE_HEADER_BYTES * self.pieces + named
        self.size += named

    @property
    def cost(self) -> int:
        """The bytes of memory that the request takes in the write buffer."""
        return self.size + PART_OVERHEAD_BYTES * self.pieces

    def partitions(self) -> Iterator[tuple[str, int]]:
        """Iterate over the partitions of the request's records: topic id and number."""
        for part in self.parts:
            for partition, _ in part.tally:
                yield part.topic_id, partition

    def chunks(self) -> Iterator[tuple[str, int]]:
        """Iterate over topic ids, and the number of chunks that the request adds there at most."""
        for part in self.parts:
            yield part.topic_id, len(part.tally)

    def check_size(self) -> None:
        """Raise RecordTooLarge if no reader would accept an entry with this request alone."""
        for size, bytes_max, unit in (
            (self.size, chunks.RAW_SIZE_MAX, "unpacked bytes"),
            (self.header_bytes, draft_header_bytes_max(), "bytes in the header of an entry"),
        ):
            if size > bytes_max:
                why = f"the request has {size} {unit}, the limit is {bytes_max}: send it in parts"
                raise RecordTooLarge(why)

    @property
    def is_plain(self) -> bool:
        return (
            self.topic_id is not None and self.key is None and self.hot is None and not self.actions
        )


def _key_bytes(key: IdempotencyKey) -> int:
    """Return the maximum number of the key's bytes in an entry."""
    counts = 1 if isinstance(key.partitions, int) else len(key.partitions)
    return 4 * len(key.key) + len(key.fingerprint) + 9 * counts


def _action_bytes(actions: Sequence[AnyAction]) -> int:
    try:
        return len(_encoder.encode(actions))
    except (UnicodeEncodeError, msgspec.MsgspecError, OverflowError) as error:
        raise InvalidRequest(f"the actions of the request cannot be stored: {error}") from error


class AppendResponse(NamedTuple):
    """The result of a request: an appended range for each partition of each part, or an error."""

    request: AppendRequest
    placements: list[AppendedRange]
    error: LogError | None


def joined(pieces: Sequence[Rows | pa.RecordBatch]) -> pa.RecordBatch:
    """Join all records in order; adjacent lists of rows become one batch."""
    batches: list[pa.RecordBatch] = []
    for is_few, neighbours in groupby(pieces, key=lambda rows: isinstance(rows, Rows)):
        if is_few:
            batches.append(record_columns.batch_of_rows(cast("list[Rows]", list(neighbours))))
        else:
            batches += cast("list[pa.RecordBatch]", list(neighbours))
    return record_columns.concat(batches)
