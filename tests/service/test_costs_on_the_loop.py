"""Listings, patterns and many readers of one page cost the loop what others wait for.

The costs are counted and not timed: items of a listing, names that are matched, pages that are
encoded.
"""

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest

from tests.service.conftest import V2, Broker, append, until
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
async def test_a_listing_comes_in_pages(broker: Broker, path: str) -> None:
    await broker.log.create_topic("t", PARTITIONS, {})
    url = path.format(cluster=broker.log.wal.cluster.cluster_id)
    answer = (await broker.http.get(url)).json()
    assert len(answer["data"]) <= PAGE
    assert answer["metadata"]["next"]


async def subscribe(broker: Broker, group: str, name: str, pattern: str) -> None:
    headers = {"content-type": V2}
    made = await broker.http.post(
        f"/consumers/{group}", content=json.dumps({"name": name}), headers=headers
    )
    made.raise_for_status()
    path = f"/consumers/{group}/instances/{name}/subscription"
    body = json.dumps({"topic_pattern": pattern})
    answer = await broker.http.post(path, content=body, headers=headers)
    answer.raise_for_status()


async def test_a_new_topic_is_the_only_name_that_is_matched(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(TOPICS):
        await broker.log.create_topic(f"t{number}", 1, {})
    for number in range(GROUPS):
        await subscribe(broker, f"g{number}", "i", f"t{number}.*")
    await broker.consumers._tick()
    matching = patterns.matching
    matched: list[str] = []

    def counted(pattern: str, names: Iterable[str]) -> list[str]:
        seen = list(names)
        matched.extend(seen)
        return matching(pattern, seen)

    monkeypatch.setattr(patterns, "matching", counted)
    await broker.consumers._tick()
    assert matched == []
    await broker.log.create_topic("t-new", 1, {})
    await broker.consumers._tick()
    assert set(matched) <= {"t-new"}
    assert len(matched) <= GROUPS


async def test_a_pattern_is_compiled_once(broker: Broker) -> None:
    for number in range(PATTERNS):
        await subscribe(broker, "g", f"i{number}", f"t{number}")
    compiled = patterns._compiled.cache_info().misses
    await broker.log.create_topic("t1", 1, {})
    await broker.consumers._tick()
    assert patterns._compiled.cache_info().misses == compiled


async def read(broker: Broker, query: bytes, accept: bytes, seen: list[bytes]) -> None:
    """Take an answer, also one that does not end, until the task is cancelled."""

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        seen.append(message.get("body", b""))

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/topics/t/partitions/0/records",
        "query_string": query,
        "headers": [(b"accept", accept)],
        "client": ("127.0.0.1", 1),
    }
    await broker.app(scope, receive, send)


@pytest.mark.parametrize(
    ("query", "accept"),
    [
        (b"offset=0&format=json", b"text/event-stream"),
        (b"offset=0&timeout=30000", b"application/vnd.kafka.json.v2+json"),
    ],
    ids=["followers", "long polls"],
)
async def test_a_page_is_encoded_once_for_all_its_readers(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, query: bytes, accept: bytes
) -> None:
    await broker.log.create_topic("t", 1, {})
    encode = json_out.encode_records
    pages: list[int] = []

    def counted(batches: Any, *more: Any, **named: Any) -> bytes:
        if batches:
            pages.append(len(batches))
        return encode(batches, *more, **named)

    monkeypatch.setattr(json_out, "encode_records", counted)
    bodies: list[list[bytes]] = [[] for _ in range(READERS)]
    readers = [asyncio.ensure_future(read(broker, query, accept, seen)) for seen in bodies]
    try:
        await until(lambda: sum(map(len, broker.log._waiting.values())) == READERS, WAIT_S)
        await append(broker.log, b'"record"')
        await until(lambda: all(b"record" in b"".join(seen) for seen in bodies), WAIT_S)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert len(pages) == 1


@pytest.mark.parametrize(
    ("query", "accept"),
    [
        (b"offset=0&format=json&max_bytes=5000000", b"text/event-stream"),
        (b"offset=0&timeout=30000&max_bytes=5000000", b"application/vnd.kafka.json.v2+json"),
        (b"offset=0&max_bytes=5000000&format=json", b"application/x-ndjson"),
        (b"before=latest&max_bytes=5000000", b"application/vnd.kafka.json.v2+json"),
    ],
    ids=["followers", "long polls", "lines", "backwards"],
)
async def test_a_large_page_is_encoded_in_a_thread(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, query: bytes, accept: bytes
) -> None:
    await broker.log.create_topic("t", 1, {"max.message.bytes": "4000000"})
    await append(broker.log, b'"%b"' % (b"1e00" * 500_000))
    encode = json_out.encode_records
    threads: list[str] = []

    def counted(batches: Any, *more: Any, **named: Any) -> bytes:
        if batches:
            threads.append(threading.current_thread().name)
        return encode(batches, *more, **named)

    monkeypatch.setattr(json_out, "encode_records", counted)
    bodies: list[list[bytes]] = [[] for _ in range(READERS)]
    readers = [asyncio.ensure_future(read(broker, query, accept, seen)) for seen in bodies]
    try:
        await until(lambda: all(b"1e00" in b"".join(seen) for seen in bodies), WAIT_S)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert all(name.startswith("tidelog-unpack") for name in threads)
    is_shared = b"timeout" in query or b"event-stream" in accept
    assert len(threads) == (1 if is_shared else READERS)
