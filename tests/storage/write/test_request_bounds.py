"""Bounds of a request: its weight, the cut of a flush, timestamps, the chunks in all tails."""

import asyncio

import numpy as np
import pyarrow as pa
import pytest

from tests.support.clock import ManualClock
from tests.support.logs import append, closing, opened, read_values, with_topic
from tests.support.records import TIME_MS, fold, rows
from tidelog.storage.broker import Broker
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec import record_columns
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core import format_levels, topic_configs
from tidelog.storage.core.actions import AlterTopic, CommitOffsets, GroupOffset
from tidelog.storage.core.errors import (
    BoundReached,
    InvalidConfig,
    InvalidRequest,
    InvalidTimestamp,
    RecordTooLarge,
)
from tidelog.storage.core.topic_configs import CONFIGS, effective
from tidelog.storage.state import principal_shares as rules
from tidelog.storage.state import tail_chunk_counts
from tidelog.storage.state.cluster_state import ClusterState
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.requests import AppendRequest, TopicRecords, check_timestamps, part_rows

ROWS = rows("v", timestamps=[0])


def header_bytes(requests: list[AppendRequest]) -> int:
    draft = ClosedSegment(requests, ManualClock().new_id).encode("lz4").draft
    entry = entries.Entry(2, 1, bytes(32), bytes(16), "w" * 50, 0, draft.chunks, draft.commits)
    return len(entries.encode_header(entry)[0])


@pytest.mark.parametrize("key", [None, IdempotencyKey("é" * 255, bytes(16), [10_000] * 40)])
@pytest.mark.parametrize("partitions", [1, 40])
def test_header_is_within_sizes_of_requests(key: IdempotencyKey | None, partitions: int) -> None:
    offsets = [GroupOffset("f" * 32, number, 2**62, metadata="m" * 50) for number in range(20)]
    requests = [
        AppendRequest(
            [TopicRecords("f" * 32, number, ROWS) for number in range(partitions)],
            1,
            actions=[CommitOffsets("g", 1, offsets), AlterTopic("f" * 32, {"a": "b" * 500})],
            key=key,
        )
        for _ in range(50)
    ]
    total = sum(request.header_bytes for request in requests)
    assert total / 6 < header_bytes(requests) < total


async def test_i10_header_cuts_flush(inner: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "HEADER_BYTES_MAX", 16 * 1024)
    async with closing(await with_topic(inner)) as log:
        topic_id = log.state.topic("t").topic_id
        offsets = [GroupOffset(topic_id, 0, 0, metadata="m" * 3000)]
        work = [log._log.submit(CommitOffsets(f"g{i}", -1, offsets)) for i in range(20)]
        await asyncio.gather(*work)
        _, outcomes = await fold(inner, "c0ffee")
        assert max(map(len, outcomes)) == 2
        large = [GroupOffset(topic_id, 0, 0, metadata="m" * 9000)]
        with pytest.raises(RecordTooLarge, match="bytes in the header"):
            await log._log.submit(CommitOffsets("g", -1, large))


async def test_request_that_no_reader_unpacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "RAW_SIZE_MAX", 64 * 1024)
    async with closing(await with_topic(MemoryStore())) as log:
        with pytest.raises(RecordTooLarge, match="unpacked bytes"):
            await append(log, "x" * 70_000)
        await append(log, "after")
        assert await read_values(log) == ["after"]


def test_a_chunk_that_no_reader_would_unpack_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = record_columns.batch_of_rows([rows("x" * 70_000, timestamps=[0])])
    assert chunks.encode(batch, "lz4").codec == "lz4"
    monkeypatch.setattr(chunks, "RAW_SIZE_MAX", 64 * 1024)
    encoded = chunks.encode(batch, "lz4")
    decoded_batch = chunks.decode(
        encoded.body, crc=encoded.crc32c, rows=1, codec=encoded.codec, raw_size=0, key="k"
    )
    assert decoded_batch.equals(batch)


def test_an_action_that_cannot_be_stored_concerns_its_request_alone() -> None:
    with pytest.raises(InvalidRequest, match="cannot be stored"):
        AppendRequest((), 0, actions=[AlterTopic("t", {"a": "\ud800"})])


@pytest.mark.parametrize(
    ("name", "value", "canonical_value"),
    [
        ("cleanup.policy", "delete, compact,delete", "delete,compact"),
        ("cleanup.policy", "compact", "compact"),
        ("retention.ms", "-1", "-1"),
        ("segment.bytes", "0002048", "2048"),
        ("min.cleanable.dirty.ratio", "0.50", "0.50"),
        ("compression.type", "zstd", "zstd"),
    ],
)
def test_a_config_is_kept_in_one_form(name: str, value: str, canonical_value: str) -> None:
    assert topic_configs.canonical(name, value, format_levels.NEWEST) == canonical_value
    assert topic_configs.effective({name: value}) == topic_configs.effective(
        {name: canonical_value}
    )


def test_a_long_value_of_a_config_is_refused_without_its_text() -> None:
    with pytest.raises(InvalidConfig) as refused:
        topic_configs.canonical("cleanup.policy", "delete" + ",delete" * 1000, format_levels.NEWEST)
    assert len(str(refused.value)) < 200


# -- timestamps: Kafka's bounds, before the ack


NOW_MS = 1_700_000_000_000
HOUR_MS = 3_600_000
AFTER, BEFORE = "message.timestamp.after.max.ms", "message.timestamp.before.max.ms"


def columns(*stamps: int) -> pa.RecordBatch:
    batch = record_columns.batch_of_rows([rows(*["v"] * len(stamps), timestamps=list(stamps))])
    assert np.array_equal(chunks.timestamps_us(batch.column("timestamp")) // 1000, stamps)
    return batch


def is_accepted(stamp: int, **configs: str) -> bool:
    config = effective({name.replace("_", "."): value for name, value in configs.items()})
    reasons = set()
    for records in (rows("a", "b", timestamps=[NOW_MS, stamp]), columns(NOW_MS, stamp)):
        try:
            check_timestamps("t", records, config, NOW_MS)
            reasons.add("")
        except InvalidTimestamp as error:
            reasons.add(str(error))
    (why,) = reasons
    assert why == "" or why.startswith(f"record 1 for topic 't' has timestamp {stamp}, ")
    return not why


def test_the_defaults_are_kafkas() -> None:
    assert (CONFIGS[AFTER].default, CONFIGS[BEFORE].default) == ("3600000", str(2**63 - 1))
    assert is_accepted(NOW_MS + HOUR_MS)
    assert not is_accepted(NOW_MS + HOUR_MS + 1)
    assert not is_accepted(253_402_300_799_999)
    assert is_accepted(0)


def test_both_bounds_are_inclusive_and_settable() -> None:
    assert is_accepted(NOW_MS - 10, message_timestamp_before_max_ms="10")
    assert not is_accepted(NOW_MS - 11, message_timestamp_before_max_ms="10")
    assert is_accepted(NOW_MS, message_timestamp_after_max_ms="0")
    assert not is_accepted(NOW_MS + 1, message_timestamp_after_max_ms="0")
    assert is_accepted(253_402_300_799_999, message_timestamp_after_max_ms=str(2**63 - 1))


def test_a_topic_with_append_time_takes_any_timestamp() -> None:
    stamped = "LogAppendTime"
    assert is_accepted(253_402_300_799_999, message_timestamp_type=stamped)


async def test_refused_request_writes_nothing_and_retry_is_not_checked() -> None:
    async with closing(await with_topic(MemoryStore(), configs={BEFORE: "1000"})) as log:
        last, now_ms = log.state.seq, log.clock.now_ms()
        with pytest.raises(InvalidTimestamp, match=f"{AFTER} is 3600000"):
            await append(log, "far", timestamps=[now_ms + 2 * HOUR_MS])
        assert (log.state.seq, log._log.writer.buffered_bytes) == (last, 0)
        key = IdempotencyKey("k", b"f" * 16, 1)
        topic = log.state.topic("t")
        request = [(0, rows("once", timestamps=[now_ms]))]
        first = await log.records.append(topic, request, size=4, is_json=False, key=key)
        log.clock.advance(60.0)  # type: ignore[attr-defined]
        assert first == await log.records.append(topic, request, size=4, is_json=False, key=key)
        with pytest.raises(InvalidTimestamp, match=f"60000 ms before .* {BEFORE} is 1000"):
            await log.records.append(topic, request, size=4, is_json=False)


async def test_a_cluster_of_the_first_level_has_the_defaults_only() -> None:
    """Version 0.1 refuses a commit that sets a config it does not know: so does `apply` (I4)."""
    async with closing(await opened(MemoryStore())) as log:
        log._log.wal._state = ClusterState("c0ffee", format_levels.FIRST)
        with pytest.raises(InvalidConfig, match=r"needs level 2 .* run tidelog upgrade"):
            await log.topics.create("t", 1, {AFTER: "1"})


# -- the bound of the chunks in all tails


SHARE = 3
BOUND_ROWS = Rows([TIME_MS], [None], [b"v"])


@pytest.fixture
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail_chunk_counts, "CHUNKS_MAX", SHARE * rules.PARTS)


async def append_one(log: Broker, topic: str, number: int) -> None:
    await log.records.append(log.state.topic(topic), [(number, BOUND_ROWS)], size=1, is_json=False)


async def transact(log: Broker) -> None:
    """Append to both topics in one request."""
    parts = [(log.state.topic(name), 0, BOUND_ROWS) for name in "tu"]
    await log.records.transact(parts, [], size=2, is_json=False)


def ends(log: Broker) -> list[int]:
    return [partition.high_watermark for _, _, partition in log.state.partitions()]


@pytest.mark.usefixtures("small_bound")
async def test_a_request_is_refused_whole_and_takes_no_memory() -> None:
    async with closing(await with_topic(MemoryStore())) as log:
        await log.topics.create("u", 1, {})
        for _ in range(SHARE):
            await append_one(log, "u", 0)
        with pytest.raises(BoundReached, match="the topic 'u' has 3 of its 3 chunks"):
            await transact(log)
        assert (ends(log), log._log.writer.buffered_bytes) == ([0, SHARE], 0)
        await append_one(log, "t", 0)
        await log.records.seal("u")
        await transact(log)
        assert ends(log) == [2, SHARE + 1]


@pytest.mark.usefixtures("small_bound")
async def test_records_that_were_acknowledged_are_committed_above_the_bound() -> None:
    """Those of a hot log, which a broker finds at its start."""
    async with closing(await with_topic(MemoryStore())) as log:
        topic = log.state.topic("t")
        for _ in range(2 * SHARE):
            request = AppendRequest([part_rows(topic, 0, BOUND_ROWS)], 1, topic_id=topic.topic_id)
            (waiter,) = log._log.writer.recover([request])
            await waiter
        assert ends(log) == [2 * SHARE]
        with pytest.raises(BoundReached):
            await append_one(log, "t", 0)
        await log.records.seal("t")
        await append_one(log, "t", 0)
