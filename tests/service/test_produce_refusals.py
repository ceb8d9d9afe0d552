"""Refusals of produce: status and code, and nothing is written (I6)."""

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import (
    ARROW,
    BINARY,
    JSON,
    V2,
    Broker,
    arrow,
    arrow_of,
    assert_refused,
    ends,
    placed,
    post,
    send,
    until,
)
from tests.support.faults import Fault, FaultyStore, Script
from tests.support.properties import examples
from tidelog.service.routes.produce import ACCEPTED
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core import object_keys

VALUES = pa.array([b"a", None, b"", b"d"], pa.binary())


@pytest.mark.parametrize(
    "content_type",
    [
        *("text/plain", "application/xml", "application/vnd.kafka.xml.v2+json"),
        *("application/vnd.kafka.json.v3+json", "application/x-www-form-urlencoded"),
        *("multipart/form-data; boundary=x", "application/x-ndjson", "\xff"),
    ],
)
async def test_other_content_types_are_415(broker: Broker, topic: str, content_type: str) -> None:
    body = b'{"records":[{"value":"aGk="}]}'
    answer = await send(broker.http, body, content_type.encode("latin-1"))
    said = assert_refused(answer, 415, 415)
    assert f"send {ACCEPTED}, not {content_type!r}" in said
    for accepted in ("vnd.kafka.json.v2+json", "vnd.apache.arrow.stream"):
        assert f"application/{accepted}" in said
    assert ends(broker.log) == [0, 0, 0]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, 422),
        (b"not arrow", 422, 422),
        (arrow(value=VALUES)[:-20], 422, 422),
        (arrow(value=VALUES.slice(0, 0)), 422, 422),
        (arrow(key=VALUES), 422, 422),
        (arrow(value=VALUES, partition=pa.array([0, 1, 2, 3])), 404, 40402),
        (arrow(value=VALUES, partition=pa.array([0, 1, 2, -1])), 404, 40402),
    ],
)
async def test_bad_arrow_is_refused(
    broker: Broker, topic: str, body: bytes, status: int, code: int
) -> None:
    answer = await send(broker.http, body, ARROW)
    assert_refused(answer, status, code)
    assert ends(broker.log) == [0, 0, 0]


@pytest.mark.parametrize("name", ["avro", "jsonschema", "protobuf"])
@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/topics/none", {"records": [{"value": 1}]}, 404, 40401),
        ("/topics/t/partitions/9", {"records": [{"value": 1}]}, 404, 40402),
        ("/topics/t", {"records": [{"value": 1}]}, 422, 42202),
        ("/topics/t", {"records": [{"value": 1}], "value_schema": None}, 422, 42202),
        ("/topics/t", {"records": [{"key": 1, "value": 1}], "value_schema_id": 1}, 422, 42201),
        ("/topics/t", {"records": [{"key": {"a": 1}}]}, 422, 42201),
        ("/topics/t", {"records": [{"value": 1}], "value_schema": "{}"}, 408, 40801),
        (
            "/topics/t",
            {"records": [{"key": 1, "value": 1}], "value_schema_id": 1, "key_schema": "{}"},
            408,
            40801,
        ),
    ],
)
async def test_schemas_have_no_registry(
    broker: Broker, topic: str, name: str, path: str, body: object, status: int, code: int
) -> None:
    content_type = f"application/vnd.kafka.{name}.v2+json"
    answer = await broker.http.post(path, json=body, headers={"content-type": content_type})
    assert_refused(answer, status, code)
    assert ends(broker.log) == [0, 0, 0]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/topics/none", 40401),
        ("/topics/none/partitions/0", 40401),
        ("/topics/T", 40401),
        ("/topics/t/partitions/3", 40402),
        ("/topics/t/partitions/-1", 40402),
        ("/topics/t/partitions/x", 40402),
        ("/topics/t/partitions/0_0", 40402),
        ("/topics/t/partitions/%D9%A1", 40402),
        (f"/topics/t/partitions/{'9' * 5000}", 40402),
    ],
)
async def test_what_is_not_there_is_404(broker: Broker, topic: str, path: str, code: int) -> None:
    assert_refused(await post(broker.http, [{"value": 1}], path=path), 404, code)
    assert ends(broker.log) == [0, 0, 0]
    assert [*broker.log.state.topics] == ["t"]


@pytest.mark.parametrize("number", [3, -1, 10**9, 2**63, -(2**70)])
@pytest.mark.parametrize("copies", [1, 70], ids=["few", "many"])
@pytest.mark.parametrize("path", ["/topics/t", "/topics/t/partitions/0"])
async def test_one_record_to_nowhere_refuses_request(
    broker: Broker, topic: str, number: int, copies: int, path: str
) -> None:
    records = [{"value": 1}, {"value": 2, "partition": 1}] * copies
    records.append({"value": 3, "partition": number})
    answer = await post(broker.http, records, path=path)
    if abs(number) < 2**63:
        assert_refused(answer, 404, 40402)
    assert 400 <= answer.status_code < 500
    assert ends(broker.log) == [0, 0, 0]


async def test_control_characters_in_names_are_named(broker: Broker) -> None:
    for verb, path in (("POST", "/topics/my%0Dt"), ("GET", "/topics/my%0Dt/partitions/0/records")):
        answer = await broker.http.request(verb, path)
        message = assert_refused(answer, 400, 40002)
        assert message == "Invalid parameter 'topic_name' got 'my\u240dt'"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 422, 422),
        (b'{"records":[]}', 422, 422),
        (b'{"records":[{"value":"aGk="}],"x":1}', 422, 422),
        (b"{", 400, 400),
        (b'{"records":[{"value":5}]}', 400, 400),
        (b'{"records":[{"key":"\\u0000","value":"aGk="}]}', 400, 400),
        (b'{"records":[{"value":"aGk="},{"value":"a"}]}', 400, 400),
        (b"[" * 100_000, 400, 400),
    ],
)
async def test_bad_bodies_are_refused(
    broker: Broker, topic: str, body: bytes, status: int, code: int
) -> None:
    answer = await send(broker.http, body, BINARY)
    assert_refused(answer, status, code)
    assert ends(broker.log) == [0, 0, 0]


async def test_bad_base64_is_named(broker: Broker, topic: str) -> None:
    message = assert_refused(await post(broker.http, [{"value": "a?"}], BINARY), 400, 400)
    assert message.startswith('data="a?" is not a base64 string.')


@pytest.mark.parametrize(
    ("body", "content_type", "status", "words"),
    [
        (b"hello", "application/x-www-form-urlencoded", 415, f"send {JSON} (keys and values"),
        (b'{"value":1}', "application/json", 422, 'send {"records": [{"value": ...}]}'),
        (b'{"value":1}', JSON, 422, 'send {"records": [{"value": ...}]}'),
        (b'{"records":[{"value":1}]}', "application/json", 400, f"use Content-Type: {JSON}"),
        (b'{"records":[{"key":{},"value":1}]}', "", 400, f"use Content-Type: {JSON}"),
    ],
)
async def test_first_request_is_answered_with_what_to_send(
    broker: Broker, topic: str, body: bytes, content_type: str, status: int, words: str
) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = await broker.http.post("/topics/t", content=body, headers=headers)
    assert words in assert_refused(answer, status, status)
    assert ends(broker.log) == [0, 0, 0]


# -- bounds: I10


@pytest.mark.parametrize("content_type", [BINARY, ARROW])
async def test_oversized_record_refuses_request(broker: Broker, content_type: str) -> None:
    await broker.log.topics.create("t", 2, {"max.message.bytes": "1000"})
    for size, status in ((1001, 413), (1000, 200)):  # key, value, and 24 bytes
        values = [b"x", b"v" * (size - 10 - 24)]
        keys_ = [b"k" * 10] * 2
        if content_type == ARROW:
            body = arrow(value=pa.array(values), key=pa.array(keys_), partition=pa.array([0, 1]))
        else:
            records = [
                {"value": b64encode(v).decode(), "key": b64encode(k).decode(), "partition": n}
                for n, (k, v) in enumerate(zip(keys_, values, strict=True))
            ]
            body = json.dumps({"records": records}).encode()
        answer = await send(broker.http, body, content_type)
        assert answer.status_code == status
        if status == 413:
            assert "record 1 has 1001 bytes" in assert_refused(answer, 413, 413)
            assert ends(broker.log) == [0, 0]
    assert ends(broker.log) == [1, 1]


@pytest.mark.broker(topics={"t": 1}, request_bytes_max=2048)
async def test_oversized_body_is_refused_unread(broker: Broker) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b" " * 1000

    headers = {"content-type": JSON}
    answer = await broker.http.post("/topics/t", content=pieces(), headers=headers)
    assert_refused(answer, 413, 413)
    assert sent == 3000  # no more than it took to know
    sent = 0
    headers["content-length"] = "100000"
    answer = await broker.http.post("/topics/t", content=pieces(), headers=headers)
    assert_refused(answer, 413, 413)
    assert sent == 0
    # Exactly the bound is none too many.
    body = json.dumps({"records": [{"value": "v"}]}).encode().ljust(2048)
    headers = {"content-type": JSON}
    assert placed(await broker.http.post("/topics/t", content=body, headers=headers))
    answer = await broker.http.post("/topics/t", content=body + b" ", headers=headers)
    assert_refused(answer, 413, 413)
    assert ends(broker.log) == [1]


@pytest.mark.broker(topics={"t": 1}, request_bytes_max=64 * 1024)
async def test_compressed_bomb_is_refused(broker: Broker) -> None:
    batch = pa.record_batch({"value": pa.array([bytes(2**20)])})
    body = arrow_of(batch, compression="zstd")
    assert len(body) < 64 * 1024
    answer = await send(broker.http, body, ARROW)
    assert_refused(answer, 413, 413)
    assert ends(broker.log) == [0]


@pytest.mark.parametrize("acks", ["all", "1", "0"])
@pytest.mark.broker(topics={"t": 1}, buffer_bytes_max=8192, request_bytes_max=8192)
async def test_full_buffer_says_when_to_come_back(
    broker: Broker, faulty: FaultyStore, acks: str
) -> None:
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1))
    first = asyncio.create_task(post(broker.http, [{"value": "v" * 5000}]))
    await gate.reached.wait()
    answer = await post(broker.http, [{"value": "w" * 5000}], acks=acks)
    assert_refused(answer, 429, 42901)
    assert int(answer.headers["retry-after"]) >= 1
    waiting = asyncio.create_task(post(broker.http, [{"value": "x"}]))  # there is room for it
    buffered_bytes = broker.log._log.writer.buffered_bytes
    await until(lambda: broker.log._log.writer.buffered_bytes > buffered_bytes)
    gate.opened.set()
    assert placed(await first) == [(0, 0)]
    assert placed(await waiting) == [(0, 1)]
    assert placed(await post(broker.http, [{"value": "w" * 5000}])) == [(0, 2)]
    assert broker.log._log.writer.buffered_bytes == 0


@pytest.mark.broker(topics={"t": 1})
async def test_what_store_refuses_is_503_and_not_there(broker: Broker, faulty: FaultyStore) -> None:
    faulty.plan = Script("create", "wal/", [Fault.REFUSED])
    answer = await post(broker.http, [{"value": 1}])
    assert_refused(answer, 503, 50302)
    assert "retry-after" in answer.headers
    assert placed(await post(broker.http, [{"value": 2}])) == [(0, 0)]


# -- clients that go away


def call(broker: Broker, messages: list[dict[str, Any]], content_type: str) -> Any:
    """A request whose body comes as these messages; afterwards the client is gone."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/topics/t",
        "query_string": b"",
        "headers": [(b"content-type", content_type.encode())],
    }

    async def receive() -> dict[str, Any]:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(_: object) -> None:
        """Drop the message: the client is gone."""

    return broker.app(scope, receive, send)


async def test_body_that_was_cut_off_is_not_taken_for_whole_one(broker: Broker, topic: str) -> None:
    batch = pa.record_batch({"value": VALUES})
    whole = arrow_of(batch, batch)
    half = arrow_of(batch)[: -len(b"\xff\xff\xff\xff\x00\x00\x00\x00")]  # a stream without its end
    assert whole.startswith(half)
    for parts in ([half], [half[:100], half[100:]], [whole]):
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        await call(broker, messages, ARROW)
    body = b'{"records":[{"value":"aGk="}]}'
    await call(broker, [{"type": "http.request", "body": body, "more_body": True}], BINARY)
    await call(broker, [], BINARY)
    assert ends(broker.log) == [0, 0, 0]
    await call(broker, [{"type": "http.request", "body": body, "more_body": False}], BINARY)
    assert sum(ends(broker.log)) == 1


@pytest.mark.broker(topics={"t": 1})
async def test_client_that_is_gone_does_not_stop_its_commit(
    broker: Broker, faulty: FaultyStore
) -> None:
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1))
    producing = asyncio.create_task(post(broker.http, [{"value": 1}]))
    await gate.reached.wait()
    producing.cancel()
    await asyncio.gather(producing, return_exceptions=True)
    gate.opened.set()
    await until(lambda: ends(broker.log) == [1])
    assert placed(await post(broker.http, [{"value": 2}])) == [(0, 1)]


# -- whatever comes

ANY_TYPE = st.sampled_from(
    [
        None,
        "application/json",
        V2,
        ARROW,
        *(f"application/vnd.kafka.{name}.v2+json" for name in ("json", "binary", "text", "avro")),
    ]
)
WORDS = st.sampled_from(
    [
        *("records", "key", "value", "partition", "timestamp", "headers", "value_schema"),
        *("entries", "id", "partition_id", "type", "data", "name", "JSON", "BINARY", "aGk=", "0"),
    ]
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), WORDS
)
JSONISH = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
RECORDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("key", "value", "partition", "timestamp", "headers"), SCALARS | JSONISH
    ),
)
BODIES = st.one_of(
    st.binary(max_size=60),
    JSONISH.map(json.dumps).map(str.encode),
    st.builds(
        lambda records, copies: json.dumps({"records": records * copies}).encode(),
        st.lists(RECORDS, max_size=4),
        st.sampled_from([1, 70]),  # few stay lists, many become columns
    ),
)
STREAM = arrow(value=VALUES, partition=pa.array([0, 1, 1, None]), key=pa.array(["a"] * 4))
TORN = st.builds(
    lambda at, octets: STREAM[:at] + octets + STREAM[at + len(octets) :],
    st.integers(0, len(STREAM)),
    st.binary(max_size=8),
)
anything = examples(150, is_fixture_shared=True)


def assert_answered(answer: httpx.Response) -> None:
    """A success, or a refusal in our form with a status of 4xx."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert answer.json().keys() == {"error_code", "message"}


@anything
@given(
    body=BODIES | TORN,
    content_type=ANY_TYPE,
    path=st.sampled_from(["/topics/t", "/topics/t/partitions/1", "/topics/none"]),
    query=st.dictionaries(st.sampled_from(["acks", "async", "x"]), st.text(max_size=3), max_size=1),
    key=st.none() | st.binary(max_size=3),
)
async def test_no_body_is_internal_error(
    broker: Broker,
    body: bytes,
    content_type: str | None,
    path: str,
    query: dict[str, str],
    key: bytes | None,
) -> None:
    if "t" not in broker.log.state.topics:
        await broker.log.topics.create("t", 3, {})
    headers: dict[str, Any] = {} if content_type is None else {"content-type": content_type}
    if key is not None:
        headers["idempotency-key"] = key
    before = ends(broker.log)
    answer = await broker.http.post(path, content=body, headers=headers, params=query)
    assert_answered(answer)
    if answer.status_code >= 400:
        assert ends(broker.log) == before


@anything
@given(body=TORN)
async def test_torn_stream_is_no_internal_error(broker: Broker, body: bytes) -> None:
    if "t" not in broker.log.state.topics:
        await broker.log.topics.create("t", 3, {})
    assert_answered(await send(broker.http, body, ARROW))


@pytest.mark.parametrize("way", ["json", "arrow"])
async def test_too_many_records_refuse_request(broker: Broker, way: str) -> None:
    await broker.log.topics.create("t", 1, {})
    count = RECORDS_MAX + 1
    bodies = {
        "json": (JSON, b'{"records":[' + b",".join([b"{}"] * count) + b"]}"),
        "arrow": (ARROW, arrow(value=pa.nulls(count))),
    }
    content_type, body = bodies[way]
    answer = await send(broker.http, body, content_type)
    assert f"the limit is {RECORDS_MAX}" in assert_refused(answer, 413, 413)
    assert ends(broker.log) == [0]
