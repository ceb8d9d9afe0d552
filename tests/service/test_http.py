"""HTTP as clients expect it, on every route.

HEAD, OPTIONS, CORS, compression, request ids, Accept, strict bodies, links.
"""

import gzip
import json
import logging
import tracemalloc
import zlib
from typing import Any

import httpx
import pyarrow as pa
import pytest

from tests.service.conftest import JSON, TEXT, V2, Broker, append, stored
from tests.service.instances import created, subscribed
from tests.service.test_rights import address
from tidelog.service.http.content_coding import BadEncoding, coding_of_answer, packed, unpack
from tidelog.service.http.media_types import is_served
from tidelog.service.http.route import V2 as V2_DIALECT
from tidelog.service.routes import fetch, topics_v2
from tidelog.service.server.router import APP_ROUTES, HOT_ROUTES

PATH = "/topics/t/partitions/0/records"
ORIGIN = "https://app.example.com"
BODY = b'{"records":[{"value":1}]}'
MIB = 1024 * 1024


pytestmark = pytest.mark.broker(
    topics={"t": 1}, request_bytes_max=2 * MIB, cors_origins=f"{ORIGIN};http://b"
)


def zstd(body: bytes) -> bytes:
    packed: bytes = pa.compress(body, codec="zstd", asbytes=True)
    return packed


# -- HEAD and OPTIONS


async def test_every_path_names_its_methods(broker: Broker) -> None:
    methods: dict[str, set[str]] = {}
    for route in (*HOT_ROUTES, *APP_ROUTES):
        methods.setdefault(route.paths[0], set()).add(route.method)
    for path, own in methods.items():
        answer = await broker.http.options(address(path, broker))
        assert (answer.status_code, answer.content) == (204, b""), path
        allowed = set(answer.headers["allow"].split(", "))
        assert allowed >= own | {"OPTIONS"}, path
        assert ("HEAD" in allowed) is ("GET" in allowed), path
    assert (await broker.http.options("/nowhere")).status_code == 404


async def test_head_reads_no_record_of_instance(broker: Broker) -> None:
    await append(broker.log, b"0", b"1")
    instance = await subscribed(broker)
    answer = await instance("HEAD", "/records", accept=JSON)
    assert (answer.status_code, answer.content) == (200, b"")
    assert await instance.read() == [0, 1]


async def test_head_of_follower_ends(broker: Broker) -> None:
    answer = await broker.http.head(PATH, headers={"accept": "text/event-stream"})
    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-type"] == "text/event-stream"


async def test_head_is_get_without_body(broker: Broker, port: int) -> None:
    await append(broker.log, b"1")
    paths = ("/", "/healthy", "/ready", "/metrics", "/topics", "/topics/t", "/v3/clusters", PATH)
    for path in (*paths, "/nowhere"):
        got, head = await broker.http.get(path), await broker.http.head(path)
        assert head.status_code == got.status_code == (404 if path == "/nowhere" else 200)
        assert head.content == b""
        assert head.headers["content-type"] == got.headers["content-type"]
    async with httpx.AsyncClient(trust_env=False) as http:
        for path in ("/topics", "/nowhere"):
            url = f"http://127.0.0.1:{port}{path}"
            head, got = await http.head(url), await http.get(url)
            assert head.status_code == got.status_code
            assert head.headers["content-length"] == got.headers["content-length"]
            assert head.content == b""


@pytest.mark.parametrize("accept", [TEXT, "text/event-stream"])
@pytest.mark.parametrize("path", ["/topics/t/records", PATH])
async def test_head_reads_and_encodes_no_record(
    broker: Broker, port: int, monkeypatch: pytest.MonkeyPatch, path: str, accept: str
) -> None:
    if (path, accept) == ("/topics/t/records", TEXT):
        accept = "application/x-ndjson"
    await append(broker.log, b"1", b"2")
    monkeypatch.setattr(fetch, "encode", None)
    monkeypatch.setattr(broker.log.records, "fetch", None)
    async with httpx.AsyncClient(trust_env=False) as http:
        url = f"http://127.0.0.1:{port}{path}"
        query = {"offset": "earliest", "follow": "true"}
        answer = await http.head(url, params=query, headers={"accept": accept})
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"] == accept
        assert "content-length" not in answer.headers
        if path == PATH:
            assert answer.headers["tidelog-high-watermark"] == "2"
            assert (await http.head(url, params={"offset": "3"})).status_code == 400
            assert (await http.head(url, params={"before": "1"})).status_code == 200


# -- compression


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstd)])
@pytest.mark.parametrize("path", ["/topics/t", "/topics/t/partitions/0"])
async def test_packed_body_is_taken(broker: Broker, path: str, coding: str, pack: Any) -> None:
    headers = {"content-type": JSON, "content-encoding": coding}
    answer = await broker.http.post(path, content=pack(BODY), headers=headers)
    assert answer.status_code == 200, answer.text
    assert [row["value"] for row in await stored(broker.log)] == [b"1"]


@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstd)])
async def test_packed_body_of_any_route_is_taken(broker: Broker, coding: str, pack: Any) -> None:
    path = f"{broker.v3}/topics/t/records"
    records = b'{"value":{"type":"JSON","data":1}}{"value":{"type":"JSON","data":2}}'
    packed = {"content-encoding": coding}
    answer = await broker.http.post(path, content=pack(records), headers=packed)
    assert [json.loads(line)["error_code"] for line in answer.text.splitlines()] == [200, 200]
    assert [row["value"] for row in await stored(broker.log)] == [b"1", b"2"]
    for path, kind, body, status in (
        ("/consumers/g", V2, b'{"format":"json"}', 200),
        ("/admin/topics", "application/json", b'{"topic_name":"u","partitions_count":1}', 201),
    ):
        headers = packed | {"content-type": kind}
        answer = await broker.http.post(path, content=pack(body), headers=headers)
        assert answer.status_code == status, answer.text


@pytest.mark.parametrize("path", ["/topics/t", "/consumers/g", "/admin/topics"])
@pytest.mark.parametrize(("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstd)])
async def test_bomb_is_too_large(broker: Broker, path: str, coding: str, pack: Any) -> None:
    body = pack(b" " * (64 * MIB))
    assert len(body) < MIB
    headers = {"content-type": "application/json", "content-encoding": coding}
    answer = await broker.http.post(path, content=body, headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (413, 413)
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("coding", "body", "status"),
    [
        ("br", BODY, 415),
        ("gzip, gzip", gzip.compress(gzip.compress(BODY)), 415),
        ("gzip", BODY, 400),
        ("zstd", BODY, 400),
        ("gzip", gzip.compress(BODY)[:-9], 400),
        ("zstd", zstd(BODY)[:-3], 400),
        ("gzip", gzip.compress(b"") * 10_001, 400),
        ("identity", BODY, 200),
        ("X-GZIP", gzip.compress(BODY[:9]) + gzip.compress(BODY[9:]), 200),
        ("zstd", zstd(BODY[:9]) + zstd(BODY[9:]), 200),
    ],
)
async def test_another_coding_is_refused_as_one(
    broker: Broker, coding: str, body: bytes, status: int
) -> None:
    headers = {"content-type": JSON, "content-encoding": coding}
    answer = await broker.http.post("/topics/t", content=body, headers=headers)
    assert answer.status_code == status, answer.text
    assert len(await stored(broker.log)) == (status == 200)
    if status == 415:
        assert answer.headers["accept-encoding"] == "gzip, zstd"


@pytest.mark.parametrize(
    ("accepted", "of_app", "of_hot"),
    [
        (b"gzip, deflate, br", b"gzip", b""),
        (b"gzip, zstd", b"zstd", b""),
        (b"gzip;q=1.0, zstd;q=0.5", b"gzip", b""),
        (b"zstd, identity;q=0", b"zstd", b"zstd"),
        *((b"gzip, *;q=0", b"gzip", b"gzip"), (b"*", b"zstd", b"")),
        *((b"br, identity;q=0", b"", b""), (b"gzip;q=0", b"", b"")),
        *((b"gzip;q=x,,;", b"gzip", b""), (b"", b"", b"")),
    ],
)
def test_what_client_accepts(accepted: bytes, of_app: bytes, of_hot: bytes) -> None:
    assert coding_of_answer(accepted, is_hot=False) == of_app
    assert coding_of_answer(accepted, is_hot=True) == of_hot


async def test_large_answers_are_packed_for_clients_that_accept_it(broker: Broker) -> None:
    plain = await broker.http.get("/openapi.json", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    packed = await broker.http.get("/openapi.json", headers={"accept-encoding": "gzip"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    assert packed.json() == plain.json()
    await append(broker.log, b'"%s"' % (b"v" * 50_000))
    for accepted, coding in (("gzip", None), ("gzip, identity;q=0", "gzip")):
        headers = {"accept": JSON, "accept-encoding": accepted}
        answer = await broker.http.get(PATH, headers=headers)
        assert answer.headers.get("content-encoding") == coding
        assert len(answer.json()[0]["value"]) == 50_000
    headers = {"accept": JSON, "accept-encoding": "zstd, identity;q=0"}
    async with broker.http.stream("GET", PATH, headers=headers) as answer:
        assert answer.headers["content-encoding"] == "zstd"
        body = b"".join([part async for part in answer.aiter_raw()])
    content = pa.CompressedInputStream(pa.BufferReader(body), "zstd").read()
    assert len(json.loads(content)[0]["value"]) == 50_000


def test_gzip_answer_is_gzip() -> None:
    from tidelog.service.http.content_coding import _gzip

    assert zlib.decompress(_gzip(BODY), 31) == BODY


# -- CORS


async def test_page_of_allowed_origin_may_read_and_write(broker: Broker) -> None:
    asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
    answer = await broker.http.options("/topics/t", headers=asked)
    assert answer.status_code == 204
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    allowed = answer.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    assert "tidelog-console" not in allowed, "the proof of the own origin"
    headers = {"origin": ORIGIN, "sec-fetch-site": "cross-site", "content-type": JSON}
    answer = await broker.http.post("/topics/t", content=BODY, headers=headers)
    assert answer.status_code == 200
    for path in ("/topics", "/topics/none", PATH):
        answer = await broker.http.get(path, headers={"origin": ORIGIN})
        assert answer.headers["access-control-allow-origin"] == ORIGIN
        assert "access-control-allow-credentials" not in answer.headers


async def test_page_of_another_origin_may_not(broker: Broker) -> None:
    for origin in ("https://evil.example.com", f"{ORIGIN}.evil.com", "null", ORIGIN.upper()):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = await broker.http.options("/topics/t", headers=asked)
        assert "access-control-allow-origin" not in answer.headers
        headers = {"origin": origin, "sec-fetch-site": "cross-site", "content-type": JSON}
        answer = await broker.http.post("/topics/t", content=BODY, headers=headers)
        assert answer.status_code == 403
    assert await stored(broker.log) == []


@pytest.mark.broker(cors_origins="")
async def test_without_setting_no_origin_is_allowed(broker: Broker) -> None:
    answer = await broker.http.get("/topics", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


# -- request ids


@pytest.mark.parametrize(
    "path", ["/topics", PATH, "/topics/none", "/topics/none/partitions/0/records"]
)
async def test_id_of_request_is_returned(broker: Broker, path: str) -> None:
    answer = await broker.http.get(path, headers={"x-request-id": "a-b/c.1"})
    assert answer.headers["x-request-id"] == "a-b/c.1"
    assert answer.headers.get_list("x-request-id") == ["a-b/c.1"]


@pytest.mark.parametrize("path", ["/topics/none", "/topics/none/partitions/0/records"])
@pytest.mark.parametrize("headers", [{}, {"x-request-id": "a b"}, {"x-request-id": "x" * 129}])
async def test_error_always_has_id(broker: Broker, path: str, headers: dict[str, str]) -> None:
    answers = [await broker.http.get(path, headers=headers) for _ in range(2)]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 2
    assert not ids & set(headers.values())


async def test_log_names_request(
    broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics_v2, "_partitions", None)  # a bug
    with caplog.at_level(logging.ERROR):
        answer = await broker.http.get("/topics/t/partitions", headers={"x-request-id": "r-17"})
    assert answer.status_code == 500
    assert "r-17" in caplog.text
    (line,) = (record for record in caplog.records if record.name == "tidelog.http")
    fields = line.__dict__["fields"]
    assert fields["request_id"] == "r-17"
    assert (fields["topic"], fields["error_code"], fields["status"]) == ("t", 50002, 500)


# -- Accept


@pytest.mark.parametrize(
    ("accept", "is_one"),
    [
        (b"*/*", True),
        (b"application/vnd.kafka.v2+json, application/json", True),
        (b"text/html, */*;q=0.8", True),
        (b"application/vnd.kafka+json", True),
        (b"application/vnd.kafka.json.v2+json", False),
        (b"application/vnd.apache.arrow.stream", False),
        (b"application/xml", False),
        (b"garbage", False),
        (b"*/*;q=0", False),
        (b"application/json;q=0.0, text/html", False),
    ],
)
def test_types_of_accept(accept: bytes, is_one: bool) -> None:
    assert is_served(accept, V2_DIALECT.served) is is_one


# -- bodies


async def test_no_route_takes_unknown_field(broker: Broker) -> None:
    instance = await created(broker)
    checked = 0
    for route in HOT_ROUTES:
        if route.doc.body is None or not route.doc.body.example:
            continue
        path = address(route.paths[0], broker)
        if "instances" in path:
            path = instance.path + route.path.partition("{instance}")[2]
        body = json.dumps({**route.doc.body.example, "misspelt": 1})
        kind = JSON if path.startswith("/topics") else V2
        answer = await broker.http.request(
            route.method, path, content=body, headers={"content-type": kind}
        )
        reports = [json.loads(line) for line in answer.text.splitlines()]
        assert reports[0]["error_code"] in (400, 422), (route.path, answer.text)
        assert "misspelt" in reports[0]["message"], (route.path, answer.text)
        checked += 1
    assert checked >= 10


async def test_every_body_of_fastapi_refuses_unknown_fields(broker: Broker) -> None:
    document = (await broker.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    bodies = 0
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content = operation.get("requestBody", {}).get("content", {})
            reference = content.get("application/json", {}).get("schema", {}).get("$ref")
            if reference is not None:
                bodies += 1
                schema = schemas[reference.rpartition("/")[2]]
                assert schema["additionalProperties"] is False, path
    assert bodies >= 8


# -- links


@pytest.mark.broker(advertised_url="https://log.example.com:8443/a/")
async def test_links_begin_with_advertised_url(broker: Broker) -> None:
    answer = await broker.http.post("/consumers/g", json={"name": "i"})
    expected = "https://log.example.com:8443/a/consumers/g/instances/i"
    assert answer.json()["base_uri"] == expected
    clusters = (await broker.http.get("/v3/clusters")).json()
    assert clusters["metadata"]["self"] == "https://log.example.com:8443/a/v3/clusters"


@pytest.mark.broker(advertised_url="https://[2001:db8::1]:8443")
async def test_links_begin_with_advertised_address_of_ipv6(broker: Broker) -> None:
    answer = await broker.http.post("/consumers/g", json={"name": "i"})
    expected = "https://[2001:db8::1]:8443/consumers/g/instances/i"
    assert answer.json()["base_uri"] == expected


@pytest.mark.parametrize("coding", [b"gzip", b"zstd"])
async def test_bodies_that_do_not_unpack_leave_no_memory(coding: bytes) -> None:
    """The bytes up to the error are not held: pyarrow's `read` keeps those of a failed call."""
    whole = await packed(b"".join(b"%d;" % number for number in range(40_000)), coding)
    damaged = whole[:12] + b"\xff" * 20 + whole[32:]
    tracemalloc.start()
    try:
        with pytest.raises(BadEncoding):
            unpack(damaged, coding, 1 << 20)
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(5):
            with pytest.raises(BadEncoding):
                unpack(damaged, coding, 1 << 20)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 1 << 18


# -- paths

RECORD = {"value": {"type": "JSON", "data": 1}, "partition_id": 0}
COMMITTED = {
    "consumer_groups": [
        {"consumer_group_id": "g", "offsets": [{"topic_name": "t", "partition_id": 0, "offset": 5}]}
    ]
}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (path, {"records": [{"value": "MQ==", "partition": 0}]})
            for path in ("/topics/t/", "//topics/t", "///topics//t//", "/topics/t/partitions/0/")
        ),
        *((path, None) for path in ("/topics/", "//topics", "///topics//", "/topics//")),
        *(
            (f"{mount}/clusters/{{cluster}}/topics/t/records/", RECORD)
            for mount in ("/v3", "/kafka/v3", "//v3", "/kafka//v3")
        ),
        *(
            (f"{mount}/clusters/{{cluster}}/transactions/", COMMITTED)
            for mount in ("/v3", "/kafka/v3", "//v3")
        ),
    ],
)
async def test_slashes_and_mounts_do_not_matter(broker: Broker, path: str, body: Any) -> None:
    cluster = broker.log.identity.cluster_id
    url = f"http://tide:8082{path.format(cluster=cluster)}"
    if body is None:
        answer = await broker.http.get(url)
        assert (answer.status_code, answer.json()) == (200, ["t"])
        return
    answer = await broker.http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    if body is COMMITTED:
        base = f"{url.removesuffix('/transactions/')}/consumer-groups/g/offsets"
        assert (await broker.http.get(base)).json() == {
            "kind": "TidelogConsumerGroupOffsetList",
            "metadata": {
                "self": f"http://tide:8082{httpx.URL(base).path.replace('//', '/')}",
                "next": None,
            },
            "cluster_id": cluster,
            "consumer_group_id": "g",
            "data": [{**COMMITTED["consumer_groups"][0]["offsets"][0], "metadata": ""}],
        }
    else:
        answer = await broker.http.get("http://tide:8082//topics/t//partitions/0/records/")
        assert len(answer.json()) == 1
