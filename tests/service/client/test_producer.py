"""AsyncProducer: order, exactly once under faults, bounds, errors of single records."""

import asyncio
import json
import re
from typing import Any

import pytest

from tests.service.client.faults import (
    BUSY,
    LOST,
    PAGE,
    REFUSED,
    THROTTLED,
    UNKNOWN,
    FaultyTransport,
    at_random,
    script,
)
from tests.service.conftest import Broker, ends, stored
from tidelog.client import (
    AsyncProducer,
    BadArgument,
    Closed,
    Delivered,
    NotABroker,
    NotFound,
    NotReachable,
    Refused,
)
from tidelog.service.client.connection import Connection


def connection(broker: Broker, choose: Any = None) -> Connection:
    transport = FaultyTransport(broker.app, *([choose] if choose else []))
    return Connection("a:1,b:2", transport=transport)


async def test_record_has_its_place_key_headers_and_time(broker: Broker, topic: str) -> None:
    async with connection(broker) as client, AsyncProducer(client) as producer:
        sent = await producer.send(
            topic, "text", key=b"k", headers=[("h", b"\xff"), ("n", None)], timestamp_ms=1234
        )
        partition = (await sent).partition
        assert await sent == Delivered(topic, partition, 0)
        null = await producer.send(topic, None, partition=partition)
        assert await null == Delivered(topic, partition, 1)
    first, second = await stored(broker.log, partition)
    assert (first["key"], first["value"]) == (b"k", b"text")
    assert [(header["key"], header["value"]) for header in first["headers"]] == [
        ("h", b"\xff"),
        ("n", None),
    ]
    assert first["timestamp"].timestamp() * 1000 == 1234
    assert (second["key"], second["value"]) == (None, None)


async def test_json_is_stored_as_json(broker: Broker, topic: str) -> None:
    async with connection(broker) as client, AsyncProducer(client, format="json") as producer:
        await (await producer.send(topic, {"n": [1, None]}, key="k", partition=0))
        with pytest.raises(BadArgument, match="JSON"):
            await producer.send(topic, object())
    (record,) = await stored(broker.log)
    assert (record["key"], json.loads(record["value"])) == (b'"k"', {"n": [1, None]})


@pytest.mark.parametrize("seed", range(4))
async def test_under_faults_each_record_is_there_once_in_order(
    broker: Broker, topic: str, seed: int
) -> None:
    faults = at_random(seed, 0.4, REFUSED, LOST, BUSY, UNKNOWN, THROTTLED)
    async with connection(broker, faults) as client:
        producer = AsyncProducer(client, batch_records=7, linger_ms=0, buffer_bytes=4000)
        async with producer:
            sent = []
            for number in range(200):
                key = None if number % 3 == 0 else f"key{number % 11}"
                sent.append(await producer.send(topic, str(number), key=key))
        places = [(future.result().partition, future.result().offset) for future in sent]
    assert sum(ends(broker.log)) == 200
    for partition in range(3):
        values = [int(row["value"]) for row in await stored(broker.log, partition)]
        assert values == sorted(values)
        assert places == [
            (partition, values.index(n)) if n in values else place for n, place in enumerate(places)
        ]
    assert client.retries > 0


async def test_retry_has_same_key_and_bytes(broker: Broker, topic: str) -> None:
    transport = FaultyTransport(
        broker.app, script(LOST, UNKNOWN, BUSY, of="/topics/t", method="POST")
    )
    async with Connection("a:1,b:2", transport=transport) as client:
        async with AsyncProducer(client) as producer:
            await producer.send(topic, "x")
    sent = [request for request in transport.bodies("/topics/t") if request[0]]
    assert len(sent) == 4
    assert len(set(sent)) == 1
    assert sum(ends(broker.log)) == 1


async def test_one_bad_record_fails_alone_and_is_named(broker: Broker, topic: str) -> None:
    async with connection(broker) as client, AsyncProducer(client, linger_ms=50) as producer:
        sent = []
        for number in range(20):
            value = b"x" * 2_000_000 if number == 13 else str(number)
            sent.append(await producer.send(topic, value, partition=1))
        done = await asyncio.gather(*sent, return_exceptions=True)
    failed = [outcome for outcome in done if isinstance(outcome, Exception)]
    assert len(failed) == 1
    assert isinstance(failed[0], Refused)
    assert str(done[13]).startswith("topic 't', partition 1, record 13 of this producer: ")
    assert "max.message.bytes" in str(done[13])
    values = [row["value"] for row in await stored(broker.log, 1)]
    assert values == [str(n).encode() for n in range(20) if n != 13]


async def test_unknown_topic_fails_future(broker: Broker) -> None:
    async with connection(broker) as client, AsyncProducer(client) as producer:
        sent = await producer.send("nowhere", "x")
        with pytest.raises(NotFound, match="topic 'nowhere'"):
            await sent


async def test_after_deadline_outcome_is_unknown(broker: Broker, topic: str) -> None:
    faults = script(*[LOST] * 100, of="/topics/t", method="POST")
    async with connection(broker, faults) as client:
        async with AsyncProducer(client, delivery_s=0.2) as producer:
            sent = await producer.send(topic, "x")
            with pytest.raises(NotReachable, match="it is unknown whether") as caught:
                await sent
    assert caught.value.is_unknown


async def test_page_of_proxy_leaves_outcome_unknown(broker: Broker, topic: str) -> None:
    async with connection(broker, script(PAGE, of="/topics/t", method="POST")) as client:
        async with AsyncProducer(client) as producer:
            sent = await producer.send(topic, "x")
            with pytest.raises(NotABroker, match="it is unknown whether") as caught:
                await sent
    assert caught.value.is_unknown
    assert sum(ends(broker.log)) == 1


@pytest.mark.parametrize("path", ["/partitions", "/clusters"])
async def test_outcome_is_known_if_nothing_was_sent(broker: Broker, topic: str, path: str) -> None:
    async with connection(broker, script(*[PAGE] * 9, of=path)) as client:
        async with AsyncProducer(client) as producer:
            transaction = producer.transaction()
            transaction.send(topic, "a")
            work = transaction.commit()
            if path == "/partitions":
                work.close()
                work = await producer.send(topic, "x")
            with pytest.raises(NotABroker) as caught:
                await work
    assert not caught.value.is_unknown


async def test_transaction_answered_by_proxy_is_no_success(broker: Broker, topic: str) -> None:
    async with connection(broker, script(PAGE, of="/transactions")) as client:
        async with AsyncProducer(client) as producer:
            transaction = producer.transaction()
            transaction.send(topic, "a")
            with pytest.raises(NotABroker) as caught:
                await transaction.commit()
            assert caught.value.is_unknown
            await transaction.commit()
    assert sum(ends(broker.log)) == 1


async def test_buffer_is_bounded(broker: Broker, topic: str) -> None:
    gate = asyncio.Event()

    class Gated(FaultyTransport):
        async def handle_async_request(self, request: Any) -> Any:
            if request.method == "POST":
                await gate.wait()
            return await super().handle_async_request(request)

    async with Connection("a:1", transport=Gated(broker.app)) as client:
        async with AsyncProducer(client, buffer_bytes=1000, linger_ms=0) as producer:
            for _ in range(4):
                await producer.send(topic, b"x" * 100)
            waiting = asyncio.ensure_future(producer.send(topic, b"x" * 100))
            await asyncio.sleep(0.02)
            assert not waiting.done()
            gate.set()
            await (await waiting)
    assert sum(ends(broker.log)) == 5


async def test_records_of_closed_producer_have_outcome(broker: Broker, topic: str) -> None:
    async with connection(broker, script(*[BUSY] * 1000, method="POST")) as client:
        producer = AsyncProducer(client)
        sent = await producer.send(topic, "x")
        await producer.close(flush_s=0.1)
        with pytest.raises(Closed):
            await sent
        with pytest.raises(Closed):
            await producer.send(topic, "y")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"value": 1}, "int is not bytes"), ({"value": "x", "partition": -1}, "negative")],
)
async def test_wrong_argument_is_error_at_once(
    broker: Broker, arguments: dict[str, Any], words: str
) -> None:
    async with connection(broker) as client, AsyncProducer(client) as producer:
        with pytest.raises(BadArgument, match=words):
            await producer.send("t", **arguments)
        with pytest.raises(BadArgument, match="no such option"):
            AsyncProducer(client, lingers=1)


async def test_transaction_is_committed_once(broker: Broker, topic: str) -> None:
    faults = script(LOST, UNKNOWN, of="/transactions")
    async with connection(broker, faults) as client, AsyncProducer(client) as producer:
        async with producer.transaction() as transaction:
            transaction.send(topic, "a", key="k", headers=[("h", "v")], timestamp_ms=5)
            transaction.commit_offsets("g", {(topic, 2): 0})
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction() as transaction:
                transaction.send(topic, str(1 / 0))
        async with producer.transaction():
            pass  # empty: no request
    assert sum(ends(broker.log)) == 1
    assert broker.log.state.committed_offsets.of_group("g")


async def test_error_that_no_caller_awaits_is_logged_once(
    broker: Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with connection(broker) as client, AsyncProducer(client, linger_ms=0) as producer:
        for number in range(3):
            await producer.send("nowhere", str(number))
            await producer.flush()
        await producer.send(topic, b"x" * 2_000_000, partition=0)
        await producer.send(topic, "good")
    lines = [record.message for record in caplog.records if record.name == "tidelog.client"]
    assert len(lines) == 2
    assert lines[0].startswith("topic 'nowhere', partition 0, record 0 of this producer: ")
    assert lines[1].startswith("topic 't', partition 0, record 0 of this producer: ")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"a": "b"}, "headers: a dict is no list of pairs: give headers=list(d.items())"),
        (["ab"], "headers: 'ab' is not a pair of a name (str) and a value"),
        ([("a",)], "headers: ('a',) is not a pair of a name (str) and a value"),
        ([(b"a", b"b")], "headers: (b'a', b'b') is not a pair of a name (str) and a value"),
        ([("a", 1)], "header 'a': int is not bytes, str or None"),
    ],
)
async def test_headers_of_another_form_are_refused(
    broker: Broker, topic: str, headers: Any, message: str
) -> None:
    async with connection(broker) as client, AsyncProducer(client) as producer:
        with pytest.raises(BadArgument, match=re.escape(message)):
            await producer.send(topic, "x", headers=headers)
        with pytest.raises(BadArgument, match=re.escape(message)):
            producer.transaction().send(topic, "x", headers=headers)
