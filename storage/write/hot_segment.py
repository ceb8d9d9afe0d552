"""Hot segments: the requests of all partitions that one flush commits, as chunks and commits.

For each request, a closed segment notes which rows of which chunks get the request's records.
`encode` then sorts all records into the chunks at once. Requests keep their order, so the records
of one producer also keep their order. `answers` finds the response to each request in the outcomes
of the commits. Pure: no event loop, no clock, no IO; `encode` may run in a thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from tidelog.storage.codec import batches_as_sent, partitioner, record_columns
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec.batches_as_sent import Records
from tidelog.storage.codec.chunk import EncodedChunk
from tidelog.storage.codec.entry import Commit, Draft, HotMark, IdempotencyKey
from tidelog.storage.codec.record_batch import Batch
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.actions import (
    AnyAction,
    Append,
    Chunk,
    ProducerAppend,
    ProducerBatch,
)
from tidelog.storage.core.model import AppendedRange, Part
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.write.requests import AppendRequest, AppendResponse, TopicRecords, joined

ENCODE_INLINE_BYTES = 2 * 1024 * 1024
"""Smaller segments are encoded on the event loop, in ~250 us a MiB. A thread would not be faster:
its waits for the interpreter's lock, after each call of Arrow, take as long as the encoding."""
ENCODE_INLINE_CHUNKS = 500
"""A segment of more chunks is encoded in a thread: each chunk takes ~15 us."""


@dataclass(slots=True)
class _FutureChunk:
    """A future chunk: the number of rows of one partition so far.

    `kept` has the record batches of Kafka producers, in order; a chunk has either them or other
    rows.
    """

    number: int
    kept: list[Batch] = field(default_factory=list)
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
    """A request and the number of its commit.

    `slots` has (chunk, first row, row count) for each partition of each part.
    """

    request: AppendRequest
    commit: int
    slots: list[tuple[int, int, int]]


class EncodedDraft(NamedTuple):
    """A closed segment as a draft, and the records of its chunks for the tail cache."""

    draft: Draft
    records: list[Records]


class ClosedSegment:
    """A closed hot segment: requests arranged into chunks and commits."""

    def __init__(self, requests: Sequence[AppendRequest], new_id: Callable[[], bytes]) -> None:
        self._new_id = new_id
        self._columns: dict[tuple[str, int, bool], _FutureChunk] = {}
        self._topics: dict[str, list[TopicRecords]] = {}
        self._commits: list[_OpenCommit] = []
        self._header_bytes = sum([request.header_bytes for request in requests])
        self._bytes = sum([request.size for request in requests])
        self._shares = [self._lay(request) for request in requests]

    @property
    def is_small(self) -> bool:
        """Whether `encode` may run on the event loop."""
        return self._bytes < ENCODE_INLINE_BYTES and len(self._columns) <= ENCODE_INLINE_CHUNKS

    def encode(self, codec: str) -> EncodedDraft:
        """Encode chunks and commits for the WAL. Needs CPU; changes no shared state."""
        headers: list[Chunk] = []
        bodies: list[Part] = []
        records: list[Records] = []
        position = 0
        sorted_by = {topic_id: _sorted(parts) for topic_id, parts in self._topics.items()}
        for (topic_id, partition, is_kept), column in self._columns.items():
            encoded: EncodedChunk
            if is_kept:
                encoded, batches = batches_as_sent.encode(column.kept)
                records.append(batches)
            else:
                batch = sorted_by[topic_id][partition]
                encoded = chunks.encode(batch, codec)
                records.append(batch)
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
            position += len(encoded.body)
        commits = [commit.close() for commit in self._commits]
        draft = Draft(commits, headers, bodies, header_bytes=self._header_bytes)
        return EncodedDraft(draft, records)

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
        """Return (chunk number, first row, row count, range) of applied appends, in order."""
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
            is_kept = isinstance(part.rows, Batch)
            if not is_kept:
                self._topics.setdefault(part.topic_id, []).append(part)
            for partition, count in part.tally:
                place = part.topic_id, partition, is_kept
                column = self._columns.get(place)
                if column is None:
                    column = self._columns[place] = _FutureChunk(len(self._columns))
                if isinstance(part.rows, Batch):
                    column.kept.append(part.rows)
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
        everything = joined([part.columns for part in parts])
        places = np.concatenate([_placed(part) for part in parts])
        return dict(partitioner.part(everything, places))
    rows: dict[int, list[Rows | pa.RecordBatch]] = {}
    for part in parts:
        rows.setdefault(part.tally[0][0], []).append(part.columns)
    if any(isinstance(part.rows, pa.RecordBatch) for part in parts):
        return {partition: joined(pieces) for partition, pieces in rows.items()}
    # Most requests have few records, so one batch that is cut is cheaper than one batch per
    # request.
    batch = record_columns.batch_of_rows([few for pieces in rows.values() for few in pieces])  # type: ignore[misc]
    counts = ((which, sum(map(record_columns.count, pieces))) for which, pieces in rows.items())
    return dict(partitioner.cut(batch, counts))


def _placed(part: TopicRecords) -> partitioner.Ints:
    if isinstance(part.partition, int):
        return np.full(record_columns.count(part.columns), part.partition)
    return np.asarray(part.partition)
