"""Followers lose no record at a cut, and know why a stream ends."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.service.conftest import Broker, append, broker_on, listening, until
from tests.service.test_follow import NDJSON, SSE, Events, following, numbers
from tidelog.service.routes import fetch
from tidelog.service.server.maintenance import maintain_once
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.storage.store.folder import FolderStore

pytestmark = pytest.mark.broker(topics={"t": 1})


@pytest.fixture
async def port(broker: Broker) -> AsyncIterator[int]:
    async with asyncio.timeout(20), listening(broker.app) as port:
        yield port


@pytest.mark.parametrize("count", [0, 2])
async def test_a_cut_before_the_first_event_loses_no_record(
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


async def test_lines_have_signs_of_life_too(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "KEEPALIVE_S", 0.02)
    empty = 0

    async def read() -> None:
        nonlocal empty
        async with following(port, NDJSON, follow="true") as answer:
            async for line in answer.aiter_lines():
                empty += not line

    reading = asyncio.create_task(read())
    await until(lambda: len(broker.log._waiting) == 1)
    async with following(port, SSE) as answer:
        events = Events(answer)
        waiting = asyncio.create_task(events.next())
        await until(lambda: events.comments >= 10)
        waiting.cancel()
    reading.cancel()
    await asyncio.wait([reading, waiting])
    assert empty, "ten signs of life on the stream of events, none on that of lines"


@pytest.mark.parametrize("reset", ["earliest", "latest"])
async def test_a_topic_that_was_created_again_is_followed(
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


async def test_a_log_that_begins_later_is_followed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    async with asyncio.timeout(60), broker_on(store) as broker, listening(broker.app) as port:
        await broker.log.create_topic("t", 1, {"retention.ms": "-1"})
        for number in range(3):
            await append(broker.log, *numbers(number))
            await broker.log.seal("t")
        await broker.log.alter_topic("t", {"retention.ms": "86400000"})
        settings = Settings(store=(tmp_path / "store").as_uri())
        await maintain_once(settings, broker.log, MaintenanceCounters())
        assert (await broker.log.offsets("t", 0)).log_start_offset == 3, "records of years ago"
        async with following(port, event_id="0", reset="earliest") as answer:
            assert answer.status_code == 200
            await append(broker.log, *numbers(3))
            events = Events(answer)
            passed = await events.next()
            assert passed.kind != "message", "it says which records were passed over"
            assert (await events.next()).id == "3"
    await store.close()


async def test_the_last_event_has_a_name_of_its_own(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0))
    async with following(port) as answer:
        events = Events(answer)
        await events.next()
        await until(lambda: broker.log._waiting)
        broker.log.drain()
        assert (await events.next()).kind == "tidelog-error"


async def test_the_last_line_is_marked(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0))
    async with following(port, NDJSON, follow="true") as answer:
        await until(lambda: broker.log._waiting)
        broker.log.drain()
        text = (await answer.aread()).decode()
    said = json.loads(text.splitlines()[-1])
    assert said["error_code"] == 50302
    assert said.get("type") == "error"


async def test_a_stream_says_how_soon_to_come_back(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0))
    seen = []
    async with following(port) as answer:
        async for line in answer.aiter_lines():
            seen.append(line)
            if line.startswith("data:"):
                break
    assert "retry: 500" in seen
