"""GET /topics/{t}/partitions/{p}/records: offsets, bounds, waiting, formats, tiers, damage.

Open streams are in test_follow.
"""

import asyncio
import json
from typing import Any
from urllib.parse import urlencode

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.service.conftest import (
    ARROW,
    BINARY,
    FIRST_MS,
    JSON,
    TEXT,
    V2,
    Broker,
    append,
    assert_refused,
    broker_on,
    positions,
    post,
    send,
    until,
    values,
)
from tests.support.properties import examples
from tests.support.vloop import VirtualLoop
from tidelog.service.settings.settings import Settings
from tidelog.storage.store.memory import MemoryStore

PATH = "/topics/t/partitions/0/records"


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, object]]:
    """Virtual time: a poll that ends too early or too late is seen on any machine."""
    return "asyncio", {"loop_factory": VirtualLoop}


async def get(broker: Broker, accept: str | None = None, **query: Any) -> httpx.Response:
    headers = {} if accept is None else {"accept": accept}
    return await broker.http.get(PATH, headers=headers, params=query)


@pytest.fixture
async def ten(broker: Broker, topic: str) -> None:
    """Ten records of ten bytes in partition 0, stamped a millisecond apart."""
    await append(broker.log, *(b"value-%04d" % n for n in range(10)))


# -- where to begin


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ({}, 0),
        ({"offset": "earliest"}, 0),
        ({"offset": "0"}, 0),
        ({"offset": "7"}, 7),
        ({"offset": "10"}, 10),
        ({"offset": "latest"}, 10),
        ({"timestamp": str(FIRST_MS - 1)}, 0),
        ({"timestamp": str(FIRST_MS)}, 0),
        ({"timestamp": str(FIRST_MS + 7)}, 7),
        ({"timestamp": str(FIRST_MS + 9)}, 9),
        ({"timestamp": str(FIRST_MS + 10)}, 10),
        ({"timestamp": "0"}, 0),
        ({"last-event-id": "3"}, 4),
    ],
)
async def test_fetch_begins_at_requested_place(
    broker: Broker, ten: None, query: dict[str, str], first: int
) -> None:
    answer = await get(broker, **query)
    assert answer.status_code == 200
    assert [record["offset"] for record in answer.json()] == list(range(first, 10))
    assert positions(answer) == (10, 10, 0)


@pytest.mark.parametrize(
    ("query", "offsets", "first"),
    [
        ({"before": "latest"}, range(10), 0),
        ({"before": "latest", "max_records": "3"}, range(7, 10), 7),
        ({"before": "latest", "max_bytes": "1"}, range(9, 10), 9),
        ({"before": "7", "max_records": "2"}, range(5, 7), 5),
        ({"before": "99", "max_records": "2"}, range(8, 10), 8),
        ({"before": "0"}, range(0), 0),
    ],
)
async def test_newest_records_before_offset(
    broker: Broker, ten: None, query: dict[str, str], offsets: range, first: int
) -> None:
    answer = await get(broker, **query)
    assert answer.status_code == 200, answer.text
    assert [record["offset"] for record in answer.json()] == [*offsets]
    assert positions(answer) == (min(int(query["before"].replace("latest", "10")), 10), 10, 0)
    assert int(answer.headers["tidelog-first-offset"]) == first


async def test_no_record_is_before_log_start(broker: Broker, ten: None) -> None:
    await broker.log.topics.delete_records("t", 0, 4)
    answer = await get(broker, before="6")
    assert [record["offset"] for record in answer.json()] == [4, 5]
    assert (await get(broker, before="4")).json() == []
    assert_refused(await get(broker, before="3"), 400, 40002)


async def test_record_is_whole(broker: Broker, topic: str) -> None:
    record = {"key": "k", "value": {"a": 1}, "timestamp": 5, "partition": 0}
    record["headers"] = [{"key": "h", "value": "aGk="}]
    await post(broker.http, [record])
    answer = await get(broker, JSON)
    assert answer.json() == [{"topic": "t", "offset": 0, **record}]


async def test_empty_partition_has_end(broker: Broker, topic: str) -> None:
    for query in ({}, {"offset": "latest"}, {"offset": "0"}, {"timestamp": "0"}):
        answer = await get(broker, **query)
        assert (answer.status_code, answer.json()) == (200, [])
        assert positions(answer) == (0, 0, 0)


@pytest.mark.parametrize("offset", ["11", str(2**63 - 1)])
async def test_out_of_range_says_range(broker: Broker, ten: None, offset: str) -> None:
    message = assert_refused(await get(broker, offset=offset), 400, 40002)
    assert f"offset {offset} is out of range" in message
    assert "0 to 10" in message


@pytest.mark.parametrize(
    "text",
    ["-1", "x", "", "1.5", "1_0", " 1", "0x1", "\u0661", "9" * 19, "9" * 5000, "1e3", "null"],
)
@pytest.mark.parametrize("name", ["offset", "timestamp", "timeout", "max_bytes", "last-event-id"])
async def test_bad_parameters_are_refused(broker: Broker, ten: None, name: str, text: str) -> None:
    if name in ("timeout", "max_bytes") and text == "9" * 19:
        text = "9" * 20
    assert_refused(await get(broker, **{name: text}), 400, 40002)


@pytest.mark.parametrize(
    "query",
    [
        {"offset": "0", "timestamp": "0"},
        {"offset": "earliest", "timestamp": "0"},
        {"offset": "smallest"},
        {"max_bytes": "0"},
        {"max_records": "0"},
        {"timestamp": "253402300800000"},
        {"format": "avro"},
        {"before": "-1"},
        {"before": "newest"},
        *({"before": "5", name: "3"} for name in ("offset", "timestamp", "timeout")),
        {"before": "5", "follow": "true"},
    ],
    ids=str,
)
async def test_nonsense_is_refused(broker: Broker, ten: None, query: dict[str, str]) -> None:
    for accept in ("application/x-ndjson", *([None] if "before" in query else [])):
        assert_refused(await get(broker, accept, **query), 400, 40002)


@pytest.mark.parametrize("event_id", ["", "x", "-1", "1 2", "\xff", str(2**63)])
async def test_bad_last_event_id_is_refused(broker: Broker, ten: None, event_id: str) -> None:
    headers = {"last-event-id": event_id.encode("latin-1")}
    answer = await broker.http.get(PATH, headers=headers)
    if event_id:
        assert_refused(answer, 400, 40002)
    else:  # what an EventSource has that has seen no id
        assert len(answer.json()) == 10


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/topics/none/partitions/0/records", 40401),
        ("/topics/t/partitions/3/records", 40402),
        ("/topics/t/partitions/-1/records", 40402),
        ("/topics/t/partitions/x/records", 40402),
        ("/topics/t/partitions/%D9%A1/records", 40402),
        (f"/topics/t/partitions/{'9' * 5000}/records", 40402),
        ("/topics/none/partitions/0/records?offset=0&timeout=0", 40401),
        ("/topics/none/partitions/0/records?offset=", 40401),
        ("/topics//partitions/0/records?offset=0", 404),
        ("/consumers/g/instances/i/topics/t", 404),  # of v1
    ],
)
async def test_what_is_not_there_is_404(broker: Broker, ten: None, path: str, code: int) -> None:
    assert_refused(await broker.http.get(path), 404, code)


# -- how much


# A record weighs 10 bytes of key and value and 24; there is always one.
CUTS = {
    "max_bytes": ((1, 1), (34, 1), (67, 1), (68, 2), (339, 9), (340, 10), (10**18, 10)),
    "max_records": ((1, 1), (9, 9), (10, 10), (10**18, 10)),
}


@pytest.mark.parametrize("bound", CUTS)
async def test_bound_cuts_exactly(broker: Broker, ten: None, bound: str) -> None:
    for limit, count in CUTS[bound]:
        answer = await get(broker, offset=0, **{bound: limit})
        assert len(answer.json()) == count
        assert positions(answer) == (count, 10, 0)


async def test_following_next_offset_reads_all_once(broker: Broker, ten: None) -> None:
    read: list[str] = []
    offset = 0
    while offset < 10:
        answer = await get(broker, TEXT, offset=offset, max_bytes=80)
        read += [record["value"] for record in answer.json()]
        offset = positions(answer)[0]
    assert read == [f"value-{n:04d}" for n in range(10)]


@pytest.mark.broker(topics={"t": 1}, fetch_bytes=68, fetch_bytes_max=1024)
async def test_servers_bound_is_last_word(broker: Broker) -> None:
    await append(broker.log, *([b"v" * 10] * 200))
    assert len((await get(broker)).json()) == 2
    assert len((await get(broker, max_bytes=10**9)).json()) == 30


# -- long polls


async def timed(broker: Broker, **query: Any) -> tuple[httpx.Response, float]:
    loop = asyncio.get_running_loop()
    started = loop.time()
    return await get(broker, TEXT, **query), loop.time() - started


async def test_poll_returns_with_first_record(broker: Broker, ten: None) -> None:
    polls = [asyncio.create_task(timed(broker, offset=10, timeout=20_000)) for _ in range(3)]
    await until(lambda: len(broker.log._log.waiting.get(("t", 0), ())) == 3)
    await append(broker.log, b"else", partition=1)
    await asyncio.sleep(0.02)
    assert not any(poll.done() for poll in polls)
    await append(broker.log, b"new")
    for poll in polls:
        answer, took_s = await poll
        assert [record["value"] for record in answer.json()] == ["new"]
        assert positions(answer) == (11, 11, 0)
        assert took_s < 0.1
    assert not broker.log._log.waiting


async def test_poll_ends_at_its_timeout(broker: Broker, ten: None) -> None:
    answer, took_s = await timed(broker, offset=10, timeout=150)
    assert answer.json() == []
    assert positions(answer) == (10, 10, 0)
    assert took_s == pytest.approx(0.15)


async def test_poll_does_not_wait_for_what_is_there(broker: Broker, ten: None) -> None:
    answer, took_s = await timed(broker, offset=9, timeout=20_000)
    assert len(answer.json()) == 1
    assert took_s == 0


class _ShortPolls(Settings):
    fetch_wait_ms_max = 50


async def test_polls_timeout_has_bound(store: MemoryStore) -> None:
    async with broker_on(store, kind=_ShortPolls) as broker:
        await broker.log.topics.create("t", 1, {})
        _, took_s = await timed(broker, timeout=10**15)
        assert took_s == pytest.approx(0.05)


async def test_poll_ends_when_its_topic_does(broker: Broker, ten: None) -> None:
    poll = asyncio.create_task(get(broker, offset=10, timeout=300))
    await until(lambda: broker.log._log.waiting)
    await broker.log.topics.delete("t")
    assert_refused(await poll, 404, 40401)


async def test_poll_sees_what_another_broker_acked(store: MemoryStore) -> None:
    async with broker_on(store) as writer, broker_on(store, "b2", poll_interval_ms=10) as reader:
        await writer.log.topics.create("t", 1, {})
        await append(writer.log, b"a")
        assert await values(reader) == ["a"]
        await append(writer.log, b"b")  # I3: without a wait
        assert await values(reader, offset=1) == ["b"]
        poll = asyncio.create_task(values(reader, offset=2, timeout=20_000))
        await until(lambda: reader.log._log.waiting)
        await append(writer.log, b"c")
        assert await poll == ["c"]


@pytest.mark.broker(topics={"t": 2}, fetch_bytes_in_flight=1024)
async def test_waiting_holds_nothing_of_bound(broker: Broker) -> None:
    await append(broker.log, b"a", partition=1)
    query = {"max_bytes": 1024, "timeout": 20_000}
    polls = [asyncio.create_task(get(broker, TEXT, **query)) for _ in range(5)]
    await until(lambda: len(broker.log._log.waiting.get(("t", 0), ())) == 5)
    answer = await broker.http.get("/topics/t/partitions/1/records?max_bytes=1024")
    assert (answer.status_code, len(answer.json())) == (200, 1)
    await append(broker.log, b"b")
    for poll in polls:
        assert [record["value"] for record in (await poll).json()] == ["b"]


async def test_bound_of_answers_is_503(store: MemoryStore) -> None:
    gate = asyncio.Event()
    async with broker_on(store, fetch_bytes_in_flight=1500) as broker:
        await broker.log.topics.create("t", 1, {})
        await append(broker.log, b"a")
        broker.log._log.tail.clear()
        get_range = store.get_range

        async def slow(key: str, start: int, length: int) -> bytes:
            await gate.wait()
            return await get_range(key, start, length)

        store.get_range = slow
        first = asyncio.create_task(get(broker, max_bytes=1000, offset=0))
        await asyncio.sleep(0.01)
        answer = await get(broker, max_bytes=1000, offset=0)
        assert_refused(answer, 503, 50302)
        assert answer.headers["retry-after"] == "1"
        gate.set()
        assert len((await first).json()) == 1
        assert len((await get(broker, max_bytes=1000, offset=0)).json()) == 1


# -- formats


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        *((None, BINARY), ("", BINARY), ("*/*", BINARY), ("application/*", BINARY), (V2, BINARY)),
        *(("application/json", BINARY), (JSON, JSON)),
        (JSON.upper(), JSON),
        (f"{JSON}; q=0.5", JSON),
        ("application/vnd.kafka.json+json", JSON),
        ("application/vnd.kafka.json.v1+json", JSON),
        (TEXT, TEXT),
        (ARROW, ARROW),
        ("application/x-ndjson", "application/x-ndjson"),
        (f"text/html, {TEXT};q=0.9, */*;q=0.1", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", BINARY),
    ],
)
async def test_accept_chooses_format(
    broker: Broker, topic: str, accept: str | None, media_type: str
) -> None:
    await append(broker.log, b"1")
    headers = [] if accept is None else [("accept", accept)]
    request = broker.http.build_request("GET", PATH)
    request.headers = httpx.Headers(headers)
    answer = await broker.http.send(request)
    assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)


@pytest.mark.parametrize(
    "accept",
    [
        *("text/html", "image/*", "image/png", "application/vnd.kafka.xml.v2+json", "\xff"),
        "application",
    ],
)
async def test_other_formats_are_406(broker: Broker, ten: None, accept: str) -> None:
    answer = await broker.http.get(PATH, headers={"accept": accept.encode("latin-1")})
    said = assert_refused(answer, 406, 40601)
    assert said.startswith(f"HTTP 406 Not Acceptable: ask for {JSON} (keys and values as JSON), ")
    assert said.endswith(f"not {accept!r}")
    for other in (ARROW, "application/x-ndjson", "text/event-stream"):
        assert other in said


async def test_what_is_no_json_is_named(broker: Broker, topic: str) -> None:
    await append(broker.log, b'{"a":1}', b"null", b'1},{"x":2', b"2")
    answer = await get(broker, JSON)
    assert [record["offset"] for record in answer.json()] == [0, 1]
    assert answer.headers["tidelog-undecodable"] == "t-0@2"
    assert positions(answer) == (2, 4, 0)
    message = assert_refused(await get(broker, JSON, offset=2), 422, 422)
    place = "partition t-0, offset 2:"
    assert message.startswith(f"value deserialization error for format json: {place}")
    assert len((await get(broker, JSON, offset=3)).json()) == 1
    await append(broker.log, b"\xff")
    message = assert_refused(await get(broker, TEXT, offset=4), 422, 422)
    assert "format text: partition t-0, offset 4" in message
    assert len((await get(broker, BINARY)).json()) == 5


async def test_plain_string_key_stops_no_reader_of_json(broker: Broker, topic: str) -> None:
    """As most clients of Kafka have it."""
    record = {"key": {"type": "STRING", "data": "N14228"}, "value": {"type": "JSON", "data": 1}}
    path = f"{broker.v3}/topics/t/records"
    made = await broker.http.post(path, json=record | {"partition_id": 0})
    assert made.json()["error_code"] == 200
    answer = await get(broker, JSON)
    assert answer.status_code == 200, answer.text
    assert [record["value"] for record in answer.json()] == [1]


async def test_lines_are_records(broker: Broker, topic: str) -> None:
    await append(broker.log, b'{"a":\n1}', None, '"\u2028"'.encode())
    answer = await get(broker, "application/x-ndjson")
    lines = answer.text.splitlines()
    assert [json.loads(line)["value"] for line in lines] == [{"a": 1}, None, "\u2028"]
    assert positions(answer) == (3, 3, 0)
    answer = await get(broker, "application/x-ndjson", format="binary", offset=1)
    assert [json.loads(line)["value"] for line in answer.text.splitlines()] == [None, "IuKAqCI="]
    assert (await get(broker, "application/x-ndjson", offset="latest")).content == b""


# -- whatever comes


@examples(200, is_fixture_shared=True)
@given(
    query=st.lists(
        st.tuples(
            st.sampled_from(["offset", "timestamp", "max_bytes", "format", "last-event-id"]),
            st.text(max_size=4)
            | st.integers().map(str)
            | st.sampled_from(["earliest", "latest", "json", "0", "3"]),
        ),
        max_size=3,
    ).map(lambda pairs: urlencode(pairs).encode())
    | st.binary(max_size=10),
    accept=st.sampled_from([JSON, BINARY, TEXT, ARROW, "*/*", "application/x-ndjson"]).map(
        str.encode
    )
    | st.binary(max_size=4),
    event_id=st.none() | st.binary(max_size=3) | st.integers().map(lambda n: str(n).encode()),
)
async def test_no_query_is_internal_error(
    broker: Broker, query: bytes, accept: bytes, event_id: bytes | None
) -> None:
    if "t" not in broker.log.state.topics:
        await broker.log.topics.create("t", 1, {})
        await append(broker.log, b"1", b'"2"', b"3")
    headers = [(b"accept", accept)]
    if event_id is not None:
        headers.append((b"last-event-id", event_id))
    scope = {"type": "http", "method": "GET", "path": PATH}
    scope |= {"query_string": query, "headers": headers}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await broker.app(scope, receive, send)
    status = sent[0]["status"]
    assert status in {200, 400, 406, 422}, sent
    if status != 200:
        assert json.loads(sent[1]["body"]).keys() == {"error_code", "message"}


@pytest.mark.parametrize(
    "number", ["1e999999", "-1e999999", "9" * 5000, "[" + "9" * 5000 + "]"], ids=lambda n: n[:9]
)
async def test_number_that_is_taken_can_be_read(broker: Broker, topic: str, number: str) -> None:
    body = f'{{"records":[{{"value":{number},"partition":0}}]}}'
    made = await send(broker.http, body, JSON)
    if made.status_code != 200:
        assert made.status_code in (400, 422)
        return
    answer = await get(broker, JSON)
    assert answer.status_code == 200, answer.text
    for read in (json.loads, orjson.loads):
        read(answer.content)
