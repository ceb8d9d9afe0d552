"""A record that is not JSON stops no reader of the records around it."""

import json

import httpx
import orjson
import pytest

from tests.service.conftest import JSON, Broker, append, listening
from tests.service.instances import subscribed
from tests.service.test_follow import NDJSON, PATH, SSE, Events, following

BAD = b"no json"


async def get(broker: Broker, accept: str = JSON, **query: str) -> httpx.Response:
    return await broker.http.get(PATH, params=query, headers={"accept": accept})


async def with_string_key(broker: Broker) -> None:
    """One record whose key is a string as most clients of Kafka have it."""
    cluster = broker.log.wal.cluster.cluster_id
    record = {
        "key": {"type": "STRING", "data": "N14228"},
        "value": {"type": "JSON", "data": {"a": 1}},
    }
    made = await broker.http.post(f"/v3/clusters/{cluster}/topics/t/records", json=record)
    assert made.json()["error_code"] == 200


@pytest.mark.parametrize("accept", [JSON, NDJSON])
async def test_the_records_before_a_bad_one_are_delivered(
    topic_broker: Broker, accept: str
) -> None:
    await append(topic_broker.log, b"0", b"1", BAD, b"3")
    answer = await get(topic_broker, accept)
    assert answer.status_code == 200, answer.text
    whole = answer.json() if accept == JSON else map(json.loads, answer.text.splitlines())
    assert [record["offset"] for record in whole][:2] == [0, 1]


async def test_a_group_gets_the_records_before_a_bad_one(topic_broker: Broker) -> None:
    await append(topic_broker.log, b"0", b"1", BAD, b"3")
    member = await subscribed(topic_broker, auto_commit_enable=False)
    assert (await member.read())[:2] == [0, 1]


async def test_the_error_names_topic_partition_offset_and_value(topic_broker: Broker) -> None:
    await append(topic_broker.log, BAD)
    message = (await get(topic_broker)).json()["message"]
    assert message.startswith("value deserialization error")
    assert "offset 0" in message
    assert "t-0" in message or ("topic" in message and "partition 0" in message)


async def test_the_error_of_a_key_names_the_key(topic_broker: Broker) -> None:
    await with_string_key(topic_broker)
    answer = await get(topic_broker)
    if answer.status_code != 200:
        assert answer.json()["message"].startswith("key deserialization error")


async def test_a_plain_string_key_stops_no_reader_of_json(topic_broker: Broker) -> None:
    await with_string_key(topic_broker)
    answer = await get(topic_broker)
    assert answer.status_code == 200, answer.text
    assert [record["value"] for record in answer.json()] == [{"a": 1}]


@pytest.mark.parametrize(("on_error", "offsets"), [("skip", [0, 2]), ("raw", [0, 1, 2])])
async def test_a_reader_can_ask_to_pass_a_bad_record(
    topic_broker: Broker, on_error: str, offsets: list[int]
) -> None:
    await append(topic_broker.log, b"0", BAD, b"2")
    answer = await get(topic_broker, on_error=on_error)
    assert answer.status_code == 200, answer.text
    assert [record["offset"] for record in answer.json()] == offsets


async def test_a_follower_passes_a_bad_record(topic_broker: Broker) -> None:
    await append(topic_broker.log, b"0", BAD, b"2")
    seen: list[tuple[str, str]] = []
    async with listening(topic_broker.app) as port:
        for _ in range(3):  # as an EventSource does: again, from the last id
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


@pytest.mark.parametrize(
    "number", ["1e999999", "-1e999999", "9" * 5000, "[" + "9" * 5000 + "]"], ids=lambda n: n[:9]
)
async def test_a_number_that_is_taken_can_be_read(topic_broker: Broker, number: str) -> None:
    body = '{"records":[{"value":' + number + "}]}"
    made = await topic_broker.http.post("/topics/t", content=body, headers={"content-type": JSON})
    if made.status_code != 200:
        assert made.status_code in (400, 422)
        return
    answer = await get(topic_broker)
    assert answer.status_code == 200, answer.text
    for read in (json.loads, orjson.loads):
        try:
            read(answer.content)
        except ValueError as error:
            raise AssertionError(f"{read.__module__} cannot read it: {error}") from error
