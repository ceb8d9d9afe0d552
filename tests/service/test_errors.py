"""Each error class has its status and code; no text of other libraries is sent."""

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from fastapi import Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tests.service.conftest import QUIET, http_client, routed
from tidelog.service.http.body_limit import SMALL_BODY
from tidelog.service.http.errors import (
    MESSAGE_CHARS_MAX,
    TopicNotHosted,
    error_body,
    error_response,
)
from tidelog.service.http.route import HIDDEN, PLAIN, V2, V3, Route, RouteAccess
from tidelog.service.operations import change_request
from tidelog.service.server.app import build_app
from tidelog.storage.broker import Broker
from tidelog.storage.core import errors
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.object_store import Created


class Dialect(errors.InvalidRequest):
    status = 406
    code = 40601


TABLE = [
    (errors.UnknownTopic("t"), 404, 40401),
    (TopicNotHosted("t"), 404, 40403),
    (errors.UnknownPartition("t", 3, 2), 404, 40402),
    (errors.TopicExists("t"), 400, 40002),
    (errors.InvalidTopicName("n"), 400, 40002),
    (errors.InvalidPartitions("p"), 400, 40002),
    (errors.InvalidConfig("c"), 400, 40002),
    (errors.InvalidRequest("r"), 400, 40002),
    (errors.OffsetOutOfRange("t", 0, 9, log_start_offset=3, high_watermark=7), 400, 40002),
    (errors.RecordTooLarge("l"), 413, 413),
    (errors.InvalidTimestamp("i"), 422, 422),
    (errors.IdempotencyMismatch("i"), 422, 422),
    (errors.OffsetMetadataTooLarge("m"), 422, 422),
    (errors.StaleCommit("s"), 409, 40903),
    (errors.ProducerFenced("p"), 409, 40903),
    (errors.OutOfOrderSequence("o"), 409, 40903),
    (errors.UnknownProducer("u"), 409, 40903),
    (errors.IllegalGeneration("g"), 409, 40903),
    (errors.UnknownMember("m"), 409, 40903),
    (errors.GroupNotEmpty("g"), 409, 40903),
    (errors.InconsistentGroupProtocol("g"), 409, 40903),
    (errors.MemberExists("m"), 409, 40902),
    (errors.NotAssigned("n"), 409, 40903),
    (errors.AssignedOtherwise(), 409, 40903),
    (errors.Throttled("b", retry_after_ms=1001), 429, 42901),
    (errors.BoundReached("b", retry_after_ms=1001), 429, 42901),
    (errors.Unavailable("u"), 503, 50302),
    (errors.StoreRefused("u"), 503, 50302),
    (errors.CommitUnknown("c"), 504, 50003),
    (errors.SetAside("s"), 504, 50003),
    (errors.Corrupt("wal/7", "crc"), 500, 50002),
    (errors.TableInDoubt("topics/t-ab", 3, "a hole"), 500, 50002),
    (errors.DamagedRecords("t", 0, 3, 5, errors.Corrupt("k", "w")), 500, 50002),
    (errors.ObjectNotFound("wal/7"), 500, 50002),
    (errors.StoreUnfit("s"), 500, 50002),
    (errors.Fenced("b", 3), 500, 50002),
    (errors.NewerLevel("wal/7", 3, 2), 500, 50002),
    (errors.LogError("l"), 500, 50002),
    (Dialect("d"), 406, 40601),
]


def test_every_error_class_is_in_table() -> None:
    def below(kind: type[errors.LogError]) -> set[type[errors.LogError]]:
        return {kind}.union(*(below(subclass) for subclass in kind.__subclasses__()))

    ours = {
        kind for kind in below(errors.LogError) if kind.__module__ == "tidelog.storage.core.errors"
    }
    assert ours <= {type(error) for error, _, _ in TABLE}


def test_page_says_what_to_do_about_each_status() -> None:
    page = (Path(__file__).parents[2] / "service" / "docs" / "API.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([\d, ]*\d)[^|]*\| [^|]+ \| [^|]+ \|$", page, re.MULTILINE)
    named = {(int(status), int(code)) for status, codes in rows for code in codes.split(", ")}
    assert named >= {(status, code) for _, status, code in TABLE}


@pytest.mark.parametrize(
    ("milliseconds", "seconds"), [(0, "1"), (1, "1"), (1000, "1"), (1001, "2")]
)
def test_throttled_says_when_to_come_back(milliseconds: int, seconds: str) -> None:
    answer = error_response(errors.Throttled("full", retry_after_ms=milliseconds))
    assert answer.headers == {"Retry-After": seconds}


def test_messages_carry_what_client_needs() -> None:
    out_of_range = errors.OffsetOutOfRange("t", 0, 9, log_start_offset=3, high_watermark=7)
    assert "3 to 7" in error_response(out_of_range).message
    assert "wal/7" in error_response(errors.Corrupt("wal/7", "crc")).message
    assert "Idempotency-Key" in error_response(errors.CommitUnknown("timed out")).message
    assert error_response(errors.Unavailable("down")).headers == {"Retry-After": "1"}


@given(st.integers(), st.text(st.characters(exclude_categories=[])))
def test_any_message_makes_body(code: int, message: str) -> None:
    said = json.loads(error_body(code, message))
    assert said.keys() == {"error_code", "message"}
    assert said["error_code"] == code


def test_message_is_bounded() -> None:
    assert len(error_body(1, "x" * 10**6)) < MESSAGE_CHARS_MAX + 100


# -- as HTTP


class Body(BaseModel):
    numbers: dict[str, int]


async def raise_one(number: int) -> None:
    raise TABLE[number][0]


async def bug() -> None:
    raise ValueError("the secret")


async def take(body: Body) -> None:
    return None


async def take_raw(request: Request) -> int:
    return len(await request.body())


RAISING = tuple(
    Route(method, path, serve, RouteAccess.PUBLIC, "test", dialect, HIDDEN)
    for method, path, serve, dialect in (
        ("GET", "/topics/raise/{number}", raise_one, V2),
        ("GET", "/bug", bug, V3),
        ("GET", "/topics/a/bug", bug, V2),
        ("POST", "/body", take, PLAIN),
        ("POST", "/raw", take_raw, PLAIN),
    )
)


@pytest.fixture
def app(log: Broker) -> object:
    return build_app(log, routes=RAISING)


@pytest.mark.parametrize("number", range(len(TABLE)))
async def test_errors_are_answered_in_our_form(client: httpx.AsyncClient, number: int) -> None:
    error, status, code = TABLE[number]
    answer = await client.get(f"/topics/raise/{number}")
    assert answer.status_code == status
    assert answer.json() == {"error_code": code, "message": error_response(error).message}
    assert answer.headers["content-type"] == "application/vnd.kafka.v2+json"
    assert ("retry-after" in answer.headers) == (status in {429, 503})


@pytest.mark.parametrize(
    ("path", "media_type"),
    [("/v3/bug", "application/json"), ("/topics/a/bug", "application/vnd.kafka.v2+json")],
)
async def test_bug_is_logged_and_its_text_is_not_sent(
    client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, path: str, media_type: str
) -> None:
    with caplog.at_level(logging.ERROR, "tidelog.http"):
        answer = await client.get(path)
    assert (answer.status_code, answer.json()["error_code"]) == (500, 50002)
    assert answer.headers["content-type"] == media_type
    assert "secret" not in answer.text
    assert "the secret" in caplog.text


async def test_bare_http_errors_have_form_too(client: httpx.AsyncClient) -> None:
    answer = await client.get("/no/such/path")
    said = {"error_code": 404, "message": "HTTP 404 Not Found"}
    assert (answer.status_code, answer.json()) == (404, said)
    answer = await client.put("/topics")
    said = {"error_code": 405, "message": "HTTP 405 Method Not Allowed"}
    assert (answer.status_code, answer.json()) == (405, said)


@pytest.mark.parametrize(
    ("content", "headers", "status", "message"),
    [
        (b"", {}, 422, "the body is missing"),
        (b"null", {}, 422, "the body: "),
        (b"{", {}, 400, "the body is not JSON"),
        (b"\xff", {}, 400, "parsing the body"),
        (b"[" * 3_000, {}, 400, "parsing the body"),
        (b'{"numbers": {"a": ' + b"9" * 5000 + b"}}", {}, 400, "parsing the body"),
        (b'{"numbers": {"a": "x"}}', {}, 422, "numbers.a: "),
        (b'{"numbers": {"\\ud800": "x"}}', {}, 422, "numbers"),
        (b'{"numbers": {}}', {"content-type": "text/plain"}, 415, "'text/plain'"),
        (b'{"numbers": {"a": "1"}}', {}, 200, ""),
        (b'{"numbers": {}}', {"content-type": "application/vnd.kafka.v2+json; q=1"}, 200, ""),
    ],
)
async def test_bodies_are_validated(
    client: httpx.AsyncClient, content: bytes, headers: dict[str, str], status: int, message: str
) -> None:
    answer = await client.post("/body", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    if message:
        assert answer.json()["error_code"] == status
        assert message in answer.json()["message"]


async def test_body_is_bounded(client: httpx.AsyncClient) -> None:
    assert (await client.post("/raw", content=b"x" * 1000)).json() == 1000
    answer = await client.post("/raw", content=b"x" * (SMALL_BODY.bytes_max + 1))
    assert (answer.status_code, answer.json()["error_code"]) == (413, 413)


# -- an unknown outcome


class SilentStore(MemoryStore):
    """Stores nothing and says nothing while it is silent."""

    is_silent = False

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        return Created.UNKNOWN if self.is_silent else await super().create(key, parts)


async def test_change_that_does_not_end_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(change_request, "DECISION_S_MAX", 0.05)
    store = SilentStore()
    log = await Broker.open(store, QUIET, clock=SystemClock(), name="broker-1")
    async with http_client(routed(build_app(log))) as client:
        store.is_silent = True
        answer = await client.post("/admin/topics", json={"topic_name": "t"})
        assert (answer.status_code, answer.json()["error_code"]) == (504, 50003)
        store.is_silent = False
    await log.close()
    assert list(log.state.topics) == ["t"]  # the commit went on without its caller
