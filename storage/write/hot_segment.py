"""Hot segments: requests of all partitions that a broker collects, and their encoding when closed.

An open segment is a list of requests. A closed segment assigns to each request its rows of the
chunks, by partition. `encode` then sorts all records into the chunks at once. Requests keep their
order, so the records of one producer also keep their order. Pure: no loop, no clock, no IO;
`encode` may run in a thread.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, cast

import msgspec
import numpy as np
import pyarrow as pa

from tidelog.storage.core import chunk as chunks
from tidelog.storage.core import murmur2_columns, partitioner
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    Chunk,
    ProducerAppend,
    ProducerBatch,
)
from tidelog.storage.core.chunk import Rows
from tidelog.storage.core.entry import (
    Commit,
    Draft,
    HotMark,
    IdempotencyKey,
    draft_header_bytes_max,
)
from tidelog.storage.core.errors import (
    InvalidRequest,
    InvalidTimestamp,
    LogError,
    RecordTooLarge,
    UnknownPartition,
)
from tidelog.storage.core.model import AppendedRange, Part
from tidelog.storage.core.observer import PRINCIPAL, TRACE
from tidelog.storage.core.partitioner import RecordPartitions
from tidelog.storage.core.topic_configs import TopicConfig
from tidelog.storage.state.cluster_state import Topic
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.state.producers import ProducerEpoch

PIECE_HEADER_BYTES = 300
"""Maximum bytes in an entry's header of a commit, without key and actions; also of a chunk and its
append action."""
PART_OVERHEAD_BYTES = 512
"""Memory of each piece of a request in addition to the request's bytes: lists, a future."""
_encoder = msgspec.msgpack.Encoder()


@dataclass(slots=True, eq=False)
class TopicRecords:
    """Records of a request for one topic: all for one partition, or each with its own partition.

    `tally` is (partition, record count), partitions ascending. If `batch` is set, the records are
    that producer batch. They all go to one partition, and no other part of the request has records
    for this partition.
    """

    topic_id: str
    partition: RecordPartitions
    rows: Rows | pa.RecordBatch
    batch: ProducerBatch | None = None
    tally: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tally = partitioner.tally(self.partition, chunks.count(self.rows))

    def parted(self) -> list[tuple[int, Rows | pa.RecordBatch]]:
        if isinstance(self.partition, int):
            return [(self.partition, self.rows)]
        return list(partitioner.part(_joined([self.rows]), self.partition))


def part_rows(
    topic: Topic,
    places: RecordPartitions,
    rows: Rows | pa.RecordBatch,
    batch: ProducerBatch | None = None,
) -> TopicRecords:
    """Make TopicRecords. Raises UnknownPartition; InvalidRequest for a partition without
    records."""
    part = TopicRecords(topic.topic_id, places, rows, batch)
    for partition, count in part.tally:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownPartition(topic.name, partition, len(topic.partitions))
        if not count:
            raise InvalidRequest(f"the request has no record for {topic.name}-{partition}")
    return part


def check_timestamps(
    topic: str, rows: Rows | pa.RecordBatch, config: TopicConfig, now_ms: int
) -> None:
    """Raise InvalidTimestamp for the first record whose timestamp is too far from `now_ms`, as
    Kafka does. If the topic has LogAppendTime, check nothing: its records get the time of their
    entry."""
    if config.is_log_append_time:
        return
    low = now_ms - config.message_timestamp_before_max_ms
    high = now_ms + config.message_timestamp_after_max_ms
    if isinstance(rows, Rows):
        stamps = rows.timestamps
        if max(stamps, default=now_ms) <= high and (low <= 0 or min(stamps, default=low) >= low):
            return
    else:
        stamps_us = chunks.timestamps_us(rows.column("timestamp"))
        if not len(stamps_us) or (
            int(stamps_us.max()) <= high * chunks.US_PER_MS
            and (low <= 0 or int(stamps_us.min()) >= low * chunks.US_PER_MS)
        ):
            return
        stamps = (stamps_us // chunks.US_PER_MS).tolist()
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
    """One caller's atomic request. `size` in bytes counts against the buffer limit: the caller's
    number or the unpacked size, whichever is larger, plus key, actions and principal.

    Raises InvalidRequest if the actions cannot be encoded.

    `topic_id` is None if the request spans several topics. Consecutive requests of one topic and
    principal share a commit if they have no key, hot mark or actions. No check in `apply` can
    refuse only some of them.
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
    pieces: int = field(init=False)
    """1 for the request and 1 for each partition of its records. A piece takes memory and header
    items."""
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
        unpacked = sum(
            part.rows.nbytes for part in self.parts if isinstance(part.rows, pa.RecordBatch)
        )
        self.size = max(self.size, unpacked) + named

    @property
    def cost(self) -> int:
        """The bytes of memory that the request takes in the write buffer."""
        return self.size + PART_OVERHEAD_BYTES * self.pieces

    def partitions(self) -> Iterator[tuple[str, int]]:
        """Iterate over the partitions of its records: topic id and number."""
        for part in self.parts:
            for partition, _ in part.tally:
                yield part.topic_id, partition

    def check_size(self) -> None:
        """Raise RecordTooLarge if no reader would accept an entry with this request alone."""
        for size, bytes_max, what in (
            (self.size, chunks.RAW_SIZE_MAX, "unpacked bytes"),
            (self.header_bytes, draft_header_bytes_max(), "bytes in the header of an entry"),
        ):
            if size > bytes_max:
                why = f"the request has {size} {what}, the limit is {bytes_max}: send it in parts"
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
        raise InvalidRequest(f"it cannot be stored: {error}") from error


@dataclass(slots=True)
class _Column:
    """A future chunk: the number of rows of one partition so far."""

    number: int
    rows: int = 0
    is_json: bool = True


@dataclass(slots=True)
class _OpenCommit:
    commit_id: bytes
    appends: dict[int, list[int]]
    batches: dict[int, ProducerBatch]
    actions: Sequence[AnyAction]
    key: IdempotencyKey | None
    hot: HotMark | None
    plain_topic_id: str | None
    principal: str

    def close(self) -> Commit:
        appends: list[AnyAction] = [
            ProducerAppend(number, first, count, *self.batches[number])
            if number in self.batches
            else Append(number, first, count)
            for number, (first, count) in self.appends.items()
        ]
        actions = [*appends, *self.actions]
        return Commit(self.commit_id, actions, self.key, self.hot, self.principal)


class _CommitShare(NamedTuple):
    """A request and the number of its commit. `slots` has (chunk, first row, row count) for each
    partition of each part."""

    request: AppendRequest
    commit: int
    slots: list[tuple[int, int, int]]


class AppendResponse(NamedTuple):
    """The result of a request: a placement for each partition of each part, or an error."""

    request: AppendRequest
    placements: list[AppendedRange]
    error: LogError | None


class EncodedDraft(NamedTuple):
    """A closed segment as a draft, and the batches of its chunks for the tail cache."""

    draft: Draft
    batches: list[pa.RecordBatch]


class ClosedSegment:
    """A closed hot segment: requests arranged into chunks and commits."""

    def __init__(self, requests: Sequence[AppendRequest], new_id: Callable[[], bytes]) -> None:
        self._new_id = new_id
        self._columns: dict[tuple[str, int], _Column] = {}
        self._topics: dict[str, list[TopicRecords]] = {}
        self._commits: list[_OpenCommit] = []
        self._header_bytes = sum([request.header_bytes for request in requests])
        self._shares = [self._lay(request) for request in requests]

    def encode(self, codec: str) -> EncodedDraft:
        """Encode chunks and commits for the WAL. Needs CPU; changes no shared state."""
        headers: list[Chunk] = []
        bodies: list[Part] = []
        batches: list[pa.RecordBatch] = []
        position = 0
        sorted_by = {topic_id: _sorted(parts) for topic_id, parts in self._topics.items()}
        for (topic_id, partition), column in self._columns.items():
            batch = sorted_by[topic_id][partition]
            encoded = chunks.encode(batch, codec)
            headers.append(
                Chunk(
                    topic_id=topic_id,
                    partition=partition,
                    position=position,
                    size=len(encoded.body),
                    crc32c=encoded.crc32c,
                    rows=encoded.rows,
                    timestamp_min=encoded.timestamp_min,
                    timestamp_max=encoded.timestamp_max,
                    is_json=column.is_json,
                    codec=encoded.codec,
                    raw_size=encoded.raw_size,
                )
            )
            bodies.append(encoded.body)
            batches.append(batch)
            position += len(encoded.body)
        commits = [commit.close() for commit in self._commits]
        draft = Draft(commits, headers, bodies, header_bytes=self._header_bytes)
        return EncodedDraft(draft, batches)

    def answers(self, outcomes: Sequence[Outcome]) -> list[AppendResponse]:
        bases = [
            dict(zip(commit.appends, outcome.placements, strict=True))
            if outcome.refusal is None and not outcome.is_duplicate
            else {}
            for commit, outcome in zip(self._commits, outcomes, strict=True)
        ]
        return [
            self._answer(share, outcomes[share.commit], bases[share.commit])
            for share in self._shares
        ]

    def applied_appends(
        self, outcomes: Sequence[Outcome]
    ) -> list[tuple[int, int, int, AppendedRange]]:
        """Return (chunk number, first row, row count, placement) of applied appends, in order."""
        return [
            (number, first, count, placement)
            for commit, outcome in zip(self._commits, outcomes, strict=True)
            if outcome.refusal is None and not outcome.is_duplicate
            for nth, ((number, (first, count)), placement) in enumerate(
                zip(commit.appends.items(), outcome.placements, strict=True)
            )
            if nth not in outcome.repeated
        ]

    def _answer(
        self, share: _CommitShare, outcome: Outcome, bases: dict[int, AppendedRange]
    ) -> AppendResponse:
        share.request.producer = outcome.producer
        if outcome.refusal is not None:
            return AppendResponse(share.request, [], outcome.refusal)
        if outcome.is_duplicate:
            return AppendResponse(share.request, outcome.placements, None)
        appends = self._commits[share.commit].appends
        placements = [
            AppendedRange(
                bases[number].topic,
                bases[number].partition,
                bases[number].base_offset + first - appends[number][0],
                count,
            )
            for number, first, count in share.slots
        ]
        return AppendResponse(share.request, placements, None)

    def _lay(self, request: AppendRequest) -> _CommitShare:
        commit = self._commit_for(request)
        slots = []
        for part in request.parts:
            self._topics.setdefault(part.topic_id, []).append(part)
            for partition, count in part.tally:
                column = self._columns.get((part.topic_id, partition))
                if column is None:
                    column = _Column(len(self._columns))
                    self._columns[part.topic_id, partition] = column
                slots.append((column.number, column.rows, count))
                append = commit.appends.get(column.number)
                if append is None:
                    commit.appends[column.number] = [column.rows, count]
                else:
                    append[1] += count  # rows are adjacent: only the last commit gets new rows
                if part.batch is not None:
                    commit.batches[column.number] = part.batch
                column.rows += count
                column.is_json = column.is_json and request.is_json
        return _CommitShare(request, len(self._commits) - 1, slots)

    def _commit_for(self, request: AppendRequest) -> _OpenCommit:
        if self._commits and request.is_plain:
            last = self._commits[-1]
            is_same = last.principal == request.principal
            if is_same and last.plain_topic_id == request.topic_id:
                return last
        request.commit_id = request.commit_id or self._new_id()
        commit = _OpenCommit(
            request.commit_id,
            {},
            {},
            request.actions,
            request.key,
            request.hot,
            request.topic_id if request.is_plain else None,
            request.principal,
        )
        self._commits.append(commit)
        return commit


def _sorted(parts: Sequence[TopicRecords]) -> dict[int, pa.RecordBatch]:
    """Group a topic's records by partition, in the order of the parts.

    Groups all requests at once. To group one request alone costs as much as to group all requests
    at once. To group each request alone would also leave six times as many batches to join.
    """
    if not all(isinstance(part.partition, int) for part in parts):
        everything = _joined([part.rows for part in parts])
        places = np.concatenate([_placed(part) for part in parts])
        return dict(partitioner.part(everything, places))
    rows: dict[int, list[Rows | pa.RecordBatch]] = {}
    for part in parts:
        rows.setdefault(part.tally[0][0], []).append(part.rows)
    if any(isinstance(part.rows, pa.RecordBatch) for part in parts):
        return {partition: _joined(found) for partition, found in rows.items()}
    # Most requests have few records, so one batch that is cut is cheaper than one batch per
    # request.
    batch = chunks.batch_of_rows([few for found in rows.values() for few in found])  # type: ignore[misc]
    counts = ((which, sum(map(chunks.count, found))) for which, found in rows.items())
    return dict(partitioner.cut(batch, counts))


def _placed(part: TopicRecords) -> murmur2_columns.Ints:
    if isinstance(part.partition, int):
        return np.full(chunks.count(part.rows), part.partition)
    return np.asarray(part.partition)


def _joined(found: Sequence[Rows | pa.RecordBatch]) -> pa.RecordBatch:
    """Join all records in order; adjacent lists of rows become one batch."""
    batches: list[pa.RecordBatch] = []
    for is_few, neighbours in groupby(found, key=lambda rows: isinstance(rows, Rows)):
        if is_few:
            batches.append(chunks.batch_of_rows(cast("list[Rows]", list(neighbours))))
        else:
            batches += cast("list[pa.RecordBatch]", list(neighbours))
    return chunks.concat(batches)
