"""Closing a hot segment: the places of rows, and the answer to each request (I2, I4)."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.clock import ManualClock
from tests.support.properties import examples
from tests.support.records import rows
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.chunk import PACK_BYTES_MIN
from tidelog.storage.codec.entry import Draft, Entry, HotMark, IdempotencyKey
from tidelog.storage.codec.partitioner import RecordPartitions
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import format_levels, object_keys
from tidelog.storage.core.actions import CreateTopic, DeleteTopic
from tidelog.storage.core.errors import IdempotencyMismatch, UnknownTopic
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.state.outcome import Outcome
from tidelog.storage.write.hot_segment import ClosedSegment, EncodedDraft
from tidelog.storage.write.requests import AppendRequest, TopicRecords

IDS = ["a" * 32, "b" * 32]
GONE = "c" * 32
NAMES = {IDS[0]: "alpha", IDS[1]: "beta"}


def request(
    clock: ManualClock,
    parts: Sequence[tuple[str, RecordPartitions, Rows | pa.RecordBatch]],
    *,
    key: IdempotencyKey | None = None,
    hot: HotMark | None = None,
    is_json: bool = False,
) -> AppendRequest:
    topics = {topic_id for topic_id, _, _ in parts}
    return AppendRequest(
        [TopicRecords(*part) for part in parts],
        sum(len(part[2]) for part in parts),
        is_json=is_json,
        key=key,
        hot=hot,
        topic_id=topics.pop() if len(topics) == 1 else None,
        commit_id=clock.new_id(),
    )


def with_topics() -> ClusterState:
    state = ClusterState("c")
    clock = ManualClock()
    for topic_id in (*IDS, GONE):
        name = NAMES.get(topic_id, "gone")
        action = CreateTopic(name, topic_id, 3, {})
        apply(
            state, ClosedSegment([AppendRequest((), 0, actions=[action])], clock.new_id).encode("")
        )
    action = DeleteTopic(GONE)
    apply(state, ClosedSegment([AppendRequest((), 0, actions=[action])], clock.new_id).encode(""))
    return state


def apply(state: ClusterState, encoded: EncodedDraft) -> tuple[bytes, list[Outcome]]:
    """The draft as the next entry: the object's bytes, and what became of its commits."""
    draft: Draft = encoded.draft
    entry = Entry(
        format_levels.NEWEST, state.seq + 1, state.hash, b"", "b", 0, draft.chunks, draft.commits
    )
    body = b"".join([entries.encode_header(entry)[0], *draft.bodies])
    key = object_keys.wal(entry.seq)
    decoded = entries.decode(body, key, seq=entry.seq, previous=state.hash)
    return body, state.apply(decoded, key).outcomes


def values(part: Rows | pa.RecordBatch) -> list[bytes | None]:
    return part.values if isinstance(part, Rows) else part.column("value").to_pylist()


def tail_of(state: ClusterState, body: bytes, topic: str, partition: int) -> list[bytes | None]:
    """The values in this one entry's object, by the state's index."""
    record_values: list[bytes | None] = []
    for run in state.partition(topic, partition).tail:
        batch = run.decode(body[run.position : run.position + run.size])
        record_values += batch.slice(run.first_row, run.count).column("value").to_pylist()
    return record_values


class Drawn:
    """Requests of any mixture; each value says which request, part and row it is."""

    def __init__(self, shapes: list[tuple[str, list[tuple[int, int, int]], bool]]) -> None:
        clock = ManualClock()
        self.requests: list[AppendRequest] = []
        for number, (kind, parts, is_batch) in enumerate(shapes):
            request_parts = []
            if kind == "key":  # at most one part a partition, so that a retry's answer fits it
                parts = list({part[:2]: part for part in parts}.values())
            for position, (topic, partition, count) in enumerate(parts):
                labels = [f"{number}.{position}.{row}" for row in range(count)]
                part: Rows | pa.RecordBatch = rows(*labels)
                if is_batch:
                    part = record_columns.batch_of_rows([rows("x", *labels, "y")]).slice(1, count)
                places: RecordPartitions = partition
                if count > 1 and (kind != "key" or len(parts) == 1) and number % 2:
                    places = [(partition + row) % 3 for row in range(count)]
                    places = np.array(places) if is_batch else places
                request_parts.append(((*IDS, GONE)[topic], places, part))
            key = IdempotencyKey(f"k{number % 3}", b"f%d" % (number % 4)) if kind == "key" else None
            hot = HotMark("log", number) if kind == "hot" else None
            self.requests.append(
                request(clock, request_parts, key=key, hot=hot, is_json=number % 2 == 0)
            )


shapes = st.lists(
    st.tuples(
        st.sampled_from(["plain", "plain", "key", "hot"]),
        st.lists(
            st.tuples(st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 2), st.integers(1, 5)),
            min_size=1,
            max_size=4,
        ),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


@given(shapes, st.sampled_from(["", "lz4", "zstd"]))
@examples(150)
def test_i4_every_request_gets_what_is_its_own(shapes, codec: str) -> None:
    """Against the plainest model: requests one after the other, each whole or refused."""
    drawn = Drawn(shapes)
    segment = ClosedSegment(drawn.requests, ManualClock().new_id)
    state = with_topics()
    body, outcomes = apply(state, segment.encode(codec))
    answers = segment.answers(outcomes)
    assert [answer.request for answer in answers] == drawn.requests
    log: dict[tuple[str, int], list[bytes | None]] = {}
    answer_by_key: dict[str, tuple[bytes, list]] = {}
    for answer in answers:
        append_request = answer.request
        key = append_request.key
        if key is not None and key.key in answer_by_key:
            fingerprint, placements = answer_by_key[key.key]
            if fingerprint == key.fingerprint:
                assert answer.error is None
                assert answer.placements == placements
            else:
                assert isinstance(answer.error, IdempotencyMismatch)
            continue
        if any(part.topic_id == GONE for part in append_request.parts):
            assert isinstance(answer.error, UnknownTopic)
            assert answer.placements == []
            continue
        assert answer.error is None
        expected = []
        for part in append_request.parts:
            record_values = values(part.rows)
            places = part.partition
            partitions = [places] * len(record_values) if isinstance(places, int) else list(places)
            for partition in sorted(set(partitions)):
                partition_values = log.setdefault((NAMES[part.topic_id], partition), [])
                own = [
                    value
                    for value, place in zip(record_values, partitions, strict=True)
                    if place == partition
                ]
                expected.append((NAMES[part.topic_id], partition, len(partition_values), len(own)))
                partition_values += own
        assert answer.placements == expected
        if key is not None:
            answer_by_key[key.key] = (key.fingerprint, expected)
    for (topic, partition), expected in log.items():
        assert tail_of(state, body, topic, partition) == expected


@given(shapes)
@examples(60)
def test_what_is_handed_to_the_cache_is_what_was_applied(shapes) -> None:
    drawn = Drawn(shapes)
    segment = ClosedSegment(drawn.requests, ManualClock().new_id)
    state = with_topics()
    encoded = segment.encode("")
    body, outcomes = apply(state, encoded)
    values_by_partition: dict[tuple[str, int], list[bytes | None]] = {}
    for number, first, count, placement in segment.applied_appends(outcomes):
        partition_values = values_by_partition.setdefault(
            (placement.topic, placement.partition), []
        )
        assert placement.base_offset == len(partition_values)
        assert count == placement.count
        partition_values += encoded.records[number].slice(first, count).column("value").to_pylist()
    for topic in NAMES.values():
        for partition in range(3):
            assert values_by_partition.get((topic, partition), []) == tail_of(
                state, body, topic, partition
            )


def test_plain_neighbours_of_one_topic_share_a_commit_and_no_others() -> None:
    clock = ManualClock()
    plain = [request(clock, [(IDS[0], i % 2, rows(str(i)))]) for i in range(3)]
    keyed = request(clock, [(IDS[0], 0, rows("k"))], key=IdempotencyKey("k", b""))
    other = request(clock, [(IDS[1], 0, rows("o"))])
    both = request(clock, [(IDS[0], 0, rows("x")), (IDS[1], 0, rows("y"))])
    draft = (
        ClosedSegment([*plain, keyed, plain[0], other, both, other], clock.new_id).encode("").draft
    )
    assert [len(commit.actions) for commit in draft.commits] == [2, 1, 1, 1, 2, 1]
    assert draft.commits[0].commit_id == plain[0].commit_id
    assert len(draft.chunks) == 3


def test_json_is_promised_only_of_chunks_that_are_json_throughout() -> None:
    clock = ManualClock()
    requests = [
        request(clock, [(IDS[0], 0, rows("1")), (IDS[0], 1, rows("2"))], is_json=True),
        request(clock, [(IDS[0], 1, rows("\x00"))]),
    ]
    draft = ClosedSegment(requests, ManualClock().new_id).encode("").draft
    assert [chunk.is_json for chunk in draft.chunks] == [True, False]


def test_only_large_chunks_are_packed() -> None:
    clock = ManualClock()
    small = request(clock, [(IDS[0], 0, rows("x" * 100))])
    large = request(clock, [(IDS[0], 1, rows("x" * PACK_BYTES_MIN))])
    draft = ClosedSegment([small, large], ManualClock().new_id).encode("lz4").draft
    assert [chunk.codec for chunk in draft.chunks] == ["", "lz4"]
    assert [chunk.size for chunk in draft.chunks] == [len(body) for body in draft.bodies]
    assert draft.chunks[1].size < 1000 < draft.chunks[1].raw_size


def test_closing_twice_gives_the_same_bytes() -> None:
    """A flush that failed is closed again with what came meanwhile: nothing may stick."""
    clock = ManualClock()
    requests = [request(clock, [(IDS[0], i % 3, rows(f"{i}"))]) for i in range(9)]
    first, second = (ClosedSegment(requests, clock.new_id).encode("lz4") for _ in range(2))
    assert first.draft.commits == second.draft.commits
    assert [bytes(body) for body in first.draft.bodies] == [
        bytes(body) for body in second.draft.bodies
    ]


@pytest.mark.parametrize("kinds", [["rows"], ["batch"], ["rows", "rows", "batch", "rows"]])
def test_lists_and_batches_mix_in_order(kinds: list[str]) -> None:
    clock = ManualClock()
    requests = []
    for number, kind in enumerate(kinds):
        part = rows(f"{number}a", f"{number}b")
        requests.append(
            request(
                clock,
                [(IDS[0], 0, part if kind == "rows" else record_columns.batch_of_rows([part]))],
            )
        )
    (batch,) = ClosedSegment(requests, ManualClock().new_id).encode("").records
    expected = [f"{number}{letter}".encode() for number in range(len(kinds)) for letter in "ab"]
    assert batch.column("value").to_pylist() == expected
