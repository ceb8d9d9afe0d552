"""Fetches that stay open, over a real server: lines and server-sent events as committed.

Also resumption by Last-Event-ID, and no state after a disconnect.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.service.conftest import (
    JSON,
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
from tidelog.service.routes import follow_topic as follower
from tidelog.service.server.maintenance import maintain_once
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.store.folder import FolderStore
from tidelog.storage.store.memory import MemoryStore

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
PATH = "/topics/t/partitions/0/records"
TOPIC_PATH = "/topics/t/records"
of_both_kinds = pytest.mark.parametrize("path", [PATH, TOPIC_PATH], ids=["partition", "topic"])


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
async def following(
    port: int, accept: str = SSE, path: str = PATH, **query: Any
) -> AsyncIterator[httpx.Response]:
    headers = {"accept": accept, **query.pop("headers", {})}
    if (event_id := query.pop("event_id", None)) is not None:
        headers["last-event-id"] = event_id
    async with (
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client,
        client.stream("GET", path, headers=headers, params=query) as answer,
    ):
        yield answer


pytestmark = pytest.mark.broker(topics={"t": 3})


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


async def test_reader_goes_on_where_it_was(broker: Broker, port: int) -> None:
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


async def test_following_from_end_shows_what_is_new(broker: Broker, port: int) -> None:
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


async def test_line_break_in_record_breaks_no_event(broker: Broker, port: int) -> None:
    await append(broker.log, b'{"a":\r\n1}', "\u2028\x85".join('""').encode())
    async with following(port) as answer:
        values = [event.data["value"] for event in await Events(answer).take(2)]
    assert values == [{"a": 1}, "\u2028\x85"]


def live_often(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetch, follower):
        monkeypatch.setattr(module, "KEEPALIVE_S", 0.02)


@of_both_kinds
@pytest.mark.parametrize(("accept", "sign"), [(SSE, ":"), (NDJSON, "")])
async def test_idle_stream_has_signs_of_life(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch, path: str, accept: str, sign: str
) -> None:
    live_often(monkeypatch)
    async with following(port, accept, path, follow="true") as answer:
        lines, signs = answer.aiter_lines(), 0
        while signs < 3:
            line = await anext(lines)
            signs += line.startswith(sign) if sign else not line
        await append(broker.log, *numbers(0))
        while '"offset":0' not in line:
            line = await anext(lines)


@pytest.mark.parametrize(
    ("path", "accept", "query", "status", "code"),
    [
        *(
            (path, SSE, {name: text}, 400, 40002)
            for path in (PATH, TOPIC_PATH)
            for name, text in (("offset", "9"), ("format", "x"), ("on_error", "x"))
        ),
        (PATH, NDJSON, {"offset": "0", "follow": "true"}, 422, 422),
        (TOPIC_PATH, NDJSON, {"follow": "true"}, 422, 422),
        (TOPIC_PATH, NDJSON, {}, 400, 40002),
        (TOPIC_PATH, "*/*", {}, 400, 40002),
        (TOPIC_PATH, JSON, {"follow": "true"}, 406, 40601),
        (TOPIC_PATH, SSE, {"reset": "x"}, 400, 40002),
        (TOPIC_PATH, SSE, {"max_bytes": "0"}, 400, 40002),
        *(
            (TOPIC_PATH, SSE, {"last-event-id": text}, 400, 40002)
            for text in ("5", "start", "0:1,0:2", "0:-2", "0:1,", "x", "0:" + "9" * 19, "9:1")
        ),
        *(
            (TOPIC_PATH, SSE, {"event_id": text}, 400, 40002)
            for text in (",".join(f"{n}:1" for n in range(7000)), "0:1," * 12_000, "9" * 60_000)
        ),
    ],
)
async def test_what_is_wrong_at_first_has_status(
    broker: Broker, port: int, path: str, accept: str, query: dict[str, str], status: int, code: int
) -> None:
    for partition in (0, 1):
        await append(broker.log, b"no json", partition=partition)
    async with following(port, accept, path, **query) as answer:
        await answer.aread()
        message = assert_refused(answer, status, code)
    assert status != 406 or f"ask for {SSE} or {NDJSON}, not" in message


@pytest.mark.parametrize(("accept", "query"), [(SSE, {}), (NDJSON, {"follow": "true"})])
async def test_what_goes_wrong_later_is_last_word(
    broker: Broker, port: int, accept: str, query: dict[str, str]
) -> None:
    await append(broker.log, *numbers(0))
    async with following(port, accept, **query) as answer:
        await until(lambda: broker.log._log.waiting)
        await append(broker.log, b"no json")
        text = (await answer.aread()).decode()  # it ends
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    if accept == SSE:
        assert lines[-3:-1] == ["id: 1", "event: undecodable"]
        assert len(lines) == 7  # with `retry` and the id before the first record
    said = json.loads(lines[-1].removeprefix("data: "))
    assert said["error_code"] == 422
    assert "offset 1" in said["message"]


async def test_event_source_passes_bad_record(broker: Broker, port: int) -> None:
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


async def test_damaged_object_ends_stream_by_name(
    broker: Broker, store: MemoryStore, port: int
) -> None:
    await post(broker.http, [{"value": "v" * 100, "partition": 0}])
    await post(broker.http, [{"value": "w" * 100, "partition": 0}])
    run = broker.log.state.partition("t", 0).tail[1]
    body, modified_ms = store._objects[run.object_key]
    store._objects[run.object_key] = (flip(body, run.position + run.size // 2), modified_ms)
    broker.log._log.tail.clear()
    async with following(port, max_bytes=1) as answer:
        events = Events(answer)
        assert (await events.next()).id == "0"
        event = await events.next()
        assert (event.kind, event.data["error_code"]) == ("tidelog-error", 50002)
        assert run.object_key in event.data["message"]
        with pytest.raises(StopAsyncIteration):
            await events.next()


@of_both_kinds
@pytest.mark.parametrize("accept", [SSE, NDJSON])
@pytest.mark.parametrize(("end", "code"), [("deletion", 40401), ("drain", 50302)])
async def test_last_word_of_stream_is_error(
    broker: Broker,
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    accept: str,
    end: str,
    code: int,
) -> None:
    live_often(monkeypatch)
    await append(broker.log, *numbers(0))
    async with following(port, accept, path, follow="true") as answer:
        await until(lambda: broker.log._log.waiting)
        if end == "deletion":
            await broker.log.topics.delete("t")
        else:
            broker.log.drain()
        text = (await answer.aread()).decode()
    lines = [line for line in text.splitlines() if line and not line.startswith(":")]
    said = json.loads(lines[-1].removeprefix("data: "))
    assert said["error_code"] == code
    if accept == SSE:
        assert lines[-2] == "event: tidelog-error"
        assert "retry: 500" in lines, "how soon to come back"
    else:
        assert said.get("type") == "error"


@of_both_kinds
@pytest.mark.parametrize("accept", [SSE, NDJSON])
async def test_disconnected_follower_leaves_nothing_behind(
    broker: Broker, port: int, path: str, accept: str
) -> None:
    before = asyncio.all_tasks()
    await append(broker.log, *numbers(0))
    for _ in range(3):
        async with following(port, accept, path, follow="true") as answer:
            octets = answer.aiter_bytes()
            await anext(octets)
            await until(lambda: broker.log._log.waiting)
        # While nothing is committed, and long before a keep-alive would find out.
        await until(lambda: not broker.log._log.waiting)
        await until(lambda: asyncio.all_tasks() <= before)
    await append(broker.log, *numbers(1))
    async with following(port, accept, offset="0") as answer:
        assert positions(answer) == (2, 2, 0)


async def test_poll_whose_client_is_gone_ends(broker: Broker, port: int) -> None:
    before = asyncio.all_tasks()
    with pytest.raises(httpx.ReadTimeout):
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            await http.get(PATH, params={"timeout": "500"}, timeout=0.1)
    await until(lambda: asyncio.all_tasks() <= before)


async def test_stalled_reader_delays_no_other(broker: Broker, port: int) -> None:
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


@of_both_kinds
@pytest.mark.broker(fetch_bytes_in_flight=1024, fetch_bytes=1024)
async def test_followers_share_bound_of_answers(broker: Broker, port: int, path: str) -> None:
    async with (
        following(port, path=path) as first,
        following(port, path=path) as second,
        following(port, path=path) as third,
    ):
        for n in range(6):
            await append(broker.log, *numbers(n), partition=n % 3 if path == TOPIC_PATH else 0)
        for answer in (first, second, third):
            events = await Events(answer).take(6)
            assert sorted(event.data["value"] for event in events) == [*range(6)]
            assert path == TOPIC_PATH or [event.id for event in events] == list("012345")
    await until(lambda: broker.app.admission.answers.used == 0)


@pytest.mark.parametrize("count", [0, 2])
async def test_cut_before_first_event_loses_no_record(
    broker: Broker, port: int, count: int
) -> None:
    if count:
        await append(broker.log, *numbers(*range(count)))
    last_id = {}
    async with following(port, offset="latest") as answer:
        lines = answer.aiter_lines()
        while line := await anext(lines):  # what comes first ends with an empty line
            if line.startswith("id:"):
                last_id = {"event_id": line.removeprefix("id:").strip()}
    await append(broker.log, *numbers(*range(count, count + 3)))
    async with following(port, offset="latest", **last_id) as answer:  # as an EventSource does
        assert answer.status_code == 200
        await append(broker.log, *numbers(count + 3, count + 4))
        events = Events(answer)
        seen = [(await events.next()).data["value"]]
        while seen[-1] != count + 4:
            seen.append((await events.next()).data["value"])
    assert seen == list(range(count, count + 5))


@pytest.mark.parametrize("reset", ["earliest", "latest"])
async def test_topic_that_was_created_again_is_followed(
    broker: Broker, port: int, reset: str
) -> None:
    await append(broker.log, *numbers(0))
    async with following(port, event_id="3", reset=reset) as answer:
        assert answer.status_code == 200
        await append(broker.log, *numbers(1))
        events = Events(answer)
        while (event := await events.next()).kind != "message":
            pass
        assert event.id == {"earliest": "0", "latest": "1"}[reset]


async def test_log_that_begins_later_is_followed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    async with asyncio.timeout(60), broker_on(store) as broker:
        await broker.log.topics.create("t", 1, {"retention.ms": "-1"})
        for number in range(3):
            await append(broker.log, *numbers(number))
            await broker.log.records.seal("t")
        await broker.log.topics.alter("t", {"retention.ms": "86400000"})
        settings = Settings(store=(tmp_path / "store").as_uri())
        await maintain_once(settings, broker.log, MaintenanceCounters())
        assert (await broker.log.records.offsets("t", 0)).log_start_offset == 3, (
            "records of years ago"
        )
        async with (
            listening(broker.app) as port,
            following(port, event_id="0", reset="earliest") as answer,
        ):
            assert answer.status_code == 200
            await append(broker.log, *numbers(3))
            events = Events(answer)
            passed = await events.next()
            assert passed.kind != "message", "it says which records were passed over"
            assert (await events.next()).id == "3"
    await store.close()
