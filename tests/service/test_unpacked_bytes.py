"""A request weighs as much as it is packed, and a flush that fails in Arrow ends the broker."""

import asyncio
from typing import Any

import pyarrow as pa
import pytest

from tests.service.conftest import ARROW, arrow_of, broker_on, until
from tests.support.faults import FaultyStore
from tests.support.logs import COLD, MANUAL, append, closing, opened, read_values
from tests.support.vloop import run
from tidelog.storage.codec import chunk as chunks
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.write.hot_segment import ClosedSegment

MIB = 1 << 20
SMALL = {"buffer_bytes_max": 4 * MIB, "request_bytes_max": 4 * MIB}
TYPE = {"content-type": ARROW}


def packed(size: int, rows: int = 3, partition: int = 0) -> dict[str, bytes]:
    """Small bodies of so many bytes a row: the same value compressed, or named often."""
    partitions, words = pa.array([partition] * rows), pa.array([bytes(size)])
    named = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int8()), words)
    values = {"zstd": pa.array([bytes(size)] * rows), "dictionary": named}
    return {
        way: arrow_of(
            pa.record_batch({"value": column, "partition": partitions}), compression="zstd"
        )
        for way, column in values.items()
    }


@pytest.mark.parametrize("way", ["zstd", "dictionary"])
async def test_request_weighs_what_it_unpacks_to(way: str) -> None:
    body = packed(MIB - 100)[way]  # a record weighs 24 bytes more
    assert len(body) < 16 * 1024
    store = FaultyStore(MemoryStore())
    async with broker_on(store, **SMALL) as broker:
        await broker.log.topics.create("t", 1, {})
        store.freeze()
        writer = broker.log._log.writer
        before = writer.counters.requests
        asked = [
            asyncio.ensure_future(broker.http.post("/topics/t", content=body, headers=TYPE))
            for _ in range(2)
        ]
        try:
            await until(lambda: writer.counters.requests + writer.counters.throttled == before + 2)
            assert writer.buffered_bytes >= 3 * (MIB - 100)
            assert writer.counters.throttled == 1
        finally:
            store.thaw()
            await asyncio.gather(*asked)


@pytest.mark.parametrize("failure", [pa.ArrowInvalid, MemoryError, ValueError])
def test_flush_that_fails_in_arrow_ends_no_broker(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ClosedSegment.encode
    failures = [failure("offset overflow while concatenating arrays")]

    def encode_or_fail(self: ClosedSegment, codec: str) -> Any:
        if failures:
            raise failures.pop()
        return encode(self, codec)

    async def main() -> None:
        log = await opened(MemoryStore(), MANUAL)
        await log.topics.create("t", 1, {})
        monkeypatch.setattr(ClosedSegment, "encode", encode_or_fail)
        running = asyncio.ensure_future(log.run_until_failed())
        first = asyncio.ensure_future(append(log, "refused"))
        await asyncio.wait([first, running], return_when=asyncio.FIRST_COMPLETED)
        try:
            assert not running.done(), "the writer's task is done"
            assert isinstance(first.exception(), LogError)
            await append(log, "taken")
            assert await read_values(log) == ["taken"]
        finally:
            first.cancel()
            running.cancel()
            await asyncio.gather(first, running, return_exceptions=True)
            if not log._log.writer.task.done():
                await log.close()

    run(main)


def test_what_is_acknowledged_can_be_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "RAW_SIZE_MAX", 64 * 1024)

    async def main() -> None:
        inner = MemoryStore()
        log = await opened(inner, COLD)
        async with closing(log):
            await log.topics.create("t", 1, {})
            await asyncio.gather(*(append(log, f"{n}" * 30_000) for n in range(5)))
            assert sorted(await read_values(log)) == [f"{n}" * 30_000 for n in range(5)]

    run(main)
