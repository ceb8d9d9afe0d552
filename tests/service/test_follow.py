"""Fetches that stay open, over a real server: lines and server-sent events as they are committed,
resumption by Last-Event-ID, and no state after a disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import pytest

from tests.service.conftest import (
    Broker,
    append,
    assert_refused,
    broker_on,
    listening,
    positions,
    post,
    until,
)
from tests.support.views import flip
from tidelog.service.routes import fetch
from tidelog.storage.store.memory import MemoryStore

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
PATH = "/topics/t/partitions/0/records"


class Event(NamedTuple):
    kind: str
    id: str
    data: Any


class Events:
    """A reader of server-sent events (the part of the WHATWG's parser that we need)."""

    def __init__(self, answer: httpx.Response) -> None:
        self.answer = answer
        self.comments = 0
        self._lines = answer.aiter_lines()

    async def next(self) -> Event:
        """The next event; raises StopAsyncIteration at the end."""
        kind, last_id, data = "message", "", ""
        while True:
            line = await anext(self._lines)
            if not line:
                if data:
                    return Event(kind, last_id, json.loads(data))
                continue
            name, _, text = line.partition(":")
            text = text.removeprefix(" ")
            if not name:
                self.comments += 1
            elif name == "data":
                data += text
            elif name == "id":
                last_id = text
            elif name == "event":
                kind = text

    async def take(self, count: int) -> list[Event]:
        return [await self.next() for _ in range(count)]


@asynccontextmanager
async def following(port: int, accept: str = SSE, **query: Any) -> AsyncIterator[httpx.Response]:
    """An open fetch."""
    event_id = query.pop("event_id", None)
    headers = {"accept": accept} | ({} if event_id is None else {"last-event-id": event_id})
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:  # noqa: SIM117
        async with client.stream("GET", PATH, headers=headers, params=query) as answer:
            yield answer


@pytest.fixture
async def port(broker: Broker, topic: str) -> AsyncIterator[int]:
    async with asyncio.timeout(240), listening(broker.app) as port:
        yield port


def numbers(*values: int) -> list[bytes]:
    return [b"%d" % value for value in values]


async def test_events_come_as_they_are_committed(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0, 1, 2))
    async with following(port) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == SSE
        assert answer.headers["cache-control"] == "no-store"
        assert positions(answer) == (3, 3, 0)
        events = Events(answer)
        assert [(e.id, e.data["value"]) for e in await events.take(3)] == [
            ("0", 0),
            ("1", 1),
            ("2", 2),
        ]
        for n in range(3, 10):
            await append(broker.log, *numbers(n))
            event = await events.next()
            assert (event.id, event.data["offset"], event.data["value"]) == (str(n), n, n)


async def test_a_reader_goes_on_where_it_was(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(*range(6)))
    async with following(port, max_bytes=50) as answer:
        last = (await Events(answer).take(3))[-1]
    # An EventSource repeats its URL, whatever it says.
    async with following(port, event_id=last.id, offset="earliest") as answer:
        events = Events(answer)
        assert [event.data["value"] for event in await events.take(3)] == [3, 4, 5]
        await append(broker.log, *numbers(6))
        assert (await events.next()).data["value"] == 6
    async with following(port, event_id="6") as answer:
        await append(broker.log, *numbers(7))
        assert (await Events(answer).next()).data["value"] == 7


async def test_following_from_the_end_shows_what_is_new(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0, 1))
    async with following(port, offset="latest") as answer:
        events = Events(answer)
        await append(broker.log, *numbers(2))
        assert (await events.next()).id == "2"
        assert events.comments >= 1  # something was sent before there was anything to send


async def test_lines_are_followed_if_asked(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0, 1))
    async with following(port, NDJSON) as answer:
        assert len([line async for line in answer.aiter_lines()]) == 2  # and ends
    async with following(port, NDJSON, follow="true", format="text") as answer:
        assert answer.headers["content-type"] == NDJSON
        lines = answer.aiter_lines()
        await append(broker.log, *numbers(2, 3))
        for n in range(4):
            assert json.loads(await anext(lines))["value"] == str(n)


async def test_a_line_break_in_a_record_breaks_no_event(broker: Broker, port: int) -> None:
    await append(broker.log, b'{"a":\r\n1}', "\u2028\x85".join('""').encode())
    async with following(port) as answer:
        values = [event.data["value"] for event in await Events(answer).take(2)]
    assert values == [{"a": 1}, "\u2028\x85"]


async def test_keep_alives_are_sent(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "KEEPALIVE_S", 0.02)
    async with following(port) as answer:
        events = Events(answer)
        reading = asyncio.create_task(events.next())
        await until(lambda: events.comments >= 3)
        await append(broker.log, *numbers(0))
        assert (await reading).id == "0"


@pytest.mark.parametrize(
    ("accept", "query", "status", "code"),
    [
        (SSE, {"offset": "9"}, 400, 40002),
        (SSE, {"format": "x"}, 400, 40002),
        (SSE, {"on_error": "x"}, 400, 40002),
        (NDJSON, {"offset": "0", "follow": "true"}, 422, 422),
    ],
)
async def test_what_is_wrong_at_first_has_a_status(
    broker: Broker, port: int, accept: str, query: dict[str, str], status: int, code: int
) -> None:
    await append(broker.log, b"no json")
    async with following(port, accept, **query) as answer:
        await answer.aread()
        assert_refused(answer, status, code)


@pytest.mark.parametrize(("accept", "query"), [(SSE, {}), (NDJSON, {"follow": "true"})])
async def test_what_goes_wrong_later_is_the_last_word(
    broker: Broker, port: int, accept: str, query: dict[str, str]
) -> None:
    await append(broker.log, *numbers(0))
    async with following(port, accept, **query) as answer:
        await until(lambda: broker.log._waiting)
        await append(broker.log, b"no json")
        text = (await answer.aread()).decode()  # it ends
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    if accept == SSE:
        assert lines[-3:-1] == ["id: 1", "event: undecodable"]
        assert len(lines) == 7  # with `retry` and the id before the first record
    said = json.loads(lines[-1].removeprefix("data: "))
    assert said["error_code"] == 422
    assert "offset 1" in said["message"]


async def test_event_source_passes_a_bad_record(broker: Broker, port: int) -> None:
    """It connects again, from the last id."""
    await append(broker.log, b"0", b"no json", b"2")
    seen: list[tuple[str, str]] = []
    for _ in range(3):
        last_id = {"event_id": seen[-1][1]} if seen else {}
        async with following(port, SSE, **last_id) as answer:
            assert answer.status_code == 200, "an EventSource closes at any other status"
            events = Events(answer)
            while not seen or seen[-1][1] != "2":
                try:
                    event = await events.next()
                except StopAsyncIteration:
                    break
                if event.id:
                    seen.append((event.kind, event.id))
    assert seen == [("message", "0"), ("undecodable", "1"), ("message", "2")]


async def test_a_damaged_object_ends_the_stream_by_name(
    broker: Broker, store: MemoryStore, port: int
) -> None:
    await post(broker.http, [{"value": "v" * 100, "partition": 0}])
    await post(broker.http, [{"value": "w" * 100, "partition": 0}])
    run = broker.log.state.partition("t", 0).tail[1]
    body, modified_ms = store._objects[run.object_key]
    store._objects[run.object_key] = (flip(body, run.position + run.size // 2), modified_ms)
    broker.log.tail.clear()
    async with following(port, max_bytes=1) as answer:
        events = Events(answer)
        assert (await events.next()).id == "0"
        event = await events.next()
        assert (event.kind, event.data["error_code"]) == ("tidelog-error", 50002)
        assert run.object_key in event.data["message"]
        with pytest.raises(StopAsyncIteration):
            await events.next()


async def test_a_deleted_topic_ends_the_stream(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "KEEPALIVE_S", 0.02)
    async with following(port) as answer:
        await until(lambda: broker.log._waiting)
        await broker.log.delete_topic("t")
        event = await Events(answer).next()
    assert (event.kind, event.data["error_code"]) == ("tidelog-error", 40401)


@pytest.mark.parametrize("accept", [SSE, NDJSON])
async def test_a_disconnected_follower_leaves_nothing_behind(
    broker: Broker, port: int, accept: str
) -> None:
    before = asyncio.all_tasks()
    await append(broker.log, *numbers(0))
    for _ in range(3):
        async with following(port, accept, follow="true") as answer:
            octets = answer.aiter_bytes()
            await anext(octets)
            await until(lambda: broker.log._waiting)
        # While nothing is committed, and long before a keep-alive would find out.
        await until(lambda: not broker.log._waiting)
        await until(lambda: asyncio.all_tasks() <= before)
    await append(broker.log, *numbers(1))
    async with following(port, accept, offset="0") as answer:
        assert positions(answer) == (2, 2, 0)


async def test_a_poll_whose_client_is_gone_ends(broker: Broker, port: int) -> None:
    before = asyncio.all_tasks()
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            await http.get(PATH, params={"timeout": "500"}, timeout=0.1)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_a_stalled_reader_delays_no_other(broker: Broker, port: int) -> None:
    await append(broker.log, *[b'"%s"' % (b"v" * 100_000)] * 100)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    writer.write(f"GET {PATH} HTTP/1.1\r\nHost: x\r\nAccept: {SSE}\r\n\r\n".encode())
    await reader.readexactly(100)
    async with following(port, offset="latest") as answer:
        await append(broker.log, b"1")
        assert (await Events(answer).next()).data["value"] == 1
    before = asyncio.all_tasks()
    writer.transport.abort()
    await until(lambda: len(asyncio.all_tasks()) < len(before))


async def test_followers_share_the_bound_of_answers(store: MemoryStore) -> None:
    async with (
        broker_on(store, fetch_bytes_in_flight=1024, fetch_bytes=1024) as broker,
        listening(broker.app) as port,
        asyncio.timeout(240),
    ):
        await broker.log.create_topic("t", 1, {})
        async with (
            following(port) as follower_a,
            following(port) as follower_b,
            following(port) as follower_c,
        ):
            for n in range(5):
                await append(broker.log, *numbers(n))
            for answer in (follower_a, follower_b, follower_c):
                events = await Events(answer).take(5)
                assert [event.id for event in events] == ["0", "1", "2", "3", "4"]
