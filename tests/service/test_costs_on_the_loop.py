"""Listings, patterns and many readers of one page cost the loop what others wait for.

The costs are counted and not timed: items of a listing, names that are matched, pages that are
encoded.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.service.conftest import JSON, V2, Broker, append, send, until
from tests.service.test_revoked_streams import read
from tidelog.service.formats import json_out
from tidelog.storage.groups import patterns

PAGE = 1000
"""Items of one answer at most."""
PARTITIONS = 2 * PAGE
TOPICS = 40
GROUPS = 20
PATTERNS = 300
"""More than are remembered."""
READERS = 5
WAIT_S = 60.0


@pytest.mark.parametrize(
    "path",
    [
        "/v3/clusters/{cluster}/brokers/1/partition-replicas",
        "/v3/clusters/{cluster}/topics/t/partitions",
    ],
)
async def test_listing_comes_in_pages(broker: Broker, path: str) -> None:
    await broker.log.topics.create("t", PARTITIONS, {})
    url = path.format(cluster=broker.log._log.wal.cluster.cluster_id)
    answer = (await broker.http.get(url)).json()
    assert len(answer["data"]) <= PAGE
    assert answer["metadata"]["next"]


async def subscribe(broker: Broker, group: str, name: str, pattern: str) -> None:
    made = await send(broker.http, json.dumps({"name": name}), V2, f"/consumers/{group}")
    made.raise_for_status()
    path = f"/consumers/{group}/instances/{name}/subscription"
    body = json.dumps({"topic_pattern": pattern})
    answer = await send(broker.http, body, V2, path)
    answer.raise_for_status()


async def test_new_topic_is_only_name_that_is_matched(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(TOPICS):
        await broker.log.topics.create(f"t{number}", 1, {})
    for number in range(GROUPS):
        await subscribe(broker, f"g{number}", "i", f"t{number}.*")
    await broker.consumers.do_duties()
    matching = patterns.matching
    matched: list[str] = []

    def counted(pattern: str, names: Iterable[str]) -> list[str]:
        seen = list(names)
        matched.extend(seen)
        return matching(pattern, seen)

    monkeypatch.setattr(patterns, "matching", counted)
    await broker.consumers.do_duties()
    assert matched == []
    await broker.log.topics.create("t-new", 1, {})
    await broker.consumers.do_duties()
    assert set(matched) <= {"t-new"}
    assert len(matched) <= GROUPS


async def test_pattern_is_compiled_once(broker: Broker) -> None:
    for number in range(PATTERNS):
        await subscribe(broker, f"g{number}", "i", f"t{number}")
    compiled = patterns._compiled.cache_info().misses
    await broker.log.topics.create("t1", 1, {})
    await broker.consumers.do_duties()
    assert patterns._compiled.cache_info().misses == compiled


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread of each encoding of records."""
    encode = json_out.encode_records
    threads: list[str] = []

    def counted(batches: Any, *more: Any, **named: Any) -> bytes:
        if batches:
            threads.append(threading.current_thread().name)
        return encode(batches, *more, **named)

    monkeypatch.setattr(json_out, "encode_records", counted)
    return threads


@asynccontextmanager
async def reading(broker: Broker, query: str, accept: bytes, awaited: bytes) -> AsyncIterator[None]:
    """Several readers of one page, until each of them has these bytes."""
    bodies: list[list[bytes]] = [[] for _ in range(READERS)]
    readers = [asyncio.ensure_future(read(broker, query, accept, {}, parts)) for parts in bodies]
    try:
        yield
        await until(lambda: all(awaited in b"".join(parts) for parts in bodies), WAIT_S)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


@pytest.mark.broker(topics={"t": 1})
@pytest.mark.parametrize(
    ("query", "accept"),
    [("offset=0&format=json", b"text/event-stream"), ("offset=0&timeout=30000", JSON.encode())],
    ids=["followers", "long polls"],
)
async def test_page_is_encoded_once_for_all_its_readers(
    broker: Broker, encodings: list[str], query: str, accept: bytes
) -> None:
    async with reading(broker, query, accept, b"record"):
        await until(lambda: sum(map(len, broker.log._log.waiting.values())) == READERS, WAIT_S)
        await append(broker.log, b'"record"')
    assert len(encodings) == 1


@pytest.mark.parametrize(
    ("query", "accept", "count"),
    [
        ("offset=0&format=json", b"text/event-stream", 1),
        ("offset=0&timeout=30000", JSON.encode(), 1),
        ("offset=0&format=json", b"application/x-ndjson", READERS),
        ("before=latest", JSON.encode(), READERS),
    ],
    ids=["followers", "long polls", "lines", "backwards"],
)
async def test_large_page_is_encoded_in_thread(
    broker: Broker, encodings: list[str], query: str, accept: bytes, count: int
) -> None:
    await broker.log.topics.create("t", 1, {"max.message.bytes": "4000000"})
    await append(broker.log, b'"%b"' % (b"1e00" * 500_000))
    async with reading(broker, f"{query}&max_bytes=5000000", accept, b"1e00"):
        pass
    assert all(name.startswith("tidelog-unpack") for name in encodings)
    assert len(encodings) == count
