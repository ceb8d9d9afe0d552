"""POST /v3/clusters/{c}/topics/{t}/records and records:batch: streams of records and of reports."""

import asyncio
import gzip
import json
import threading
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import Broker, assert_refused, broker_on, ends, stored, until
from tests.service.test_produce_refusals import JSONISH, anything
from tests.support.faults import FaultyStore
from tidelog.service.formats import v3_records
from tidelog.service.http.connection_admission import BODY_STEP_BYTES
from tidelog.service.routes import produce_v3
from tidelog.storage.codec.chunk import RECORDS_MAX
from tidelog.storage.core import object_keys
from tidelog.storage.store.memory import MemoryStore

JSON = "application/json"


def path(broker: Broker, last: str = "records", topic: str = "t") -> str:
    return f"{broker.v3}/topics/{topic}/{last}"


async def stream(broker: Broker, body: Any) -> list[dict[str, Any]]:
    """The reports of a stream that was taken."""
    answer = await broker.http.post(path(broker), content=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == JSON
    return [json.loads(line) for line in answer.text.splitlines()]


async def pieces(*octets: bytes) -> AsyncIterator[bytes]:
    for piece in octets:
        yield piece


def of(data: Any, kind: str = "JSON", **more: Any) -> dict[str, Any]:
    return {"value": {"type": kind, "data": data}, "partition_id": 0, **more}


def codes(reports: list[dict[str, Any]]) -> list[int]:
    return [report["error_code"] for report in reports]


# -- records


async def test_report_says_what_became_of_record(broker: Broker, topic: str) -> None:
    record = {
        "partition_id": 2,
        "headers": [{"name": "h", "value": b64encode(b"\xff").decode()}, {"name": "h"}],
        "key": {"type": "STRING", "data": "kü"},
        "value": {"type": "JSON", "data": {"a": 1}},
        "timestamp": "2021-02-05T19:14:42.5Z",
    }
    (report,) = await stream(broker, json.dumps(record))
    assert report == {
        "error_code": 200,
        "cluster_id": broker.log.identity.cluster_id,
        "topic_name": "t",
        "partition_id": 2,
        "offset": 0,
        "timestamp": "2021-02-05T19:14:42.500Z",
        "key": {"type": "STRING", "size": 3},
        "value": {"type": "JSON", "size": 8},
    }
    (row,) = await stored(broker.log, 2)
    assert (row["key"], row["value"]) == ("kü".encode(), b'{"a": 1}')
    assert row["headers"] == [{"key": "h", "value": b"\xff"}, {"key": "h", "value": None}]
    assert row["timestamp"].isoformat() == "2021-02-05T19:14:42.500000+00:00"


async def test_objects_may_be_cut_anywhere(broker: Broker, topic: str) -> None:
    body = json.dumps(of('ü{"}\\')).encode() + b"\n" + json.dumps(of([{}, "}"])).encode()
    for position in range(len(body) + 1):
        assert codes(await stream(broker, pieces(body[:position], body[position:]))) == [200, 200]
    octets = (bytes([octet]) for octet in body)
    assert codes(await stream(broker, pieces(*octets))) == [200, 200]
    rows = await stored(broker.log)
    assert len(rows) == 2 * (len(body) + 2)
    assert {bytes(row["value"]) for row in rows[::2]} == {json.dumps('ü{"}\\').encode()}


# -- errors


async def test_records_of_one_piece_are_in_one_flush(broker: Broker, topic: str) -> None:
    flushes = broker.log.stats().writer.flushes
    body = b"".join(json.dumps(of(number)).encode() for number in range(500))
    reports = await stream(broker, body)
    assert [report["offset"] for report in reports] == list(range(500))
    assert broker.log.stats().writer.flushes == flushes + 1


async def test_errors_are_reported_in_their_place(broker: Broker, topic: str) -> None:
    records: list[tuple[str, int]] = [
        (json.dumps(of(1)), 200),
        (json.dumps(of(1, partition_id=9)), 40402),
        (json.dumps(of("?", "BINARY")), 400),
        (json.dumps(of(5, "STRING")), 400),
        (json.dumps(of(5, "AVRO")), 40801),
        (json.dumps(of(5, "XML")), 400),
        (json.dumps(of(1, timestamp="yesterday")), 400),
        (json.dumps(of(1, no_such_field=1)), 400),
        ('{"value":{"type":"JSON","data":tru}}', 400),
        (json.dumps(of("v" * 1_100_000)), 413),
        (json.dumps(of(2)), 200),
    ]
    reports = await stream(broker, "".join(record for record, _ in records))
    assert codes(reports) == [code for _, code in records]
    for report in reports:
        if report["error_code"] != 200:
            assert report.keys() == {"error_code", "message"}
    assert reports[2]["message"] == 'Bad Request: data="?" is not a base64 string.'
    assert [row["value"] for row in await stored(broker.log)] == [b"1", b"2"]


async def test_what_is_no_object_ends_stream(broker: Broker, topic: str) -> None:
    for end in (b"[1]", b"}", b'{"value":', b"x"):
        body = json.dumps(of(1)).encode() + end
        assert codes(await stream(broker, body)) == [200, 400]
        assert codes(await stream(broker, pieces(*(bytes([octet]) for octet in body)))) == [
            200,
            400,
        ]
        answer = await broker.http.post(path(broker), content=end)
        assert_refused(answer, 400, 400, JSON)
    assert ends(broker.log) == [8, 0, 0]


@pytest.mark.parametrize("body", [b"", b" \r\n"])
async def test_empty_stream_is_422(broker: Broker, topic: str, body: bytes) -> None:
    answer = await broker.http.post(path(broker), content=body)
    assert_refused(answer, 422, 422, JSON)


@pytest.mark.parametrize("last", ["records", "records:batch"])
async def test_clusters_and_topics_must_be_there(broker: Broker, topic: str, last: str) -> None:
    body = json.dumps(of(1))
    answer = await broker.http.post(f"/v3/clusters/none/topics/t/{last}", content=body)
    message = assert_refused(answer, 404, 404, JSON)
    assert message == "Cluster none cannot be found."
    answer = await broker.http.post(path(broker, last, "none"), content=body)
    message = assert_refused(answer, 404, 40403, JSON)
    assert message == "This server does not host this topic-partition."
    assert ends(broker.log) == [0, 0, 0]


async def test_topic_may_go_and_grow_in_stream(broker: Broker, other: Broker) -> None:
    await broker.log.topics.create("t", 1, {})

    async def body() -> AsyncIterator[bytes]:
        yield json.dumps(of(1)).encode()
        await other.log._log.wal.refresh()
        await other.log.topics.add_partitions("t", 2)
        yield json.dumps(of(2, partition_id=1)).encode()
        await until(lambda: ends(broker.log) == [1, 1])
        await broker.log.topics.delete("t")
        yield json.dumps(of(3)).encode()
        await asyncio.sleep(0.01)
        await broker.log.topics.create("t", 1, {})
        yield json.dumps(of(4)).encode()

    reports = await stream(broker, body())
    assert codes(reports) == [200, 200, 40403, 200]
    assert [row["value"] for row in await stored(broker.log)] == [b"4"]


@pytest.mark.broker(topics={"t": 1}, buffer_bytes_max=8192, request_bytes_max=4096)
async def test_full_buffer_is_reported_in_place(broker: Broker, faulty: FaultyStore) -> None:
    gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1))

    async def body() -> AsyncIterator[bytes]:
        for n in range(8):
            yield json.dumps(of(str(n) * 1500)).encode()
        await gate.reached.wait()
        gate.opened.set()

    said = codes(await stream(broker, body()))
    assert said == [200] * said.count(200) + [42901] * (8 - said.count(200))
    assert ends(broker.log) == [said.count(200)]
    assert 0 < said.count(200) < 8


# -- open streams


@asynccontextmanager
async def open_stream(
    port: int, target: str
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A chunked request that has begun; what is written must be `chunk`s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {target} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    writer.write(head.encode())
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


def chunk(octets: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(octets), octets)


async def read_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def read_report(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Read a line of the answer. Several lines may be in one of its chunks."""
    line = await reader.readline()
    while not line.startswith(b"{"):
        line = await reader.readline()
    report: dict[str, Any] = json.loads(line)
    return report


async def test_reports_come_while_records_go(broker: Broker, port: int, topic: str) -> None:
    async with open_stream(port, path(broker)) as (reader, writer):
        for n in range(20):
            writer.write(chunk(json.dumps(of(n)).encode()))
            if n == 0:
                head = await read_head(reader)
                assert head.startswith(b"HTTP/1.1 200 ")
                assert b"transfer-encoding: chunked" in head.lower()
            report = await read_report(reader)  # before the next record is sent
            assert (report["error_code"], report["offset"]) == (200, n)
        record = json.dumps(of(20)).encode()
        writer.write(chunk(record[:10]))
        writer.write(chunk(record[10:] + b"x"))
        assert (await read_report(reader))["offset"] == 20
        assert (await read_report(reader))["error_code"] == 400  # the x, before the stream's end
        assert (await reader.readline(), await reader.readline()) == (b"\r\n", b"0\r\n")


@pytest.mark.broker(topics={"t": 2})
async def test_reports_of_slow_commits_are_in_order(
    broker: Broker, port: int, faulty: FaultyStore
) -> None:
    async with open_stream(port, path(broker)) as (reader, writer):
        gate = faulty.hold("create", object_keys.wal(broker.log.state.seq + 1))
        writer.write(chunk(json.dumps(of(0)).encode()))
        await gate.reached.wait()
        writer.write(chunk(json.dumps(of(1, partition_id=9)).encode()))  # refused at once
        writer.write(chunk(json.dumps(of(2)).encode()))
        await asyncio.sleep(0.05)
        gate.opened.set()
        writer.write(chunk(b""))
        await read_head(reader)
        assert [(await read_report(reader))["error_code"] for _ in range(3)] == [200, 40402, 200]


async def test_client_that_leaves_open_stream_leaves_nothing(
    broker: Broker, port: int, topic: str
) -> None:
    before = asyncio.all_tasks()
    async with open_stream(port, path(broker)) as (reader, writer):
        writer.write(chunk(json.dumps(of(0)).encode() * 3 + b'{"value":'))
        await read_head(reader)
        assert (await read_report(reader))["offset"] == 0
    await until(lambda: asyncio.all_tasks() <= before)
    assert ends(broker.log) == [3, 0, 0]  # what was whole


@pytest.mark.broker(topics={"t": 1})
async def test_object_that_has_not_ended_is_charged(broker: Broker, port: int) -> None:
    """Its bytes are given back with its report. If they do not fit, the last report says so."""
    bodies = broker.app.admission.bodies
    async with open_stream(port, path(broker)) as (reader, writer):
        large = json.dumps(of("x" * 300_000)).encode()
        writer.write(chunk(large[:-1]))
        await until(lambda: bodies.used >= len(large))
        assert bodies.used <= len(large) + BODY_STEP_BYTES
        writer.write(chunk(large[-1:]))
        await read_head(reader)
        assert (await read_report(reader))["error_code"] == 200
        writer.write(chunk(json.dumps(of(1)).encode()))
        assert (await read_report(reader))["error_code"] == 200
        await until(lambda: not bodies.used)
        bodies.limit = len(large) // 2
        bodies.take(Other(), BODY_STEP_BYTES)
        writer.write(chunk(large[:-1]))
        assert (await read_report(reader))["error_code"] == 50302
        assert (await reader.read()).endswith(b"0\r\n\r\n")
    await until(lambda: bodies.used == BODY_STEP_BYTES)
    assert ends(broker.log) == [2]


class Other:
    owner = "User:other"

    def on_memory(self) -> None:
        raise AssertionError("it has its bytes")


async def test_compressed_stream_has_bound_of_records(broker: Broker, topic: str) -> None:
    """200 bytes may unpack to a million records. Nothing is appended, whatever the first are."""
    for record, code in ((b"{}", 413), (b"{[}", 413)):
        body = gzip.compress(record * (RECORDS_MAX + 1))
        answer = await broker.http.post(
            path(broker), content=body, headers={"content-encoding": "gzip"}
        )
        assert_refused(answer, 413, code, JSON)
    assert ends(broker.log) == [0, 0, 0]


# -- batches


async def batch(broker: Broker, body: Any) -> httpx.Response:
    return await broker.http.post(path(broker, "records:batch"), json=body)


async def test_batch_is_answered_by_id(broker: Broker, topic: str) -> None:
    entries = [of(1, id="a"), of(2, id="b", partition_id=9), of(3, id=7), of("?", "BINARY", id="d")]
    answer = await batch(broker, {"entries": entries})
    assert (answer.status_code, answer.headers["content-type"]) == (207, JSON)
    said = answer.json()
    assert [(report["id"], report["offset"]) for report in said["successes"]] == [
        ("a", 0),
        ("7", 1),
    ]
    assert [(report["id"], report["error_code"]) for report in said["failures"]] == [
        ("b", 40402),
        ("d", 400),
    ]
    assert all(report.keys() == {"id", "error_code", "message"} for report in said["failures"])
    assert [row["value"] for row in await stored(broker.log)] == [b"1", b"3"]


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (json.dumps({"entries": [of(n, id=str(n)) for n in range(11)]}), 422, 42208),
        (json.dumps({"entries": [of(1, id="a"), of(2, id="a")]}), 422, 42208),
        (json.dumps({"entries": [of(1)]}), 400, 400),
        ("null", 400, 400),
        ("", 400, 400),
    ],
)
async def test_bad_batch_is_refused_whole(
    broker: Broker, topic: str, body: str, status: int, code: int
) -> None:
    answer = await broker.http.post(path(broker, "records:batch"), content=body)
    assert_refused(answer, status, code, JSON)
    assert ends(broker.log) == [0, 0, 0]


@pytest.mark.broker(topics={"t": 1}, request_bytes_max=2048)
async def test_batch_has_bound(broker: Broker) -> None:
    answer = await batch(broker, {"entries": [of("v" * 2048, id="a")]})
    assert_refused(answer, 413, 413, JSON)


# -- whatever comes


@anything
@given(
    body=st.binary(max_size=40)
    | st.lists(JSONISH, max_size=4).map(lambda parts: "".join(map(json.dumps, parts)).encode())
    | st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                **dict.fromkeys(("key", "value"), st.builds(of, JSONISH) | JSONISH),
                **dict.fromkeys(("headers", "partition_id", "timestamp", "id"), JSONISH),
            },
        ),
        max_size=4,
    ).map(lambda records: "".join(map(json.dumps, records)).encode()),
    last=st.sampled_from(["records", "records:batch"]),
    is_batch=st.booleans(),
)
async def test_no_body_is_internal_error(
    broker: Broker, body: bytes, last: str, is_batch: bool
) -> None:
    if "t" not in broker.log.state.topics:
        await broker.log.topics.create("t", 3, {})
    if is_batch:
        body = b'{"entries":[%s]}' % body.replace(b"}{", b"},{")
    answer = await broker.http.post(path(broker, last), content=body)
    assert answer.status_code < 500
    said = [json.loads(line) for line in answer.text.splitlines()]
    assert all(report.get("error_code", 200) < 50000 for report in said)


async def test_body_is_split_in_pieces(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece of a body may have millions of objects. Few of them are split off at a time."""
    feed = v3_records.ObjectStream.feed
    counts: list[int] = []

    def counted(split: v3_records.ObjectStream, piece: bytes) -> list[bytes]:
        assert len(piece) <= produce_v3.SPLIT_BYTES
        objects = feed(split, piece)
        counts.append(len(objects))
        return objects

    monkeypatch.setattr(v3_records.ObjectStream, "feed", counted)
    records = [of(number) for number in range(1500)]
    reports = await stream(broker, "".join(map(json.dumps, records)))
    assert codes(reports) == [200] * len(records)
    assert sum(counts) == len(records)
    assert max(counts) < len(records) / 3


LARGE = {"a value": of("x" * 2_000_000), "headers": of(0, headers=[{"name": "ab"}] * 9000)}


@pytest.mark.parametrize("way", ["stream", "batch"])
@pytest.mark.parametrize("what", LARGE)
async def test_large_record_is_decoded_in_thread(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, way: str, what: str
) -> None:
    threads: list[str] = []
    decode = v3_records.decode_v3_record

    def counted(obj: bytes, now_ms: int) -> v3_records.V3Record:
        threads.append(threading.current_thread().name)
        return decode(obj, now_ms)

    monkeypatch.setattr(v3_records, "decode_v3_record", counted)
    async with broker_on(store) as broker:
        await broker.log.topics.create("t", 1, {"max.message.bytes": "4000000"})
        records = [of("x" * 10), LARGE[what]]
        if way == "stream":
            reports = await stream(broker, "".join(map(json.dumps, records)))
            assert codes(reports) == [200, 200]
        else:
            entries = [{"id": str(number), **record} for number, record in enumerate(records)]
            answer = await batch(broker, {"entries": entries})
            assert len(answer.json()["successes"]) == 2, answer.text
        large = max(await stored(broker.log), key=lambda row: len(str(row)))
    assert len(large["value"]) > 1_000_000 or len(large["headers"]) == 9000
    assert sorted(name.startswith("tidelog-unpack") for name in threads) == [False, True]
