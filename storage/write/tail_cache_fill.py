"""The step after a commit that puts its records into the tail cache.

Most reads are of the newest records.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tidelog.storage.core.model import AppendedRange
from tidelog.storage.read.reader import Reader
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.write.hot_segment import ClosedSegment, EncodedDraft


class CommittedTail:
    """Puts committed records into the reader's tail cache.

    `state` returns the newest cluster state, which has the commit.
    """

    def __init__(self, reader: Reader, state: Callable[[], ClusterState]) -> None:
        self._reader = reader
        self._state = state

    def add(
        self, segment: ClosedSegment, encoded: EncodedDraft, outcomes: Sequence[Outcome]
    ) -> None:
        state = self._state()
        for run in _runs(segment.applied_appends(outcomes)):
            chunk = encoded.draft.chunks[run.chunk]
            if (topic := state.topic_of_id(chunk.topic_id)) is None:
                continue
            partition = topic.partitions[chunk.partition]
            if (index := partition.tail_index(run.base_offset)) < 0:
                continue  # a seal has removed these records from the tail
            self._reader.close_gap(topic, chunk.partition, run.base_offset)
            records = encoded.records[run.chunk].slice(run.first_row, run.count)
            assert records is not None, "an append has whole batches"
            self._reader.tail.add(
                (topic.topic_id, chunk.partition),
                run.base_offset,
                records,
                is_json=chunk.is_json,
                nbytes=chunk.raw_size * run.count // chunk.rows,
                append_ms=partition.tail[index].append_ms,
            )


class _Run(NamedTuple):
    """Rows of a chunk that have consecutive offsets."""

    chunk: int
    first_row: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which no code calls
    base_offset: int


def _runs(appends: Iterable[tuple[int, int, int, AppendedRange]]) -> Iterator[_Run]:
    """Join appends that follow each other in their chunk and in the partition.

    Yield the runs of a partition in the order of their offsets.
    """
    last: dict[tuple[str, int], _Run] = {}
    for number, first, count, placement in appends:
        topic_partition = placement.topic, placement.partition
        run, base_offset = last.get(topic_partition), placement.base_offset
        if run is not None:
            next_start = run.chunk, run.first_row + run.count, run.base_offset + run.count
            if next_start == (number, first, base_offset):
                last[topic_partition] = run._replace(count=run.count + count)
                continue
            yield run
        last[topic_partition] = _Run(number, first, count, base_offset)
    yield from last.values()
