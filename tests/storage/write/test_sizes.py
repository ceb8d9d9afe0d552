"""The weight of a request, and the cut of a flush: every entry and chunk can be read."""

import asyncio

import pytest

from tests.support.clock import ManualClock
from tests.support.logs import append, closing, read_values, with_topic
from tests.support.records import fold, rows
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.codec import entry as entries
from tidelog.storage.codec.entry import IdempotencyKey
from tidelog.storage.core import levels, topic_configs
from tidelog.storage.core.actions import AlterTopic, CommitOffsets, GroupOffset
from tidelog.storage.core.errors import InvalidConfig, InvalidRequest, RecordTooLarge
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.hot_segment import ClosedSegment
from tidelog.storage.write.requests import AppendRequest, TopicRecords

ROWS = rows("v", timestamps=[0])


def header_bytes(requests: list[AppendRequest]) -> int:
    draft = ClosedSegment(requests, ManualClock().new_id).encode("lz4").draft
    entry = entries.Entry(2, 1, bytes(32), bytes(16), "w" * 50, 0, draft.chunks, draft.commits)
    return len(entries.encode_header(entry)[0])


@pytest.mark.parametrize("key", [None, IdempotencyKey("é" * 255, bytes(16), [10_000] * 40)])
@pytest.mark.parametrize("partitions", [1, 40])
def test_the_header_of_an_entry_is_within_what_its_requests_say(
    key: IdempotencyKey | None, partitions: int
) -> None:
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
    said = sum(request.header_bytes for request in requests)
    assert said / 6 < header_bytes(requests) < said


async def test_i10_a_flush_is_cut_by_the_bytes_of_its_header(
    inner: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entries, "HEADER_BYTES_MAX", 16 * 1024)

    async with closing(await with_topic(inner)) as log:
        topic_id = log.state.topic("t").topic_id
        offsets = [GroupOffset(topic_id, 0, 0, metadata="m" * 3000)]
        work = [log.submit(CommitOffsets(f"g{i}", -1, offsets)) for i in range(20)]
        await asyncio.gather(*work)
        _, outcomes = await fold(inner, "c0ffee")
        assert max(map(len, outcomes)) == 2
        large = [GroupOffset(topic_id, 0, 0, metadata="m" * 9000)]
        with pytest.raises(RecordTooLarge, match="bytes in the header"):
            await log.submit(CommitOffsets("g", -1, large))


async def test_a_request_above_what_a_reader_unpacks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunks, "RAW_SIZE_MAX", 64 * 1024)

    async with closing(await with_topic(MemoryStore())) as log:
        with pytest.raises(RecordTooLarge, match="unpacked bytes"):
            await append(log, "x" * 70_000)
        await append(log, "after")
        assert await read_values(log) == ["after"]


def test_a_chunk_that_no_reader_would_unpack_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = chunks.batch_of_rows([rows("x" * 70_000, timestamps=[0])])
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
    assert topic_configs.canonical(name, value, levels.NEWEST) == canonical_value
    assert topic_configs.effective({name: value}) == topic_configs.effective(
        {name: canonical_value}
    )


def test_a_long_value_of_a_config_is_refused_without_its_text() -> None:
    with pytest.raises(InvalidConfig) as refused:
        topic_configs.canonical("cleanup.policy", "delete" + ",delete" * 1000, levels.NEWEST)
    assert len(str(refused.value)) < 200
