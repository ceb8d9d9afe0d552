"""The Iceberg REST catalog: answers, errors, rights, pages and plans."""

from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, append
from tests.service.keyed import ADMIN, ALICE, OPEN_TO_ALICE, SETTINGS, allow, key_of
from tidelog.service.formats import iceberg as formats
from tidelog.service.formats.iceberg import PlanPosition
from tidelog.service.routes import iceberg
from tidelog.storage.core.errors import InvalidRequest
from tidelog.storage.core.model import SegmentFile
from tidelog.storage.iceberg_tables import PlannedFiles

V1 = "/iceberg/v1"
TABLES = f"{V1}/namespaces/logs/tables"
FORM = {"content-type": "application/x-www-form-urlencoded"}

pytestmark = pytest.mark.broker(topics={"t": 1}, iceberg_refresh_ms=0)


def error_of(answer: httpx.Response) -> tuple[int, str]:
    """The status and the type; the error is as Iceberg's specification has it."""
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    assert error["message"] == answer.json()["message"] != ""
    return answer.status_code, error["type"]


async def sealed(broker: Broker, *values: bytes) -> None:
    await append(broker.log, *values)
    await broker.log.records.seal("t")


async def test_config(broker: Broker) -> None:
    config = (await broker.http.get(f"{V1}/config")).json()
    assert (config["defaults"], config["overrides"]) == ({}, {})
    table = "/v1/{prefix}/namespaces/{namespace}/tables/{table}"
    assert {f"GET {table}", f"HEAD {table}", f"POST {table}/plan"} <= set(config["endpoints"])
    planned = (await broker.http.get(f"{V1}/config", params={"warehouse": "planned"})).json()
    assert planned["overrides"] == {"prefix": "planned"}
    answer = await broker.http.get(f"{V1}/config", params={"warehouse": "planed"})
    assert error_of(answer) == (404, "NotFoundException")
    assert "'planned'" in answer.json()["message"]


async def test_namespaces(broker: Broker) -> None:
    assert (await broker.http.get(f"{V1}/namespaces")).json()["namespaces"] == [["logs"]]
    inner = await broker.http.get(f"{V1}/namespaces", params={"parent": "logs"})
    assert inner.json()["namespaces"] == []
    answer = await broker.http.get(f"{V1}/namespaces/logs")
    assert answer.json() == {"namespace": ["logs"], "properties": {}}
    assert (await broker.http.head(f"{V1}/namespaces/logs")).status_code == 200
    for path in ("namespaces/x", "namespaces/x/tables", "namespaces/x/tables/t"):
        answer = await broker.http.get(f"{V1}/{path}")
        assert error_of(answer) == (404, "NoSuchNamespaceException")
    parent = await broker.http.get(f"{V1}/namespaces", params={"parent": "x"})
    assert error_of(parent) == (404, "NoSuchNamespaceException")


async def test_tables_have_pages(broker: Broker) -> None:
    for name in ("c", "a", "b.d"):
        await broker.log.topics.create(name, 1, {})
    names = ["a", "b.d", "c", "t"]
    every = (await broker.http.get(TABLES)).json()
    assert every["identifiers"] == [{"namespace": ["logs"], "name": name} for name in names]
    pages, token = [], ""
    while token is not None:
        params = {"pageToken": token, "pageSize": 3}
        page = (await broker.http.get(TABLES, params=params)).json()
        pages.append([table["name"] for table in page["identifiers"]])
        token = page["next-page-token"]
    assert pages == [["a", "b.d", "c"], ["t"]]


async def test_load_has_etag(broker: Broker) -> None:
    await sealed(broker, b"1", b"2")
    answer = await broker.http.get(f"{TABLES}/t", params={"snapshots": "all"})
    table = answer.json()
    assert table["metadata"]["snapshots"][0]["summary"]["total-records"] == "2"
    location = table["metadata"]["location"]
    assert table["metadata-location"].startswith(f"{location}/iceberg/snap-")
    assert table["config"] == {}
    etag = {"if-none-match": answer.headers["etag"]}
    same = await broker.http.get(f"{TABLES}/t", headers=etag)
    assert (same.status_code, same.content) == (304, b"")
    await sealed(broker, b"3")
    newer = await broker.http.get(f"{TABLES}/t", headers=etag)
    assert newer.status_code == 200
    assert newer.json()["metadata-location"] != table["metadata-location"]
    planned = (await broker.http.get(f"{V1}/planned/namespaces/logs/tables/t")).json()
    assert planned["config"] == {"scan-planning-mode": "server"}


async def test_head_writes_nothing(broker: Broker) -> None:
    await sealed(broker, b"1")
    answer = await broker.http.head(f"{TABLES}/t")
    assert (answer.status_code, answer.content) == (204, b"")
    assert (await broker.http.head(f"{TABLES}/u")).status_code == 404
    store = broker.log._log.store
    assert [info.key async for info in store.list("topics/") if "/iceberg/" in info.key] == []


async def test_unknown_paths_and_changes_have_errors_of_iceberg(broker: Broker) -> None:
    assert error_of(await broker.http.get(f"{TABLES}/u")) == (404, "NoSuchTableException")
    for path in ("views", "namespaces/logs/views/v", "namespaces/logs/tables/t/x", "transactions"):
        assert error_of(await broker.http.get(f"{V1}/{path}"))[0] == 404
    for method, path in (
        ("POST", "namespaces"),
        ("DELETE", "namespaces/logs"),
        ("POST", "namespaces/logs/tables"),
        ("POST", "namespaces/logs/tables/t"),
        ("DELETE", "namespaces/logs/tables/t"),
    ):
        answer = await broker.http.request(method, f"{V1}/{path}", json={})
        assert error_of(answer) == (406, "UnsupportedOperationException"), path
        assert "read-only" in answer.json()["message"]


async def test_metrics_are_taken(broker: Broker) -> None:
    answer = await broker.http.post(f"{TABLES}/t/metrics", json={"report-type": "scan-report"})
    assert (answer.status_code, answer.content) == (204, b"")
    answer = await broker.http.post(f"{TABLES}/u/metrics", json={})
    assert error_of(answer) == (404, "NoSuchTableException")


async def plan(broker: Broker, **request: Any) -> dict[str, Any]:
    body = {name.replace("_", "-"): value for name, value in request.items()}
    answer = await broker.http.post(f"{V1}/planned/namespaces/logs/tables/t/plan", json=body)
    assert answer.status_code == 200, answer.text
    planned: dict[str, Any] = answer.json()
    return planned


async def test_plan_has_files_that_may_match(broker: Broker) -> None:
    for number in range(3):
        await sealed(broker, b"%d" % number, b"x")
    planned = await plan(broker)
    assert planned["status"] == "completed"
    assert (planned["plan-tasks"], planned["delete-files"]) == ([], [])
    (first, *_), count = planned["file-scan-tasks"], len(planned["file-scan-tasks"])
    assert count == 3
    assert first["data-file"]["partition"] == [0]
    assert first["data-file"]["record-count"] == 2
    wanted = {"type": "eq", "term": "offset", "value": 2}
    (task,) = (await plan(broker, filter=wanted))["file-scan-tasks"]
    assert "residual-filter" not in task, "the answer would have it for each file"
    assert "/00000000000000000002-" in task["data-file"]["file-path"]
    assert len((await plan(broker, snapshot_id=2))["file-scan-tasks"]) == 1
    assert (await plan(broker, filter=False))["file-scan-tasks"] == []


async def test_filter_of_plan_is_bounded(broker: Broker) -> None:
    await sealed(broker, b"0", b"x")
    body = {"filter": {"type": "eq", "term": "x", "value": "A" * 40_000}}
    answer = await broker.http.post(f"{V1}/planned/namespaces/logs/tables/t/plan", json=body)
    assert answer.status_code == 400
    assert "more than 32768 bytes" in answer.text


async def test_plan_of_many_files_has_tasks(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "FILES_MAX", 2)
    for number in range(5):
        await sealed(broker, b"%d" % number)
    snapshot = (await broker.http.get(f"{TABLES}/t")).json()["metadata"]["current-snapshot-id"]
    filter_of_four = {"type": "gt", "term": "offset", "value": 0}
    planned = await plan(broker, filter=filter_of_four)
    paths = []
    await sealed(broker, b"later: not in the plan")
    while True:
        paths += [task["data-file"]["file-path"] for task in planned["file-scan-tasks"]]
        assert len(planned["file-scan-tasks"]) <= 2
        if not planned["plan-tasks"]:
            break
        (task,) = planned["plan-tasks"]
        answer = await broker.http.post(f"{TABLES}/t/tasks", json={"plan-task": task})
        planned = answer.json()
    assert len(set(paths)) == len(paths) == 4
    assert formats.task_position(b'{"plan-task":"%s"}' % task.encode()).snapshot_id == snapshot


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("plan", b"[]", 400),
        ("plan", b"{", 400),
        ("plan", b"\xff", 400),
        ("plan", b'{"snapshot-id":"x"}', 400),
        ("plan", b'{"snapshot-id":99}', 400),
        ("plan", b'{"start-snapshot-id":1}', 406),
        ("plan", b'{"filter":' + b'{"type":"or","left":' * 150 + b"1" + b"}" * 151, 400),
        ("tasks", b"{}", 400),
        ("tasks", b'{"plan-task":"x"}', 400),
        ("tasks", b'{"plan-task":"WzEsLTEsbnVsbF0="}', 400),
        ("tasks", b'{"plan-task":"\xc3\xa9"}', 400),
        ("plan", b"[" + b"0," * 40_000 + b"0]", 413),
    ],
)
async def test_bad_plan_is_refused(broker: Broker, path: str, body: bytes, status: int) -> None:
    await sealed(broker, b"1")
    headers = {"content-type": "application/json"}
    answer = await broker.http.post(f"{TABLES}/t/{path}", content=body, headers=headers)
    assert error_of(answer)[0] == status


def test_positions_are_not_negative() -> None:
    planned = PlannedFiles(2, "s3://b/t", [SegmentFile("p", 0, 0, 1, 1, 1, 0, 0)], True)
    (task,) = formats.scan_tasks(planned, PlanPosition(None, 7, None))["plan-tasks"]
    assert formats.task_position(b'{"plan-task":"%s"}' % task.encode()).first == 8
    with pytest.raises(InvalidRequest, match="before the first"):
        formats.task_position(b'{"plan-task":"WzEsLTEsbnVsbF0="}')


# -- with keys


@OPEN_TO_ALICE
async def test_rights_to_topics_are_rights_to_tables(broker: Broker) -> None:
    await broker.log.topics.create("secret", 1, {})
    await broker.log.topics.create("shown", 1, {})
    alice = await key_of(broker.log, ALICE)
    await allow(broker.log, ALICE, "DESCRIBE", name="shown")
    tables = (await broker.http.get(TABLES, headers=alice)).json()["identifiers"]
    assert [table["name"] for table in tables] == ["shown", "t"]
    assert (await broker.http.get(f"{TABLES}/t", headers=alice)).status_code == 200
    assert (await broker.http.head(f"{TABLES}/shown", headers=alice)).status_code == 204
    for path in ("shown", "secret"):
        for mount in (TABLES, f"{V1}/planned/namespaces/logs/tables"):
            answer = await broker.http.get(f"{mount}/{path}", headers=alice)
            assert error_of(answer) == (403, "ForbiddenException")
            answer = await broker.http.post(f"{mount}/{path}/plan", headers=alice, json={})
            assert error_of(answer) == (403, "ForbiddenException")
    assert (await broker.http.head(f"{TABLES}/secret", headers=alice)).status_code == 403
    answer = await broker.http.get(f"{V1}/config")
    assert error_of(answer) == (401, "NotAuthorizedException")


@pytest.mark.broker(**SETTINGS)
async def test_key_is_token(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iceberg, "WRONG_SECRET_S", 0.0)
    secret = (await key_of(broker.log, ALICE))["authorization"].removeprefix("Bearer ")
    form = {"grant_type": "client_credentials", "client_id": "x", "client_secret": secret}
    token = (await broker.http.post(f"{V1}/oauth/tokens", data=form)).json()
    assert token["token_type"] == "bearer"
    header = {"authorization": f"Bearer {token['access_token']}"}
    assert (await broker.http.get(f"{V1}/config", headers=header)).status_code == 200
    exchange = {"subject_token": token["access_token"]}
    again = await broker.http.post(f"{V1}/oauth/tokens", data=exchange)
    assert again.json() == token
    wrong = await broker.http.post(f"{V1}/oauth/tokens", data=form | {"client_secret": "no"})
    assert (wrong.status_code, wrong.json()["error"]) == (401, "invalid_client")
    for body in (b"", b"client_secret=", b"\xff", b"client_secret=" + b"x" * 2000, b"a&" * 50):
        answer = await broker.http.post(f"{V1}/oauth/tokens", content=body, headers=FORM)
        assert error_of(answer) == (400, "BadRequestException"), body


@pytest.mark.broker(**SETTINGS)
async def test_plans_are_no_mutations(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    """They change nothing: they are not in the audit log, nor in the quota of mutations."""
    caplog.clear()
    answer = await broker.http.post(f"{TABLES}/t/plan", json={}, headers=ADMIN)
    assert answer.status_code == 200
    assert [line.message for line in caplog.records if line.name == "tidelog.audit"] == []
