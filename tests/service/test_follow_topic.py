"""Followers of a topic over a real server: all partitions in one stream, resumed by a vector."""

import asyncio
import functools
import json
from typing import Any

import httpx
import pytest

from tests.service import test_follow
from tests.service.conftest import (
    JSON,
    Broker,
    append,
    assert_refused,
    send,
    until,
)
from tests.service.keyed import SETTINGS, allow, key_of
from tests.service.test_follow import NDJSON, SSE, TOPIC_PATH, Event, Events, numbers
from tidelog.service.formats import events as event_texts
from tidelog.service.formats.fetched import FetchPage, FetchParams
from tidelog.service.http.request import HttpRequest
from tidelog.service.routes import follow_topic as follower
from tidelog.service.routes import follower_bounds
from tidelog.service.routes.fetch import Fetch
from tidelog.service.security.caller import ALL_RIGHTS
from tidelog.storage.core.actions import DeleteKey, LoseRecords
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.read.long_polls import TopicChanges
from tidelog.storage.read.reader import Reader
from tidelog.storage.records import ClusterRecords
from tidelog.storage.state.access import CONSUMER_BYTE_RATE
from tidelog.storage.state.topic import Topic

PATH = TOPIC_PATH
following = functools.partial(test_follow.following, path=PATH)
pytestmark = pytest.mark.broker(topics={"t": 3})


def seen(received: list[Event]) -> list[tuple[int, int]]:
    return [(event.data["partition"], event.data["offset"]) for event in received]


async def first_id(answer: httpx.Response) -> str:
    """The id that comes before all records."""
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            return line.removeprefix("id: ")
    raise AssertionError("no id")


@pytest.mark.broker(topics={"t": 6})
async def test_thousand_records_of_six_partitions_come_in_order_of_each(
    broker: Broker, port: int
) -> None:
    async def produce() -> None:
        for first in range(0, 1000, 10):
            await append(broker.log, *numbers(*range(first, first + 10)), partition=first // 10 % 6)

    async with following(port, max_bytes=50) as answer:
        producing = asyncio.create_task(produce())
        received = await Events(answer).take(1000)
        await producing
    for partition in range(6):
        offsets = [offset for number, offset in seen(received) if number == partition]
        assert offsets == list(range(len(offsets)))
    expected = [0] * 6
    for event in received:
        expected[event.data["partition"]] += 1
        assert event.id.encode() == event_texts.vector(expected)


async def test_cut_anywhere_loses_and_repeats_nothing(broker: Broker, port: int) -> None:
    for partition, count in enumerate((5, 1, 7)):
        await append(broker.log, *numbers(*range(count)), partition=partition)
    received: list[Event] = []
    event_id: str | None = None
    while len(received) < 13:
        async with following(port, event_id=event_id, max_bytes=2) as answer:
            received += await Events(answer).take(1)
        event_id = received[-1].id
    assert sorted(seen(received)) == [
        (number, offset) for number, count in enumerate((5, 1, 7)) for offset in range(count)
    ]
    assert event_id == "0:4,1:0,2:6"


async def test_cut_before_first_record_of_latest_loses_nothing(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0, 1), partition=1)
    async with following(port, offset="latest") as answer:
        event_id = await first_id(answer)
    assert event_id == "0:-1,1:1,2:-1"
    await append(broker.log, *numbers(0), partition=2)
    await append(broker.log, *numbers(2), partition=1)
    async with following(port, offset="latest", event_id=event_id) as answer:
        assert sorted(seen(await Events(answer).take(2))) == [(1, 2), (2, 0)]


async def test_partitions_added_later_are_read_from_their_beginning(
    broker: Broker, port: int
) -> None:
    async with following(port, offset="latest") as answer:
        events = Events(answer)
        await append(broker.log, *numbers(0))
        event_id = (await events.next()).id
        assert event_id == "0:0,1:-1,2:-1"
        await broker.log.topics.add_partitions("t", 5)
        await append(broker.log, *numbers(0, 1), partition=4)
        received = await events.take(2)
        assert seen(received) == [(4, 0), (4, 1)]
        assert received[-1].id == "0:0,1:-1,2:-1,3:-1,4:1"
    await append(broker.log, *numbers(0), partition=3)
    async with following(port, offset="latest", event_id=event_id) as answer:  # of three
        assert sorted(seen(await Events(answer).take(3))) == [(3, 0), (4, 0), (4, 1)]


async def test_partition_with_many_records_does_not_hold_up_another(
    broker: Broker, port: int
) -> None:
    await append(broker.log, *numbers(*range(200)), partition=0)
    await append(broker.log, *numbers(*range(3)), partition=2)
    async with following(port, max_bytes=10) as answer:
        received = seen(await Events(answer).take(40))
    assert [place for place in received if place[0] == 2] == [(2, 0), (2, 1), (2, 2)]
    assert received.index((2, 2)) < 20


async def test_one_waiter_and_one_wake_up_for_all_partitions(broker: Broker, port: int) -> None:
    async with following(port, offset="latest") as answer:
        await until(lambda: broker.log._log.waiting)
        assert [len(waiters) for waiters in broker.log._log.waiting.values()] == [1]
        await append(broker.log, *numbers(0), partition=2)
        assert seen(await Events(answer).take(1)) == [(2, 0)]
    await until(lambda: not broker.log._log.waiting)


async def test_one_write_has_records_of_all_partitions_of_commit(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions, written, turns = 2 * follower.PAGES_AT_ONCE, list[int](), list[ClusterRecords]()
    real_chunk, real_turn = HttpRequest.chunk, ClusterRecords.turn

    async def chunk(call: HttpRequest, body: bytes) -> None:
        written.append(body.count(b"\ndata: "))
        await real_chunk(call, body)

    async def turn(records: ClusterRecords) -> None:
        turns.append(records)
        await real_turn(records)

    await broker.log.topics.add_partitions("t", partitions)
    async with following(port, offset="latest") as answer:
        await until(lambda: broker.log._log.waiting)
        monkeypatch.setattr(HttpRequest, "chunk", chunk)
        monkeypatch.setattr(ClusterRecords, "turn", turn)
        records = ",".join(f'{{"partition":{n},"value":1}}' for n in range(partitions))
        body = f'{{"records":[{records}]}}'
        made = await send(broker.http, body, JSON)
        assert made.status_code == 200
        received = await Events(answer).take(partitions)
        assert seen(received) == [(partition, 0) for partition in range(partitions)]
        await until(lambda: broker.log._log.waiting)
    assert written == [follower.PAGES_AT_ONCE] * 2
    assert len(turns) == 1, "the second write is behind other readers"


@pytest.mark.broker(topics={"t": 256})
async def test_wake_up_looks_at_changed_partitions_alone(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[list[int] | None] = []
    real = TopicChanges.since

    def since(changes: TopicChanges, count: int) -> list[int] | None:
        looked_at.append(real(changes, count))
        return looked_at[-1]

    monkeypatch.setattr(TopicChanges, "since", since)
    async with following(port, offset="latest") as answer:
        events = Events(answer)
        for partition in (7, 200, 7):
            await until(lambda: broker.log._log.waiting)
            await append(broker.log, *numbers(1), partition=partition)
            await events.next()
    assert looked_at[0] is None
    assert [numbers for numbers in looked_at[1:] if numbers] == [[7], [200], [7]]
    assert None not in looked_at[1:]


async def test_followers_at_same_offsets_read_records_once(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    real = Reader.read

    async def counted(reader: Reader, topic: Topic, partition: int, *arguments: Any) -> Any:
        read.append(partition)
        return await real(reader, topic, partition, *arguments)

    monkeypatch.setattr(Reader, "read", counted)
    one_path = "/topics/t/partitions/2/records"
    async with (
        following(port, offset="latest") as first,
        following(port, offset="latest") as second,
        following(port, path=one_path, offset="latest") as third,
        following(port, path=one_path, offset="latest") as fourth,
    ):
        streams = [Events(answer) for answer in (first, second, third, fourth)]
        for number in range(2):
            await until(lambda: sum(map(len, broker.log._log.waiting.values())) == 4)
            await append(broker.log, *numbers(number), partition=2)
            for events in streams:
                event = await events.next()
                assert (event.data["offset"], event.data["value"]) == (number, number)
            assert read == [2] * (number + 1)
    for lost in range(2):  # a repair ends what is shared
        async with following(port) as answer:
            assert seen(await Events(answer).take(1)) == [(2, lost)]
        await broker.log._log.submit(LoseRecords(broker.log.state.topic("t").topic_id, 2, 0, 1))


async def test_error_comes_after_records_of_other_partitions(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Fetch.page

    async def page(fetcher: Fetch, view: FetchParams, *arguments: Any, **more: Any) -> FetchPage:
        if view.partition == 1:
            raise Corrupt("wal/1", "a test")
        return await real(fetcher, view, *arguments, **more)

    for partition in range(3):
        await append(broker.log, *numbers(1), partition=partition)
    monkeypatch.setattr(Fetch, "page", page)
    async with following(port) as answer:
        received = await Events(answer).take(2)
    assert seen(received[:1]) == [(0, 0)]
    assert received[1].kind == "tidelog-error"
    assert "wal/1" in received[1].data["message"]


async def test_reset_comes_between_records_with_its_own_id(broker: Broker, port: int) -> None:
    for partition in range(3):
        await append(broker.log, *numbers(1), partition=partition)
    async with following(port, event_id="0:-1,1:9,2:-1", reset="earliest") as answer:
        received = await Events(answer).take(4)
    assert [(event.kind, event.id) for event in received] == [
        ("message", "0:0,1:9,2:-1"),
        ("reset", "0:0,1:-1,2:-1"),
        ("message", "0:0,1:-1,2:0"),
        ("message", "0:0,1:0,2:0"),
    ]


async def test_lines_begin_with_position_and_have_signs_of_life(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "KEEPALIVE_S", 0.02)
    await append(broker.log, *numbers(0), partition=1)
    async with following(port, NDJSON, follow="true", offset="latest") as answer:
        lines = answer.aiter_lines()
        begun = json.loads(await anext(lines))
        assert begun == {"type": "position", "event_id": "0:-1,1:0,2:-1"}
        assert not await anext(lines)
        await append(broker.log, *numbers(1), partition=1)
        while not (line := await anext(lines)):
            pass
        assert json.loads(line)["offset"] == 1
    query = {"last-event-id": begun["event_id"]}
    async with following(port, NDJSON, follow="true", **query) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        assert json.loads(await anext(lines))["offset"] == 1


async def test_record_that_does_not_decode_is_passed_by_its_id(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0), b"no json", b"2", partition=1)
    await append(broker.log, *numbers(0), partition=2)
    received: list[Event] = []
    event_id: str | None = None
    for _ in range(3):
        async with following(port, event_id=event_id) as answer:
            events = Events(answer)
            with_error = False
            while not with_error and len([e for e in received if e.kind == "message"]) < 3:
                received.append(await events.next())
                event_id = received[-1].id
                with_error = received[-1].kind == "undecodable"
    records = [event for event in received if event.kind == "message"]
    assert sorted(seen(records)) == [(1, 0), (1, 2), (2, 0)]
    (error,) = [event for event in received if event.kind == "undecodable"]
    assert error.data["error_code"] == 422
    assert "t-1, offset 1" in error.data["message"]


async def test_what_does_not_decode_is_skipped_or_raw_if_asked(broker: Broker, port: int) -> None:
    await append(broker.log, *numbers(0), b"no json", b"2", partition=1)
    async with following(port, on_error="skip") as answer:
        received = await Events(answer).take(3)
    assert [event.kind for event in received] == ["message", "message", "skipped"]
    assert received[-1].data == {"partition": 1, "skipped": 1, "first_skipped_offset": 1}
    assert received[-1].id == "0:-1,1:2,2:-1"
    async with following(port, on_error="raw") as answer:
        received = await Events(answer).take(3)
    assert received[1].data["value_base64"] == "bm8ganNvbg=="


@pytest.mark.parametrize(("reset", "offset"), [("earliest", 0), ("latest", 1)])
async def test_offset_out_of_range_is_reset_if_asked(
    broker: Broker, port: int, reset: str, offset: int
) -> None:
    await append(broker.log, *numbers(0), partition=1)
    event_id = "0:-1,1:9,2:-1,7:3"  # the topic was deleted and created again
    async with following(port, event_id=event_id) as answer:
        await answer.aread()
        assert_refused(answer, 400, 40002)
    async with following(port, event_id="0:-1,1:9,2:-1") as answer:
        await answer.aread()
        assert "offset 10 is out of range for t-1" in assert_refused(answer, 400, 40002)
    async with following(port, event_id=event_id, reset=reset) as answer:
        events = Events(answer)
        said = await events.next()
        assert (said.kind, said.id) == ("reset", f"0:-1,1:{offset - 1},2:-1")
        assert said.data == {
            "type": "reset",
            "partition": 1,
            "requested_offset": 10,
            "offset": offset,
        }
        await append(broker.log, *numbers(1), partition=1)
        assert seen([await events.next()]) == [(1, offset)]


async def test_unknown_topic_and_one_of_too_many_partitions(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = await broker.http.get("/topics/u/records", headers={"accept": SSE})
    assert_refused(answer, 404, 40401)
    monkeypatch.setattr(follower, "PARTITIONS_MAX", 2)
    async with following(port) as refused:
        await refused.aread()
        assert "has 3 partitions" in assert_refused(refused, 400, 40002)


@pytest.mark.broker(topics={"t": 2}, **SETTINGS)
async def test_right_or_key_that_is_taken_away_ends_stream(broker: Broker, port: int) -> None:
    answer = await broker.http.get(PATH, headers={"accept": SSE})
    assert answer.status_code == 401
    for cause in ("right", "key"):
        headers = await key_of(broker.log, f"User:{cause}")
        async with following(port, headers=headers) as refused:
            assert refused.status_code == 403
        await allow(broker.log, f"User:{cause}", "READ")
        async with following(port, headers=headers, offset="latest") as answer:
            events = Events(answer)
            await append(broker.log, b"1")
            assert (await events.next()).data["value"] == 1
            if cause == "right":
                await allow(broker.log, f"User:{cause}", "READ", permission="DENY")
            else:
                keys = broker.log.state.access.keys.values()
                (key_id,) = (k.key_id for k in keys if k.principal == f"User:{cause}")
                await broker.log.access.change(DeleteKey(key_id))
            await append(broker.log, b"2", partition=1)
            last = await events.next()
            assert last.kind == "tidelog-error"
            assert last.data["error_code"] == (40301 if cause == "right" else 40101)
            with pytest.raises(StopAsyncIteration):
                await events.next()


@pytest.mark.broker(topics={"t": 3}, **SETTINGS)
async def test_partitions_of_principals_followers_are_bounded(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_bounds, "FOLLOWED_PARTITIONS_MAX", 7)
    headers, others = [await key_of(broker.log, f"User:{name}") for name in "ab"]
    for name in "ab":
        await allow(broker.log, f"User:{name}", "READ")
    one_path = "/topics/t/partitions/0/records"
    before = asyncio.all_tasks()
    for _ in range(2):  # what ends is not counted any more
        async with (
            following(port, headers=headers, offset="latest"),
            following(port, headers=headers, offset="latest"),
            following(port, path=one_path, headers=headers, offset="latest"),
        ):
            for path in (PATH, one_path):
                async with following(port, path=path, headers=headers) as refused:
                    await refused.aread()
                    said = assert_refused(refused, 429, 42901)
                    assert "User:a has followers of 7 partitions at this broker" in said
            async with following(port, headers=others) as answer:  # of another principal
                assert answer.status_code == 200
        await until(lambda: asyncio.all_tasks() <= before)
    async with (
        following(port, headers=headers, offset="latest"),
        following(port, headers=headers, offset="latest") as answer,
    ):
        await until(lambda: broker.log._log.waiting)
        await broker.log.topics.add_partitions("t", 4)
        assert (await Events(answer).take(1))[0].data["error_code"] == 42901


_EVENT = (
    b'id: %d\ndata: {"topic":"t","key":null,"value":"\\n","partition":100,"offset":%d,'
    b'"timestamp":0}\n\n'
)


def test_vectors_of_large_page_come_in_bounded_pieces() -> None:
    offsets = [10**12] * 256
    body = b"".join(_EVENT % (n, n) for n in range(5000))
    pieces = list(event_texts.with_vectors(body, event_texts.pairs(offsets), 100))
    assert max(map(len, pieces)) < 2 * event_texts.PIECE_BYTES
    received = b"".join(pieces).split(b"\n\n")[:-1]
    assert len(received) == 5000
    for number, event in enumerate(received):
        event_id, _, data = event.partition(b"\ndata: ")
        assert json.loads(data)["offset"] == number
        parsed = event_texts.parse_vector(event_id.removeprefix(b"id: ").decode())
        assert parsed == {**dict.fromkeys(range(256), 10**12), 100: number + 1}


async def test_follower_is_charged_weight_of_its_records(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []

    def record(_: object, quota: str, size: int) -> None:
        if quota == CONSUMER_BYTE_RATE:
            charged.append(size)

    monkeypatch.setattr(type(ALL_RIGHTS), "record", record)
    await append(broker.log, *numbers(0, 1), partition=1)
    fetched = await broker.log.records.fetch("t", 1, 0, bytes_max=1000)
    async with following(port) as answer:
        await Events(answer).take(2)
    assert charged == [fetched.weight]
