"""`on_error` of all readers: fetches, followers, and consumer instances of each dialect."""

import base64
import json
from typing import Any

import httpx
import pytest

from tests.service.conftest import (
    JSON,
    TEXT,
    Broker,
    append,
    assert_refused,
    broker_on,
    positions,
    send,
)
from tests.service.instances import STRIMZI, Instance, created, subscribed
from tests.service.test_fetch import get
from tests.service.test_follow import NDJSON, SSE, Events, following
from tidelog.storage.store.memory import MemoryStore

BAD = b"\xff"
BAD_TEXT = base64.b64encode(BAD).decode()
CONFLUENT = {"auto.commit.enable": "false", "auto.offset.reset": "earliest", "format": "json"}


pytestmark = pytest.mark.broker(topics={"t": 2}, records=[b"0", BAD, b"2", BAD])
"""Good, bad, good, bad in the first partition, nothing in the second."""


def records_of(answer: httpx.Response) -> list[Any]:
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"] == NDJSON:
        return [json.loads(line) for line in answer.text.splitlines()]
    records: list[Any] = answer.json()
    return records


def offsets_of(answer: httpx.Response) -> list[int]:
    return [record["offset"] for record in records_of(answer)]


async def metric(broker: Broker, on_error: str) -> float:
    text = (await broker.http.get("/metrics")).text
    name = f'tidelog_undecodable_records_total{{on_error="{on_error}"}} '
    return sum(float(line.removeprefix(name)) for line in text.splitlines() if name in line)


# -- fetches


@pytest.mark.parametrize("accept", [JSON, TEXT, NDJSON])
async def test_fetch_stops_skips_or_shows_bytes(broker: Broker, accept: str) -> None:
    answer = await get(broker, accept)
    assert offsets_of(answer) == [0]
    assert positions(answer) == (1, 4, 0)
    assert answer.headers["tidelog-undecodable"] == "t-0@1"
    message = assert_refused(await get(broker, accept, offset=1), 422, 422)
    assert message.startswith("value deserialization error")
    assert "partition t-0, offset 1" in message
    assert "on_error=skip" in message

    answer = await get(broker, accept, on_error="skip")
    assert offsets_of(answer) == [0, 2]
    assert positions(answer) == (4, 4, 0)
    assert answer.headers["tidelog-skipped"] == "2"
    assert answer.headers["tidelog-first-skipped"] == "t-0@1"
    answer = await get(broker, accept, on_error="skip", offset=3)
    assert offsets_of(answer) == []
    assert positions(answer) == (4, 4, 0)
    assert await metric(broker, "skip") == 3

    answer = await get(broker, accept, on_error="raw")
    assert offsets_of(answer) == [0, 1, 2, 3]
    assert positions(answer) == (4, 4, 0)
    shown = [(record["value"] is None, record.get("value_base64")) for record in records_of(answer)]
    assert shown == [(False, None), (True, BAD_TEXT)] * 2
    assert not {"tidelog-skipped", "tidelog-undecodable"} & answer.headers.keys()
    assert await metric(broker, "raw") == 2


@pytest.mark.parametrize("accept", [JSON, "application/vnd.kafka.binary.v2+json"])
async def test_any_other_word_is_refused(broker: Broker, accept: str) -> None:
    message = assert_refused(await get(broker, accept, on_error="pass"), 400, 40002)
    assert message == "parameter on_error='pass' must be stop, skip or raw"


# -- followers


async def test_events_name_what_is_skipped(broker: Broker, port: int) -> None:
    async with following(port, SSE, on_error="skip") as answer:
        events = Events(answer)
        seen = await events.take(3)
        assert [(event.kind, event.id) for event in seen] == [
            ("message", "0"),
            ("message", "2"),
            ("skipped", "3"),
        ]
        assert seen[-1].data == {"skipped": 2, "first_skipped_offset": 1}
        await append(broker.log, BAD)
        event = await events.next()
        assert (event.kind, event.id) == ("skipped", "4")
        await append(broker.log, b"5")
        assert (await events.next()).data["value"] == 5


async def test_events_begin_with_record_that_does_not_decode(broker: Broker, port: int) -> None:
    """An EventSource ends for good at any other status than 200."""
    async with following(port, SSE, offset="1") as answer:
        assert answer.status_code == 200
        events = Events(answer)
        event = await events.next()
        assert (event.kind, event.id, event.data["error_code"]) == ("undecodable", "1", 422)
        with pytest.raises(StopAsyncIteration):
            await events.next()


@pytest.mark.parametrize("accept", [SSE, NDJSON])
async def test_followers_get_bytes_if_they_ask(broker: Broker, port: int, accept: str) -> None:
    query = {"on_error": "raw", "follow": "true"}
    async with following(port, accept, **query) as answer:
        seen: list[Any] = []
        async for line in answer.aiter_lines():
            text = line.removeprefix("data: ")
            if text.startswith("{"):
                seen.append(json.loads(text))
            if len(seen) == 4:
                break
    assert [record.get("value_base64") for record in seen] == [None, BAD_TEXT] * 2


async def test_lines_name_what_is_skipped(broker: Broker, port: int) -> None:
    query = {"on_error": "skip", "follow": "true"}
    async with following(port, NDJSON, **query) as answer:
        lines = answer.aiter_lines()
        assert [json.loads(await anext(lines))["offset"] for _ in range(2)] == [0, 2]
        assert json.loads(await anext(lines)) == {"skipped": 2, "first_skipped_offset": 1}
        await append(broker.log, b"4")
        assert json.loads(await anext(lines))["offset"] == 4


# -- consumer instances


async def member_of(broker: Broker, dialect: dict[str, Any], **more: Any) -> Instance:
    member = await created(broker, **dialect, **more)
    await member.ok("POST", "/subscription", {"topics": ["t"]})
    return member


@pytest.mark.parametrize("dialect", [CONFLUENT, STRIMZI], ids=["confluent", "strimzi"])
@pytest.mark.parametrize("max_bytes", [1, 1_000_000])
async def test_partition_that_stops_keeps_back_no_other(
    broker: Broker, dialect: dict[str, Any], max_bytes: int
) -> None:
    """Also if one portion takes all bytes of a read."""
    member = await member_of(broker, dialect)
    seen: list[tuple[int, int]] = []
    for number in range(12):
        if number in (3, 7):
            await append(broker.log, b"10", b"11", partition=1)
        answer = await member("GET", f"/records?timeout=0&max_bytes={max_bytes}")
        if answer.status_code == 422:
            assert "partition t-0, offset 1" in answer.json()["message"]
            continue
        places = [(record["partition"], record["offset"]) for record in records_of(answer)]
        assert places, "an error, while nothing else is to be delivered"
        assert answer.headers.get("tidelog-undecodable", "t-0@1") == "t-0@1"
        seen += places
    assert sorted(seen) == [(0, 0), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert await member.read(timeout=0, on_error="skip") == [2]


async def test_answer_names_partition_that_has_stopped(broker: Broker) -> None:
    member = await subscribed(broker)
    assert await member.read() == [0]
    await append(broker.log, b"10", partition=1)
    answer = await member("GET", "/records?timeout=0")
    assert [record["value"] for record in records_of(answer)] == [10]
    assert answer.headers["tidelog-undecodable"] == "t-0@1"


async def test_i3_error_comes_only_if_no_broker_has_acked_other_records(
    broker: Broker, store: MemoryStore
) -> None:
    member = await subscribed(broker)
    assert await member.read() == [0]
    async with broker_on(store, "broker-2") as other:
        await append(other.log, b"10", partition=1)
        assert await member.read(timeout=0) == [10]


async def test_partition_that_stops_ends_wait_for_more_bytes(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = await subscribed(broker, fetch_min_bytes=1_000_000)
    assert await member.read(timeout=0) == [0]
    await append(broker.log, b"10", partition=1)
    fetch, fetches = broker.log.records.fetch, []

    async def counted(*where: Any, **more: Any) -> Any:
        fetches.append(where)
        return await fetch(*where, **more)

    monkeypatch.setattr(broker.log.records, "fetch", counted)
    assert await member.read(timeout=1000) == [10]
    assert len(fetches) <= 4, "the read looks again and again at the partition that stops"


async def test_what_is_committed_is_what_was_delivered(broker: Broker) -> None:
    member = await subscribed(broker, auto_commit_enable=False)
    assert await member.read() == [0]
    await member.ok("POST", "/offsets")
    assert (await member.committed())[0] == 1
    assert (await member("GET", "/records?timeout=0")).status_code == 422
    await member.ok("POST", "/offsets")
    assert (await member.committed())[0] == 1
    assert await member.read(on_error="skip") == [2]
    await member.ok("POST", "/offsets")
    assert (await member.committed())[0] == 4


@pytest.mark.parametrize("dialect", [CONFLUENT, STRIMZI], ids=["confluent", "strimzi"])
async def test_setting_of_instance(broker: Broker, dialect: dict[str, Any]) -> None:
    member = await member_of(broker, dialect, name="skips", **{"on.error": "skip"})
    answer = await member("GET", "/records", accept=JSON)
    assert offsets_of(answer) == [0, 2]
    assert answer.headers["content-type"] == JSON
    assert answer.headers["tidelog-skipped"] == "2"
    await member.ok("DELETE")
    raw = await member_of(broker, dialect, name="raw", **{"on.error": "raw"})
    answer = await raw("GET", "/records")
    assert [record.get("value_base64") for record in records_of(answer)] == [None, BAD_TEXT] * 2
    assert_refused(await raw("GET", "/records?on_error=x"), 400, 40002)
    is_strimzi = dialect is STRIMZI
    answer = await raw("POST", "/offsets")
    assert answer.status_code == (204 if is_strimzi else 200), "the dialect is not another"


async def test_read_chooses_for_itself(broker: Broker) -> None:
    member = await subscribed(broker, **{"on.error": "skip"})
    assert offsets_of(await member("GET", "/records?on_error=stop")) == [0]
    assert_refused(await member("GET", "/records?on_error=stop"), 422, 422)
    assert await member.read() == [2]


async def test_instance_with_another_word_is_refused(broker: Broker) -> None:
    body = json.dumps({"on.error": "x"})
    answer = await send(broker.http, body, "application/vnd.kafka.v2+json", "/consumers/g")
    message = assert_refused(answer, 422, 42204)
    assert message == "Invalid value 'x' for configuration on.error: one of stop, skip, raw"
