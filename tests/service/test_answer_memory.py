"""Answers with records have their memory before they are made: encoded pages, packed pages."""

import asyncio
import json
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from tests.service.conftest import ARROW, BINARY, JSON, TEXT, Broker, append, broker_on, positions
from tests.service.instances import subscribed
from tidelog.service.codec_threads import UNPROVED
from tidelog.service.formats import consumers, fetched
from tidelog.service.http import content_coding
from tidelog.service.http import request as http_request
from tidelog.service.memory_pool import MemoryPool, Share
from tidelog.service.routes import consumers_v2 as routes
from tidelog.service.routes import fetch
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.storage.core.errors import Unavailable
from tidelog.storage.core.model import ReadBounds
from tidelog.storage.store.memory import MemoryStore

MIB = 1 << 20
PAGE_MAX = 2 * MIB
LIMIT = 16 * MIB
COUNT = 20
VALUE = b"\x01" * 100_000
"""As text, it is six times as long."""
SMALL = 1000
"""Bytes of an answer without records, or less."""
PATH = "/topics/t/partitions/0/records"
Calls = list[tuple[int, int]]


@pytest.fixture
async def broker(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Broker]:
    for module in (fetch, routes):
        monkeypatch.setattr(module, "ENCODE_INLINE_BYTES", 0)
    limits = {"fetch_bytes_max": PAGE_MAX, "fetch_bytes_in_flight": LIMIT}
    async with broker_on(store, **limits) as broker:
        await broker.log.topics.create("t", 1, {})
        await append(broker.log, *([VALUE] * COUNT))
        yield broker


def watched(
    monkeypatch: pytest.MonkeyPatch,
    broker: Broker,
    owner: Any,
    name: str,
    size_of: Callable[[Any], int],
    least: int = SMALL,
) -> Calls:
    """Return a list.

    Each call adds the bytes that the answers held before, and the bytes that it made, if these are
    more than `least`.
    """
    calls: Calls = []
    work = getattr(owner, name)

    def watching(*args: Any) -> Any:
        used = broker.app.admission.answers.used
        made = work(*args)
        if (size := size_of(made)) > least:
            calls.append((used, size))
        return made

    monkeypatch.setattr(owner, name, watching)
    return calls


def body_bytes(made: fetched.FetchPage) -> int:
    return len(made.page.body)


@pytest.mark.parametrize("query", ["", "&timeout=1000"])
@pytest.mark.parametrize("accept", [TEXT, BINARY, ARROW, "application/x-ndjson"])
async def test_page_has_its_memory_before_it_is_encoded(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, accept: str, query: str
) -> None:
    calls = watched(monkeypatch, broker, fetch, "encode", body_bytes)
    offset = pages = 0
    while offset < COUNT:
        path = f"{PATH}?offset={offset}&max_bytes={PAGE_MAX}&format=text{query}"
        answer = await broker.http.get(path, headers={"accept": accept})
        assert answer.status_code == 200
        if accept == TEXT:
            read = [record["offset"] for record in answer.json()]
            assert read == list(range(offset, positions(answer)[0]))
        offset, pages = positions(answer)[0], pages + 1
    assert len(calls) == pages
    for used, made in calls:
        assert made <= PAGE_MAX
        assert used >= made
    assert broker.app.admission.answers.used == 0


async def test_page_backwards_has_its_memory(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = watched(monkeypatch, broker, fetch, "encode", body_bytes)
    path = f"{PATH}?before=latest&max_bytes={PAGE_MAX}"
    answer = await broker.http.get(path, headers={"accept": TEXT})
    offsets = [record["offset"] for record in answer.json()]
    assert offsets == list(range(offsets[0], COUNT))
    ((_, made),) = calls
    assert made <= PAGE_MAX


@pytest.mark.parametrize(("form", "accept"), [("text", TEXT), ("binary", BINARY), ("text", ARROW)])
async def test_read_of_instance_has_its_memory(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, form: str, accept: str
) -> None:
    instance = await subscribed(broker, format=form)
    name = "columns_of_read" if accept == ARROW else "array_of_read"
    calls = watched(monkeypatch, broker, consumers, name, lambda made: len(made[1]))
    read, offsets = 0, []
    while read == len(calls):
        answer = await instance("GET", f"/records?max_bytes={PAGE_MAX}&timeout=0", accept=accept)
        assert answer.status_code == 200, answer.text
        read += 1
        if accept != ARROW:
            offsets += [record["offset"] for record in answer.json()]
    if accept != ARROW:
        assert offsets == list(range(COUNT))
    for used, made in calls:
        assert made <= PAGE_MAX
        assert used >= made
    assert broker.app.admission.answers.used == 0


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
async def test_packed_page_has_its_memory(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, coding: str
) -> None:
    calls = watched(monkeypatch, broker, fetch, "pack", len, least=0)
    headers = {"accept": BINARY, "accept-encoding": f"{coding}, identity;q=0"}
    path = f"{PATH}?offset=0&max_bytes={PAGE_MAX}"
    async with broker.http.stream("GET", path, headers=headers) as answer:
        assert answer.headers["content-encoding"] == coding
        size = len(b"".join([part async for part in answer.aiter_raw()]))
    ((used, made),) = calls
    assert made == size
    assert used >= content_coding.packed_bound(PAGE_MAX // 2) + PAGE_MAX // 2
    assert broker.app.admission.answers.used == 0


@pytest.mark.parametrize("reader", ["fetch", "before", "instance"])
async def test_page_is_freed_when_it_is_packed(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    packed: list[tuple[int, int, int]] = []

    def packing(body: bytes, coding: bytes) -> bytes:
        made = content_coding.pack(body, coding)
        packed.append((len(body), len(made), tracemalloc.get_traced_memory()[0]))
        return made

    used_sizes: list[int] = []

    def after(coding: bytes) -> tuple[tuple[bytes, bytes], ...]:
        ((size, _, before),) = packed
        until_s = time.monotonic() + 10
        while before - tracemalloc.get_traced_memory()[0] < size * 3 // 4:
            assert time.monotonic() < until_s, "the page is not freed"
            time.sleep(0.001)  # the thread frees the page just after its result is here
        used_sizes.append(broker.app.admission.answers.used)
        return content_coding.headers_of(coding)

    monkeypatch.setattr(fetch, "pack", packing)
    monkeypatch.setattr(http_request, "headers_of", after)
    instance = await subscribed(broker, format="text")
    headers = {"accept": TEXT, "accept-encoding": "gzip, identity;q=0"}
    tracemalloc.start()
    try:
        if reader == "instance":
            path = f"/records?max_bytes={PAGE_MAX}&timeout=0"
            answer = await instance("GET", path, **headers)
        else:
            start = "before=latest" if reader == "before" else "offset=0"
            path = f"{PATH}?{start}&max_bytes={PAGE_MAX}"
            answer = await broker.http.get(path, headers=headers)
    finally:
        tracemalloc.stop()
    assert answer.status_code == 200
    ((size, packed_size, _),) = packed
    assert size > MIB
    assert used_sizes == [packed_size]


async def test_page_whose_packing_has_no_memory_is_refused(broker: Broker) -> None:
    headers = {"accept": BINARY, "accept-encoding": "gzip, identity;q=0"}
    path = f"{PATH}?offset=0&max_bytes={PAGE_MAX}"
    other = Share(broker.app.admission.answers, UNPROVED + "another")
    assert other.set(LIMIT - 3 * MIB)
    assert (await broker.http.get(path, headers=headers)).status_code == 503
    assert (await broker.http.get(path, headers={"accept": BINARY})).status_code == 200
    other.set(0)


@pytest.mark.parametrize("freed_s", [0.2, None])
async def test_fetch_waits_for_memory(broker: Broker, freed_s: float | None) -> None:
    pool: MemoryPool = broker.app.admission.answers
    other = Share(pool, "User:other")
    assert other.set(LIMIT)
    reading = asyncio.create_task(broker.http.get(PATH, headers={"accept": JSON}))
    if freed_s is not None:
        await asyncio.sleep(freed_s)
        assert not reading.done()
        other.set(0)
    answer = await reading
    assert answer.status_code == (422 if freed_s else 503)
    if freed_s is None:
        assert json.loads(answer.content)["error_code"] == 50302


async def test_follower_waits_for_memory_of_page_that_is_longer_than_its_records(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ENCODE_INLINE_BYTES", MIB)
    fetcher = broker.app.consumers._fetch
    view = fetched.FetchParams("t", 0, "sse", "text", ReadBounds(len(VALUE), 1))
    other = Share(broker.app.admission.answers, "User:other")
    assert other.set(LIMIT - 3 * len(VALUE))
    with fetcher.answer_share("User:a") as share:
        reading = asyncio.create_task(fetcher.page(view, 0, share, ALL_RIGHTS))
        await asyncio.sleep(2 * fetch.ROOM_S)
        assert (reading.done(), share.size) == (False, 0)
        other.end()
        page = await reading
        assert share.size == len(page.page.body) > 5 * len(VALUE)


async def test_task_of_answer_that_has_ended_takes_no_memory(broker: Broker) -> None:
    """For example the task that waits for the room of a forwarded answer.

    It is cancelled only in a later turn than its request.
    """
    fetcher = broker.app.consumers._fetch
    with fetcher.answer_share("User:a") as share:
        asking = asyncio.create_task(fetcher.reserve(share, MIB, is_refused=False))
    with pytest.raises(Unavailable):
        await asking
    assert broker.app.admission.answers.used == 0


async def test_request_that_was_released_takes_no_memory() -> None:
    async def nothing(*_: Any) -> Any:
        raise AssertionError

    pool = MemoryPool(MIB)
    for charged in (0, MIB // 2):
        request = http_request.HttpRequest(
            {"headers": [], "rights": ALL_RIGHTS}, nothing, nothing, http_request.BodyMemory(pool)
        )
        if charged:
            request.charge(charged)
        request.release()
        request.charge(MIB // 4)
        assert pool.used == 0
