"""Readers of formats with schemas, without a registry: null, keys in base64, and `on_error`."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from tests.service.conftest import V2, Broker, assert_refused, positions, send
from tests.service.instances import Instance, created
from tests.service.test_follow import PATH
from tests.service.test_on_error import metric, offsets_of, records_of

FORMATS = ("avro", "jsonschema", "protobuf")
BINARY = "application/vnd.kafka.binary.v2+json"
FRAMED = b"\x00\x00\x00\x00\x07data"
"""As a client of a registry writes: magic, the schema's id 7, data."""
WHY = "there is no schema registry; on_error=skip or raw passes it"


def base64_of(octets: bytes) -> str:
    return base64.b64encode(octets).decode()


async def put(broker: Broker, *records: tuple[bytes | None, bytes | None]) -> None:
    """Records of keys and values, in the first partition."""
    named = [
        {
            name: None if octets is None else base64_of(octets)
            for name, octets in zip(("key", "value"), record, strict=True)
        }
        for record in records
    ]
    body = json.dumps({"records": [{**fields, "partition": 0} for fields in named]})
    answer = await send(broker.http, body, BINARY)
    assert answer.status_code == 200, answer.text


pytestmark = pytest.mark.broker(topics={"t": 2})


def type_of(fmt: str) -> str:
    return f"application/vnd.kafka.{fmt}.v2+json"


async def fetched(broker: Broker, fmt: str, **query: Any) -> httpx.Response:
    return await broker.http.get(PATH, params=query, headers={"accept": type_of(fmt)})


async def member_of(broker: Broker, fmt: str, partitions: Sequence[int] = (0, 1)) -> Instance:
    member = await created(broker, f"g-{fmt}", format=fmt)
    assigned = [{"topic": "t", "partition": number} for number in partitions]
    await member.ok("POST", "/assignments", {"partitions": assigned})
    return member


@pytest.mark.parametrize("fmt", FORMATS)
async def test_key_in_binary_without_value_as_karapaces_clients_read_it(
    broker: Broker, fmt: str
) -> None:
    """The bytes of the requests, and of the answer, are those of Karapace's own suite."""
    headers = {"content-type": BINARY, "accept": "application/vnd.kafka.v2+json"}
    body = b'{"records": [{"key": "dGVzdGtleQ=="}]}'
    answer = await broker.http.post("/topics/t", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    placed = answer.json()["offsets"][0]
    headers = {"content-type": type_of(fmt), "accept": type_of(fmt)}
    body = b'{"format": "%b", "auto.offset.reset": "earliest"}' % fmt.encode()
    answer = await send(broker.http, body, V2, "/consumers/e2e_group")
    path = f"/consumers/e2e_group/instances/{answer.json()['instance_id']}"
    body = b'{"partitions": [{"topic": "t", "partition": %d}]}' % placed["partition"]
    answer = await broker.http.post(f"{path}/assignments", content=body, headers=headers)
    assert answer.status_code == 204, answer.text
    answer = await broker.http.get(f"{path}/records?timeout=1000", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == type_of(fmt)
    stamp = answer.json()[0]["timestamp"]
    assert answer.content == (
        b'[{"topic":"t","key":"dGVzdGtleQ==","value":null,"partition":%d,"offset":0,'
        b'"timestamp":%d}]' % (placed["partition"], stamp)
    )


@pytest.mark.parametrize("fmt", FORMATS)
async def test_value_that_needs_registry_as_karapaces_clients_read_it(
    broker: Broker, fmt: str
) -> None:
    body = b'{"records": [{"value": "dGVzdA==", "partition": 0}]}'
    assert (await send(broker.http, body, BINARY)).status_code == 200
    member = await member_of(broker, fmt, [0])
    for _ in range(2):
        answer = await member("GET", "/records?timeout=0", accept=type_of(fmt))
        message = assert_refused(answer, 422, 422)
        assert message == (
            f"value deserialization error for format {fmt}: partition t-0, offset 0: {WHY}"
        )


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("key", "shown"),
    [
        *((None, None), (b"", ""), (b"N14228", "TjE0MjI4"), (b"\x00\x00\x00\x07", "AAAABw==")),
        (b"\xff\x00\x00\x00\x07data", "/wAAAAdkYXRh"),
    ],
)
async def test_key_without_registrys_framing_is_base64(
    broker: Broker, fmt: str, key: bytes | None, shown: str | None
) -> None:
    await put(broker, (key, None))
    member = await member_of(broker, fmt)
    for answer in (await fetched(broker, fmt), await member("GET", "/records?timeout=0")):
        (record,) = records_of(answer)
        assert (record["key"], record["value"]) == (shown, None)
        assert record.keys() == {"topic", "key", "value", "partition", "offset", "timestamp"}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("record", "part"), [((FRAMED, None), "key"), ((b"k", FRAMED), "value"), ((b"k", b""), "value")]
)
async def test_fetch_stops_skips_or_shows_bytes(
    broker: Broker, fmt: str, record: tuple[bytes, bytes | None], part: str
) -> None:
    await put(broker, (b"a", None), record, (b"b", None))
    answer = await fetched(broker, fmt)
    assert offsets_of(answer) == [0]
    assert positions(answer) == (1, 3, 0)
    assert answer.headers["tidelog-undecodable"] == "t-0@1"
    message = assert_refused(await fetched(broker, fmt, offset=1), 422, 422)
    assert message == (
        f"{part} deserialization error for format {fmt}: partition t-0, offset 1: {WHY}"
    )

    answer = await fetched(broker, fmt, on_error="skip")
    assert offsets_of(answer) == [0, 2]
    assert positions(answer) == (3, 3, 0)
    assert answer.headers["tidelog-skipped"] == "1"
    assert answer.headers["tidelog-first-skipped"] == "t-0@1"
    assert await metric(broker, "skip") == 1

    records = records_of(await fetched(broker, fmt, on_error="raw"))
    assert [row["offset"] for row in records] == [0, 1, 2]
    octets = record[0] if part == "key" else record[1]
    assert octets is not None
    assert (records[1][part], records[1][f"{part}_base64"]) == (None, base64_of(octets))
    assert await metric(broker, "raw") == 1


@pytest.mark.parametrize("fmt", FORMATS)
async def test_instance_stops_skips_or_shows_bytes(broker: Broker, fmt: str) -> None:
    await put(broker, (b"a", None), (b"k", FRAMED), (b"b", None))
    member = await member_of(broker, fmt)
    answer = await member("GET", "/records?timeout=0")
    assert offsets_of(answer) == [0]
    assert answer.headers["tidelog-undecodable"] == "t-0@1"
    assert_refused(await member("GET", "/records?timeout=0"), 422, 422)
    answer = await member("GET", "/records?timeout=0&on_error=raw")
    assert [record.get("value_base64") for record in records_of(answer)] == [
        base64_of(FRAMED),
        None,
    ]
    await put(broker, (b"k", FRAMED), (b"c", None))
    answer = await member("GET", "/records?timeout=0&on_error=skip")
    assert offsets_of(answer) == [4]
    assert answer.headers["tidelog-skipped"] == "1"
    await member.ok("POST", "/offsets")
    assert (await member.committed())[0] == 5


async def test_partition_that_stops_keeps_back_no_other(broker: Broker) -> None:
    await put(broker, (b"k", FRAMED))
    body = b'{"records": [{"key": "YQ==", "partition": 1}]}'
    answer = await send(broker.http, body, BINARY)
    assert answer.status_code == 200
    member = await member_of(broker, "avro")
    answer = await member("GET", "/records?timeout=0")
    assert [(record["partition"], record["key"]) for record in records_of(answer)] == [(1, "YQ==")]
    assert answer.headers["tidelog-undecodable"] == "t-0@0"


@pytest.mark.parametrize("fmt", FORMATS)
async def test_read_of_nothing(broker: Broker, fmt: str) -> None:
    answer = await fetched(broker, fmt)
    assert (answer.content, answer.headers["content-type"]) == (b"[]", type_of(fmt))
    member = await member_of(broker, fmt)
    answer = await member("GET", "/records?timeout=0")
    assert (answer.content, answer.headers["content-type"]) == (b"[]", type_of(fmt))


async def test_columns_of_json_are_not_taken_for_decoded(broker: Broker) -> None:
    """Also for a batch whose keys and values are known to be JSON."""
    body = b'{"records":[{"key":1,"value":{"a":1},"partition":0}]}'
    assert (await send(broker.http, body, "application/vnd.kafka.json.v2+json")).status_code == 200
    assert_refused(await fetched(broker, "jsonschema"), 422, 422)
    (record,) = records_of(await fetched(broker, "jsonschema", on_error="raw"))
    assert (record["key"], record["value_base64"]) == ("MQ==", base64_of(b'{"a":1}'))
