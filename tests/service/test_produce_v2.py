"""POST /topics/{t} and /topics/{t}/partitions/{p} through the whole application.

Accepted bodies, partitions, times of answers. Refusals are in test_produce_refusals.
"""

import asyncio
import base64
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.service.conftest import (
    ARROW,
    BINARY,
    JSON,
    TEXT,
    Broker,
    arrow,
    arrow_of,
    assert_refused,
    broker_on,
    ends,
    placed,
    post,
    send,
    stored,
    until,
)
from tidelog.service.formats import arrow as arrow_format
from tidelog.service.routes.produce import DECODE_INLINE_MESSAGES
from tidelog.storage.codec.key_partition import partition_of
from tidelog.storage.codec.record_columns import HEADERS_TYPE
from tidelog.storage.store.memory import MemoryStore

FORMATS = {"json": JSON, "binary": BINARY, "text": TEXT}

TYPES = {
    None: "binary",
    "application/vnd.kafka.v2+json": "binary",
    "application/json": "binary",
    "application/vnd.kafka.v1+json": "binary",
    "application/vnd.kafka+json": "binary",
    "application/octet-stream": "binary",
    JSON.upper(): "json",
    **{
        f"application/vnd.kafka.{name}{version}+json": name
        for name in FORMATS
        for version in (".v2", ".v1", "")
    },
}


# -- content types and formats


@pytest.mark.parametrize("suffix", ["", "; charset=utf-8", ";charset=UTF-8 ; q=1"])
@pytest.mark.parametrize("content_type", TYPES)
async def test_every_content_type_has_its_format(
    broker: Broker, topic: str, content_type: str | None, suffix: str
) -> None:
    body = b'{"records":[{"value":"aGk="}]}'
    headers = {} if content_type is None else {"content-type": content_type + suffix}
    answer = await broker.http.post("/topics/t/partitions/0", content=body, headers=headers)
    assert placed(answer) == [(0, 0)]
    as_sent = {"json": b'"aGk="', "binary": b"hi", "text": b"aGk="}
    assert (await stored(broker.log))[0]["value"] == as_sent[TYPES[content_type]]


JSON_VALUES: list[Any] = [
    *(None, False, True, 0, -1.5e-300),
    10**40,
    *("", "plain", 'ünï ☃ 𝄞 \x00\n"\\\u2028', {}),
    [],
    {"a": {"b": [None, "c", 1]}},
]
BYTES = [None, b"", bytes(range(256)), b"\xff", b"null"]
TEXTS = [None, "", "null", 'ünï ☃ 𝄞 \x00\n"\\\u2028']


@pytest.mark.parametrize("copies", [1, 30], ids=["few", "many"])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("json", JSON_VALUES),
        ("binary", [None if v is None else base64.b64encode(v).decode() for v in BYTES]),
        ("text", TEXTS),
    ],
)
async def test_keys_and_values_come_back_as_they_went(
    broker: Broker, topic: str, name: str, values: list[Any], copies: int
) -> None:
    records = [{"key": value, "value": value} for value in values] * copies
    path = "/topics/t/partitions/1"
    answer = await post(broker.http, records, FORMATS[name], path)
    assert placed(answer) == [(1, offset) for offset in range(len(records))]
    read = await broker.http.get(f"{path}/records", headers={"accept": FORMATS[name]})
    assert read.headers["content-type"] == FORMATS[name]
    assert [{"key": r["key"], "value": r["value"]} for r in read.json()] == records
    assert [r["offset"] for r in read.json()] == list(range(len(records)))
    for record, row in zip(records, await stored(broker.log, 1), strict=True):
        assert (row["value"] is None) == (record["value"] is None)  # null is a tombstone


async def test_json_is_kept_as_text_it_was(broker: Broker, topic: str) -> None:
    text = rb'{"a" : 1.00000000000000000000001, "b":"\u00e9", "a": 2}'
    body = b'{"records":[{"value":%s}]}' % text
    await send(broker.http, body, JSON)
    numbers = [number for number, end in enumerate(ends(broker.log)) if end]
    assert [row["value"] for row in await stored(broker.log, numbers[0])] == [text]


async def test_record_without_value_is_tombstone(broker: Broker, topic: str) -> None:
    for content_type in FORMATS.values():
        record = {"key": "aGk=", "partition": 0}
        assert len(placed(await post(broker.http, [record], content_type))) == 1
    assert [row["value"] for row in await stored(broker.log)] == [None] * 3


async def test_headers_and_timestamps_are_kept(broker: Broker, topic: str) -> None:
    headers = [
        {"key": "a", "value": base64.b64encode(b"\x00\xff").decode()},
        {"key": "a", "value": None},
        {"key": "ü", "value": ""},
    ]
    records = [
        {"value": 1, "partition": 0, "headers": headers, "timestamp": 1_357_034_400_000},
        {"value": 2, "partition": "0", "headers": [], "timestamp": "7"},
        {"value": 3, "partition": 0, "headers": None, "timestamp": None},
    ]
    before_ms = time.time_ns() // 1_000_000
    assert placed(await post(broker.http, records)) == [(0, 0), (0, 1), (0, 2)]
    answer = await broker.http.get("/topics/t/partitions/0/records", headers={"accept": JSON})
    said = answer.json()
    assert said[0]["headers"] == headers
    assert "headers" not in said[1]
    assert "headers" not in said[2]
    assert [r["timestamp"] for r in said[:2]] == [1_357_034_400_000, 7]
    assert before_ms <= said[2]["timestamp"] <= time.time_ns() // 1_000_000


# -- partitions


async def test_records_partition_wins_over_paths(broker: Broker, topic: str) -> None:
    records = [{"value": 1}, {"value": 2, "partition": 0}, {"value": 3, "key": "k"}]
    answer = await post(broker.http, records, path="/topics/t/partitions/2")
    assert placed(answer) == [(2, 0), (0, 0), (2, 1)]


@pytest.mark.parametrize("copies", [1, 50], ids=["few", "many"])
async def test_reports_are_in_order_of_request(broker: Broker, topic: str, copies: int) -> None:
    numbers = [2, 0, 2, 1, 1, 0, 2] * copies
    records = [{"value": row, "partition": number} for row, number in enumerate(numbers)]
    reports = placed(await post(broker.http, records))
    assert [partition for partition, _ in reports] == numbers
    for row, (partition, offset) in enumerate(reports):
        assert (await stored(broker.log, partition))[offset or 0]["value"] == b"%d" % row


@pytest.mark.parametrize("copies", [1, 100], ids=["few", "many"])
async def test_keys_go_where_kafka_puts_them(broker: Broker, topic: str, copies: int) -> None:
    reports = placed(await post(broker.http, [{"key": "foobar", "value": "v"}] * copies, TEXT))
    assert {partition for partition, _ in reports} == {(-790332482 & 0x7FFFFFFF) % 3}


async def test_json_key_is_hashed_as_its_text(broker: Broker, topic: str) -> None:
    for key, text in (("21", b'"21"'), (21, b"21"), ({"a": 1}, b'{"a": 1}')):
        assert placed(await post(broker.http, [{"key": key, "value": 1}]))[0][0] == partition_of(
            text, 3
        )


async def test_records_without_key_are_spread(broker: Broker, topic: str) -> None:
    for _ in range(40):
        await post(broker.http, [{"value": 1}])
    assert all(ends(broker.log))
    assert sum(ends(broker.log)) == 40


# -- Arrow


VALUES = pa.array([b"a", None, b"", b"d"], pa.binary())


async def test_arrow_is_answered_by_ranges(broker: Broker, topic: str) -> None:
    body = arrow(value=VALUES, partition=pa.array([2, 0, 2, None]), key=pa.array(["21"] * 4))
    for turn in range(2):
        answer = await send(broker.http, body, f"{ARROW}; x=y")
        hashed = (-973932308 & 0x7FFFFFFF) % 3
        expected = {2: 2, 0: 1}
        expected[hashed] = expected.get(hashed, 0) + 1
        assert answer.status_code == 200
        said = sorted(answer.json()["partitions"], key=lambda partition: partition["partition"])
        assert said == [
            {"partition": number, "base_offset": turn * count, "count": count}
            for number, count in sorted(expected.items())
        ]


async def test_arrow_goes_in_and_comes_out(broker: Broker, topic: str) -> None:
    columns = {
        "value": VALUES,
        "key": pa.array([b"k", None, b"", b"x"], pa.binary()),
        "timestamp": pa.array([1, 2, 3, None], pa.int64()),
        "headers": pa.array(
            [[{"key": "h", "value": b"1"}, {"key": "h", "value": None}], None, [], None],
            HEADERS_TYPE,
        ),
    }
    path = "/topics/t/partitions/1"
    posted = await send(broker.http, arrow(**columns), ARROW, path)
    assert posted.json() == {"partitions": [{"partition": 1, "base_offset": 0, "count": 4}]}
    answer = await broker.http.get(f"{path}/records", headers={"accept": ARROW})
    assert answer.headers["content-type"] == ARROW
    read = pa.ipc.open_stream(answer.content).read_all().to_pylist()
    assert [row["offset"] for row in read] == [0, 1, 2, 3]
    assert [row["value"] for row in read] == columns["value"].to_pylist()
    assert [row["key"] for row in read] == columns["key"].to_pylist()
    instants = [datetime.fromtimestamp(ms / 1000, UTC) for ms in (1, 2, 3)]
    assert [row["timestamp"] for row in read[:3]] == instants
    assert (datetime.now(UTC) - read[3]["timestamp"]).total_seconds() < 60
    assert read[0]["headers"] == [{"key": "h", "value": b"1"}, {"key": "h", "value": None}]
    # A fetched body can be produced.
    again = await send(broker.http, answer.content, ARROW, path)
    assert again.json() == {"partitions": [{"partition": 1, "base_offset": 4, "count": 4}]}


# -- acks


async def test_arrow_values_alone_are_enough(broker: Broker, topic: str) -> None:
    answer = await send(broker.http, arrow(value=VALUES), ARROW)
    assert sum(partition["count"] for partition in answer.json()["partitions"]) == 4
    assert sum(ends(broker.log)) == 4


async def test_acks_all_gives_offsets(broker: Broker, topic: str) -> None:
    record = {"value": 1, "partition": 0}
    for offset, query in enumerate([{}, {"acks": "all"}, {"acks": "-1"}, {"async": "false"}]):
        assert placed(await post(broker.http, [record], **query)) == [(0, offset)]


async def test_acks_1_is_answered_before_commit_gives_offsets(
    store: MemoryStore, tmp_path: Path
) -> None:
    async with broker_on(store, hot_dir=tmp_path) as broker:
        await broker.log.topics.create("t", 2, {})
        records = [{"value": 1, "partition": 1}, {"value": 2, "partition": 0}]
        assert placed(await post(broker.http, records, acks="1")) == [(1, None), (0, None)]
        await until(lambda: ends(broker.log) == [1, 1])


async def test_acks_0_is_answered_without_offsets(broker: Broker, topic: str) -> None:
    records = [{"value": 1, "partition": 1}, {"value": 2, "partition": 0}]
    assert placed(await post(broker.http, records, acks="0")) == [(1, None), (0, None)]
    await until(lambda: ends(broker.log) == [1, 1, 0])
    answer = await post(broker.http, [{"value": 1, "partition": 0}], **{"async": "true"})
    assert (answer.status_code, answer.content) == (204, b"")
    # RFC 9110 8.6: a 204 says neither what nor how long its body is.
    assert not {"content-length", "content-type"} & answer.headers.keys()
    await until(lambda: ends(broker.log) == [2, 1, 0])
    path, headers = "/topics/t/partitions/2?acks=0", {"content-type": ARROW}
    answer = await broker.http.post(path, content=arrow(value=VALUES), headers=headers)
    assert answer.json() == {"partitions": [{"partition": 2, "base_offset": None, "count": 4}]}


async def test_what_async_refuses_it_says(broker: Broker, topic: str) -> None:
    answer = await post(broker.http, [{"value": 1, "partition": 7}], **{"async": "true"})
    assert_refused(answer, 404, 40402)


@pytest.mark.parametrize("acks", ["", "2", "ALL", "none", "-2", "01"])
async def test_other_acks_are_refused(broker: Broker, topic: str, acks: str) -> None:
    assert_refused(await post(broker.http, [{"value": 1}], acks=acks), 400, 40002)
    assert ends(broker.log) == [0, 0, 0]


# -- paths and topics


@pytest.mark.broker(auto_create_topics=True, default_partitions=3)
async def test_topics_are_created_only_if_configured(broker: Broker, other: Broker) -> None:
    records = [{"value": n, "partition": n} for n in range(3)]
    assert placed(await post(broker.http, records)) == [(0, 0), (1, 0), (2, 0)]
    assert placed(await post(other.http, records)) == [(0, 1), (1, 1), (2, 1)]
    assert_refused(await post(broker.http, records, path="/topics/a b"), 400, 40002)
    assert list(broker.log.state.topics) == ["t"]


@pytest.mark.broker(auto_create_topics=True)
async def test_brokers_that_create_same_topic_agree(broker: Broker, other: Broker) -> None:
    answers = await asyncio.gather(
        *(post(receiver.http, [{"value": 1}]) for receiver in (broker, other) * 5)
    )
    assert sorted(placed(answer) for answer in answers) == [[(0, n)] for n in range(10)]


async def test_partitions_that_another_broker_added_are_known(
    broker: Broker, other: Broker
) -> None:
    await broker.log.topics.create("t", 1, {})
    await other.log._log.wal.refresh()
    for count in (2, 3, 4):  # I3: what was answered there is seen here
        await other.log.topics.add_partitions("t", count)
        record = {"value": 1, "partition": count - 1}
        path = "/topics/t" if count == 2 else f"/topics/t/partitions/{count - 1}"
        if count < 4:
            assert placed(await post(broker.http, [record], path=path)) == [(count - 1, 0)]
        else:
            answer = await broker.http.get(f"{path}/records")
            assert (answer.status_code, answer.json()) == (200, [])


@pytest.mark.parametrize(
    ("batches", "is_inline"), [(1, True), (DECODE_INLINE_MESSAGES, False)], ids=["one", "many"]
)
async def test_small_stream_of_many_messages_is_decoded_in_thread(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch, batches: int, is_inline: bool
) -> None:
    decode, inline = arrow_format.decode_arrow, []

    def recorded(*arguments: Any, **keywords: Any) -> Any:
        produced = decode(*arguments, **keywords)
        inline.append(threading.current_thread() is threading.main_thread())
        return produced

    monkeypatch.setattr(arrow_format, "decode_arrow", recorded)
    batch = pa.record_batch({"value": [b"v"]})
    body = arrow_of(*[batch] * batches)
    path = "/topics/t/partitions/0"
    answer = await send(broker.http, body, ARROW, path)
    assert answer.json() == {"partitions": [{"partition": 0, "base_offset": 0, "count": batches}]}
    assert inline == [is_inline]
