"""The audit log: who was refused, logged in or changed what, from where; and floods of it."""

import asyncio
import json
import logging
import stat
from pathlib import Path
from typing import Any

import pytest

from tests.service.conftest import Broker, broker_on, until
from tests.service.keyed import (
    ADMIN,
    ADMIN_KEY,
    CONSOLE,
    JSON_TYPE,
    RECORDS,
    SETTINGS,
    key_of,
    secured,
)
from tidelog.service.http.request import HttpRequest, HttpResponse
from tidelog.service.security import audit
from tidelog.service.server.log_lines import LINES_MAX, WINDOW_S, Bounded, JsonFormatter
from tidelog.storage.core.errors import LogError
from tidelog.storage.store.memory import MemoryStore


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_refusals_logins_and_changes_are_written(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with broker_on(MemoryStore(), **SETTINGS, audit_log=str(file)) as broker:
        http = broker.http
        alice = await key_of(broker.log, "User:alice")
        far = {"x-forwarded-for": "203.0.113.7"}
        await http.post("/topics/t", content=b"{}", headers=alice | JSON_TYPE | far)
        await http.get("/topics?a=b", headers={"authorization": "Bearer wrong-secret"})
        await http.post("/tidelog/v1/login", json={"key": "wrong-secret"})
        answer = await http.post("/tidelog/v1/login", json={"key": ADMIN_KEY})
        cookie = {"cookie": answer.headers["set-cookie"].partition(";")[0]} | CONSOLE
        http.cookies.clear()
        await http.post("/admin/topics", json={"topic_name": "t"}, headers=cookie)
        await http.post("/admin/topics", json={"topic_name": "t"}, headers=cookie)  # exists: 400
        await http.get("/topics", headers=cookie)
        made = await http.post("/tidelog/v1/keys", json={"principal": "User:bob"}, headers=ADMIN)
        await http.post("/tidelog/v1/logout", headers=cookie)
        await http.post("/topics/t", headers={**ADMIN, "sec-fetch-site": "cross-site"})
    audit_events = events(file)
    assert [
        (event["event"], event.get("principal"), event["status"], event["request"])
        for event in audit_events
    ] == [
        ("denied", "User:alice", 403, "POST /topics/t"),
        ("unauthenticated", None, 401, "GET /topics?a=b"),
        ("unauthenticated", None, 401, "POST /tidelog/v1/login"),
        ("login", "User:admin", 200, "POST /tidelog/v1/login"),
        ("change", "User:admin", 201, "POST /admin/topics"),
        ("change", "User:admin", 201, "POST /tidelog/v1/keys"),
        ("logout", "User:admin", 204, "POST /tidelog/v1/logout"),
        ("denied", None, 403, "POST /topics/t"),
    ]
    assert audit_events[0]["client"] == "127.0.0.1"
    assert audit_events[0]["forwarded_for"] == "203.0.113.7"
    assert audit_events[0]["reason"] == "not authorized: User:alice may not WRITE topic 't'"
    assert audit_events[5]["detail"].endswith(f"created key {made.json()['key_id']} of User:bob")
    assert all(
        event["broker"] == "broker-1" and event["time"].endswith("Z") for event in audit_events
    )
    for secret in ("wrong-secret", ADMIN_KEY, made.json()["secret"]):
        assert secret not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    counters = broker.app.counters
    assert counters.audited == {
        "denied": 2, "unauthenticated": 2, "login": 1, "change": 2, "logout": 1
    }  # fmt: skip


async def test_flood_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are written all the same; the file may be renamed meanwhile."""
    monkeypatch.setattr(audit, "LINES_PER_S", 0.01)
    monkeypatch.setattr(audit, "LEFT_OUT_S", 0.05)
    file = tmp_path / "audit.jsonl"
    async with broker_on(MemoryStore(), **SETTINGS, audit_log=str(file)) as broker:
        for _ in range(50):
            await broker.http.get("/topics")
        await until(lambda: broker.app._audit._left_out == 0, 60.0)
        file.rename(tmp_path / "audit.jsonl.1")
        made = await broker.http.post("/admin/topics", json={"topic_name": "t"}, headers=ADMIN)
        assert made.status_code == 201
    before = events(tmp_path / "audit.jsonl.1")
    left_out = sum(event.get("left_out", 0) for event in before)
    written = sum(event["event"] == "unauthenticated" for event in before)
    assert written + left_out == 50
    assert left_out == broker.app.counters.audit_lost["flood"] > 40
    assert [event["event"] for event in events(file)] == ["change"]


async def test_file_that_cannot_be_written_stops_start_and_no_request(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"audit_log .* cannot be written: "):
        async with broker_on(MemoryStore(), **SETTINGS, audit_log=str(tmp_path)):
            pass
    folder = tmp_path / "folder"
    folder.mkdir()
    async with broker_on(MemoryStore(), **SETTINGS, audit_log=str(folder / "a")) as broker:
        (folder / "a").unlink()
        folder.rmdir()
        assert (await broker.http.get("/topics")).status_code == 401
        assert broker.app.counters.audit_lost == {"write": 1}


async def test_what_client_chooses_is_cut_and_stays_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By default, security writes to the broker's log; as JSON, an event is an object in it."""
    async with secured(MemoryStore()) as broker:
        await broker.http.get("/topics/a%0Ab%ED%A0%80" + "x" * 5000)
    (record,) = [record for record in caplog.records if record.name == "tidelog.audit"]
    text = record.getMessage()
    assert "\n" not in text
    assert len(text) < 2000
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "unauthenticated"
    assert line["audit"]["request"].startswith("GET /topics/a\nb")


@pytest.mark.parametrize(
    ("settings", "is_on"),
    [
        ({}, False),
        (SETTINGS, True),
        ({**SETTINGS, "audit_log": "off"}, False),
        ({"audit_log": "stderr"}, True),
    ],
)
async def test_it_is_on_where_security_is(settings: dict[str, Any], is_on: bool) -> None:
    async with broker_on(MemoryStore(), **settings) as broker:
        assert (broker.app._audit is not None) is is_on


async def test_topic_that_producer_creates_has_line(tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    settings = {**SETTINGS, "auto_create_topics": True, "audit_log": str(file)}
    async with broker_on(MemoryStore(), **settings) as broker:
        for _ in range(2):
            sent = await broker.http.post("/topics/new", content=RECORDS, headers=ADMIN | JSON_TYPE)
            assert sent.status_code == 200
    assert [(event["event"], event["request"], event["status"]) for event in events(file)] == [
        ("change", "auto.create.topics new", 201)
    ]


async def test_changes_of_unknown_outcome_are_written(
    caplog: pytest.LogCaptureFixture, broker: Broker
) -> None:
    written: list[dict[str, Any]] = []
    own = audit.Audit(broker.log, broker.app.counters, written.append)
    scope = {"method": "POST", "path": "/admin/topics", "query_string": b"", "headers": []}

    async def nothing(*_: Any) -> Any:
        await asyncio.sleep(0)

    call = HttpRequest(scope, nothing, nothing)

    async def work() -> None:
        await call.answer(HttpResponse(504, b""))

    await own.change(work(), call)
    assert [event["status"] for event in written] == [504]


# -- lines of the broker's log


def line(message: str, at_s: float, *values: object) -> logging.LogRecord:
    record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, message, values, None)
    record.created = at_s
    return record


def test_lines_of_one_kind_are_bounded_and_counted() -> None:
    bounded = Bounded()
    passed = [bounded.filter(line("bad %s", 100.0, number)) for number in range(LINES_MAX + 30)]
    assert passed == [True] * LINES_MAX + [False] * 30
    assert bounded.filter(line("another kind", 100.0))
    later = line("bad %s", 100.0 + WINDOW_S, "x")
    assert bounded.filter(later)
    assert later.getMessage() == "bad x (30 more lines of this kind were left out)"
    again = line("bad %s", 101.0 + WINDOW_S, "100% y")
    assert bounded.filter(again)
    assert again.getMessage() == "bad 100% y"


def test_clock_that_goes_back_stops_no_lines() -> None:
    bounded = Bounded()
    for _ in range(LINES_MAX + 1):
        bounded.filter(line("bad", 1000.0))
    assert bounded.filter(line("bad", 10.0))


def test_exceptions_and_audit_lines_pass() -> None:
    bounded = Bounded()
    for _ in range(LINES_MAX * 2):
        record = line("event", 1.0)
        record.audit = {}
        assert bounded.filter(record)
        failed = line("bug", 1.0)
        failed.exc_info = (ValueError, ValueError(), None)
        assert bounded.filter(failed)
