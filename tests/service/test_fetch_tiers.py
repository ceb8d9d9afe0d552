"""A fetch over both tiers is one dense run, and what a damaged object does to it."""

import pyarrow as pa
import pytest

from tests.service.conftest import (
    ARROW,
    FIRST_MS,
    JSON,
    TEXT,
    Broker,
    append,
    assert_refused,
    post,
    values,
)
from tests.service.test_fetch import get
from tests.support.views import flip
from tidelog.storage.store.memory import MemoryStore

# -- both tiers


async def test_one_answer_spans_tiers(broker: Broker, topic: str) -> None:
    for n in range(30):
        await append(broker.log, b"value-%04d" % n, timestamp_ms=FIRST_MS + n)
        if n in (9, 19):
            await broker.log.records.seal("t")
    partition_state = broker.log.state.partition("t", 0)
    assert (partition_state.sealed_end, partition_state.high_watermark) == (20, 30)
    expected = [f"value-{n:04d}" for n in range(30)]
    for cold in (False, True, True):
        if cold:
            broker.log._log.tail.clear()
        assert await values(broker) == expected
        for offset in (5, 9, 10, 15, 19, 20, 25, 29, 30):
            assert await values(broker, offset=offset) == expected[offset:]
            assert await values(broker, timestamp=FIRST_MS + offset) == expected[offset:]
            assert await values(broker, offset=offset, max_bytes=510) == expected[offset:][:15]
    table = pa.ipc.open_stream((await get(broker, ARROW)).content).read_all()
    assert table.column("offset").to_pylist() == list(range(30))


# -- damage


def damage(store: MemoryStore, key: str, position: int) -> None:
    body, modified_ms = store._objects[key]
    store._objects[key] = (flip(body, position), modified_ms)


async def test_damaged_chunk_fails_its_partition_alone(
    broker: Broker, store: MemoryStore, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    body = [{"value": n, "partition": n % 2} for n in range(20)]
    await post(broker.http, body)
    run = broker.log.state.partition("t", 0).tail[0]
    damage(store, run.object_key, run.position + run.size // 2)
    assert len((await get(broker, TEXT)).json()) == 10  # from memory
    broker.log._log.tail.clear()
    message = assert_refused(await get(broker, TEXT), 500, 50002)
    assert run.object_key in message
    assert run.object_key in caplog.text
    other = await broker.http.get("/topics/t/partitions/1/records")
    assert len(other.json()) == 10
    # Records written since are whole; the offset before it is not skipped in silence.
    await post(broker.http, [{"value": 1, "partition": 0}])
    assert len((await get(broker, TEXT, offset=10)).json()) == 1
    assert_refused(await get(broker, TEXT, offset=9), 500, 50002)


@pytest.mark.parametrize("accept", [JSON, TEXT, ARROW, "application/x-ndjson", "text/event-stream"])
async def test_damage_is_said_in_every_form_of_answer(
    broker: Broker, store: MemoryStore, topic: str, accept: str
) -> None:
    await post(broker.http, [{"value": n, "partition": 0} for n in range(20)])
    await broker.log.records.seal("t")
    await post(broker.http, [{"value": n, "partition": 0} for n in range(20)])
    broker.log._log.tail.clear()
    (segment,) = [key for key in store._objects if key.endswith(".parquet")]
    run = broker.log.state.partition("t", 0).tail[0]
    damage(store, segment, 30)
    damage(store, run.object_key, run.position + 30)
    assert segment in assert_refused(await get(broker, accept), 500, 50002)
    assert run.object_key in assert_refused(await get(broker, accept, offset=20), 500, 50002)


async def test_damaged_segment_fails_its_partition_alone(
    broker: Broker, store: MemoryStore, topic: str
) -> None:
    await post(broker.http, [{"value": "v" * 100, "partition": n % 2} for n in range(20)])
    await broker.log.records.seal("t")
    await post(broker.http, [{"value": 1, "partition": 0}])
    broker.log._log.tail.clear()
    segments = sorted(key for key in store._objects if key.endswith(".parquet"))
    assert len(segments) == 2
    for position in (10, len(store._objects[segments[0]][0]) - 20):
        damage(store, segments[0], position)
        broker.log._log.reader.segments.groups._values.clear()
        broker.log._log.reader.segments.footers._values.clear()
        assert segments[0] in assert_refused(await get(broker, TEXT), 500, 50002)
        other = await broker.http.get("/topics/t/partitions/1/records")
        assert len(other.json()) == 10
        assert len((await get(broker, TEXT, offset=10)).json()) == 1
        damage(store, segments[0], position)
    broker.log._log.reader.segments.groups._values.clear()
    assert len((await get(broker, TEXT)).json()) == 11
    del store._objects[segments[0]]
    broker.log._log.reader.segments.groups._values.clear()
    broker.log._log.reader.segments.footers._values.clear()
    assert segments[0] in assert_refused(await get(broker, TEXT), 500, 50002)
