"""Hot segments: what a broker is filling right now, all partitions mixed; and their closing.

A segment is a list of requests until it closes; closing sorts their records by partition, all at
once, into chunks, and writes down which rows of which chunk are whose. Requests keep their order,
so records of one producer keep theirs. Pure: no loop, no clock, no IO; `encode` may run in a
thread.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, cast

import numpy as np
import pyarrow as pa

from storage import chunk as chunks
from storage import partitioner
from storage.chunk import Rows
from storage.entry import (
    AnyAction,
    Append,
    AssignByHand,
    Chunk,
    Commit,
    CommitOffsets,
    Draft,
    HotMark,
    IdempotencyKey,
    ProducerAppend,
    ProducerBatch,
    Seek,
    Subscribe,
)
from storage.errors import InvalidRequest, LogError, UnknownPartition
from storage.model import Placement
from storage.objectstore import Part
from storage.partitioner import Places
from storage.producers import ProducerEpoch
from storage.state import Outcome, Topic

TRACE: ContextVar[object] = ContextVar("tidelog-trace", default=None)
"""What the request that is being served is called in traces; nothing where there are none."""


@dataclass(slots=True, eq=False)
class PartRows:
    """Records of a request that go to one topic: all to one partition, or each to one of its own.

    `tally` says how many go where, in ascending order of partitions. `batch` says which batch of a
    producer they are; then all go to one partition, and no other part does.
    """

    topic_id: str
    partition: Places
    rows: Rows | pa.RecordBatch
    batch: ProducerBatch | None = None
    tally: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.tally = partitioner.tally(self.partition, chunks.count(self.rows))

    def parted(self) -> list[tuple[int, Rows | pa.RecordBatch]]:
        """The records of each partition."""
        if isinstance(self.partition, int):
            return [(self.partition, self.rows)]
        return list(partitioner.part(_joined([self.rows]), self.partition))


def part_rows(
    topic: Topic,
    places: Places,
    rows: Rows | pa.RecordBatch,
    batch: ProducerBatch | None = None,
) -> PartRows:
    """Rows on their way to a topic; raises UnknownPartition, or InvalidRequest for none."""
    part = PartRows(topic.topic_id, places, rows, batch)
    for partition, count in part.tally:
        if not 0 <= partition < len(topic.partitions):
            raise UnknownPartition(topic.name, partition, len(topic.partitions))
        if not count:
            raise InvalidRequest(f"the request has no record for {topic.name}-{partition}")
    return part


@dataclass(slots=True, eq=False)
class Request:
    """What one caller wants done, all or nothing. `size` is what it counts against the buffer.

    `topic_id` is None when it spans several topics; requests without key or mark that share one
    share a commit, because nothing can refuse one of them and not the others.
    """

    commit_id: bytes
    parts: Sequence[PartRows]
    size: int
    is_json: bool = False
    actions: Sequence[AnyAction] = ()
    key: IdempotencyKey | None = None
    hot: HotMark | None = None
    topic_id: str | None = None
    producer: ProducerEpoch | None = None
    """What an InitProducer came to; `answers` sets it."""
    trace: object = field(default_factory=TRACE.get)
    """Whose request this is, for whoever watches flushes."""
    pieces: int = field(init=False)
    """What of it takes room of its own in an entry's header, ~300 bytes each: itself, every
    partition that its records go to, every offset that it commits."""

    def __post_init__(self) -> None:
        appends = sum(len(part.tally) for part in self.parts)
        self.pieces = 1 + appends + sum(map(_pieces, self.actions))

    @property
    def is_plain(self) -> bool:
        return (
            self.topic_id is not None and self.key is None and self.hot is None and not self.actions
        )


def _pieces(action: AnyAction) -> int:
    match action:
        case CommitOffsets(offsets=offsets):
            return sum(1 + len(each.metadata) // 100 for each in offsets)
        case Subscribe(topics=topics):
            return len(topics)
        case AssignByHand(partitions=partitions):
            return len(partitions)
        case Seek(positions=positions):
            return len(positions)
        case _:
            return 0


@dataclass(slots=True)
class _Column:
    """A chunk to be: how many rows of one partition there are so far."""

    number: int
    topic_id: str
    partition: int
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

    def close(self) -> Commit:
        appends: list[AnyAction] = [
            ProducerAppend(number, first, count, *self.batches[number])
            if number in self.batches
            else Append(number, first, count)
            for number, (first, count) in self.appends.items()
        ]
        return Commit(self.commit_id, [*appends, *self.actions], self.key, self.hot)


class _Share(NamedTuple):
    """A request's place: its commit, and for each part's partitions the chunk and rows."""

    request: Request
    commit: int
    slots: list[tuple[int, int, int]]


class Answer(NamedTuple):
    """What a request is told: placements, one for each partition of each part; or why not."""

    request: Request
    placements: list[Placement]
    error: LogError | None


class Encoded(NamedTuple):
    """A closed segment as a draft, and the batches of its chunks for the tail cache."""

    draft: Draft
    batches: list[pa.RecordBatch]


class ClosedSegment:
    """Requests laid out as chunks and commits."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests
        self._columns: dict[tuple[str, int], _Column] = {}
        self._topics: dict[str, list[PartRows]] = {}
        self._commits: list[_OpenCommit] = []
        self._shares = [self._lay(request) for request in requests]

    def encode(self, codec: str) -> Encoded:
        """Chunks and commits for the WAL. Costs CPU; touches nothing shared."""
        headers: list[Chunk] = []
        bodies: list[Part] = []
        batches: list[pa.RecordBatch] = []
        position = 0
        sorted_by = {topic_id: _sorted(parts) for topic_id, parts in self._topics.items()}
        for column in self._columns.values():
            batch = sorted_by[column.topic_id][column.partition]
            encoded = chunks.encode(batch, codec)
            headers.append(
                Chunk(
                    topic_id=column.topic_id,
                    partition=column.partition,
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
        return Encoded(Draft([c.close() for c in self._commits], headers, bodies), batches)

    def answers(self, outcomes: Sequence[Outcome]) -> list[Answer]:
        """Each request's share of what became of the commits."""
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

    def applied_runs(self, outcomes: Sequence[Outcome]) -> list[tuple[int, int, int, Placement]]:
        """(chunk number, first row, row count, placement) of what became part of the log, in
        order."""
        return [
            (number, first, count, placement)
            for commit, outcome in zip(self._commits, outcomes, strict=True)
            if outcome.refusal is None and not outcome.is_duplicate
            for nth, ((number, (first, count)), placement) in enumerate(
                zip(commit.appends.items(), outcome.placements, strict=True)
            )
            if nth not in outcome.repeated
        ]

    def _answer(self, share: _Share, outcome: Outcome, bases: dict[int, Placement]) -> Answer:
        share.request.producer = outcome.producer
        if outcome.refusal is not None:
            return Answer(share.request, [], outcome.refusal)
        if outcome.is_duplicate:
            return Answer(share.request, outcome.placements, None)
        appends = self._commits[share.commit].appends
        placements = [
            Placement(
                bases[number].topic,
                bases[number].partition,
                bases[number].base_offset + first - appends[number][0],
                count,
            )
            for number, first, count in share.slots
        ]
        return Answer(share.request, placements, None)

    def _lay(self, request: Request) -> _Share:
        commit = self._commit_for(request)
        slots = []
        for part in request.parts:
            self._topics.setdefault(part.topic_id, []).append(part)
            for partition, count in part.tally:
                column = self._columns.get((part.topic_id, partition))
                if column is None:
                    column = _Column(len(self._columns), part.topic_id, partition)
                    self._columns[part.topic_id, partition] = column
                slots.append((column.number, column.rows, count))
                append = commit.appends.get(column.number)
                if append is None:
                    commit.appends[column.number] = [column.rows, count]
                else:
                    append[1] += count  # nobody else's rows came between: the commit is the last
                if part.batch is not None:
                    commit.batches[column.number] = part.batch
                column.rows += count
                column.is_json = column.is_json and request.is_json
        return _Share(request, len(self._commits) - 1, slots)

    def _commit_for(self, request: Request) -> _OpenCommit:
        if self._commits and request.is_plain:
            last = self._commits[-1]
            if last.plain_topic_id == request.topic_id:
                return last
        commit = _OpenCommit(
            request.commit_id,
            {},
            {},
            request.actions,
            request.key,
            request.hot,
            request.topic_id if request.is_plain else None,
        )
        self._commits.append(commit)
        return commit


def _sorted(parts: Sequence[PartRows]) -> dict[int, pa.RecordBatch]:
    """A topic's records by partition; those of one in the order of the parts.

    All at once: parting each request's records alone would cost as much for each as this does for
    all, and leave six times as many pieces to join.
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
    # Few records each, as most requests have: one batch, to be cut, costs less than one for each.
    batch = chunks.batch_of_rows([few for found in rows.values() for few in found])  # type: ignore[misc]
    counts = ((which, sum(map(chunks.count, found))) for which, found in rows.items())
    return dict(partitioner.cut(batch, counts))


def _placed(part: PartRows) -> partitioner.Ints:
    if isinstance(part.partition, int):
        return np.full(chunks.count(part.rows), part.partition)
    return np.asarray(part.partition)


def _joined(found: Sequence[Rows | pa.RecordBatch]) -> pa.RecordBatch:
    """Everything in order; neighbouring lists become one array."""
    batches: list[pa.RecordBatch] = []
    for is_few, neighbours in groupby(found, key=lambda rows: isinstance(rows, Rows)):
        if is_few:
            batches.append(chunks.batch_of_rows(cast("list[Rows]", list(neighbours))))
        else:
            batches += cast("list[pa.RecordBatch]", list(neighbours))
    return chunks.concat(batches)
