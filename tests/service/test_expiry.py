"""Previews of what retention would delete after a change of configs."""

from typing import Any

import httpx
import pytest

from tests.service.conftest import Broker, append, assert_refused
from tidelog.service.routes import retention_preview

DAY_MS = 86_400_000
TOPIC = "/tidelog/v1/topics/t/configs:preview"
DEFAULTS = "/tidelog/v1/defaults:preview"


def change(name: str, value: object) -> dict[str, Any]:
    return {"data": [{"name": name, "value": value}]}


async def asked(broker: Broker, path: str, name: str, value: object) -> Any:
    answer = await broker.http.post(path, json=change(name, value))
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
async def aged(broker: Broker) -> Broker:
    """Three sealed records of three days ago, two of now in the tail."""
    now_ms = broker.log.clock.now_ms()
    await broker.log.topics.create("t", 1, {})
    await append(broker.log, b"a", b"b", b"c", timestamp_ms=now_ms - 3 * DAY_MS)
    await broker.log.records.seal("t")
    await append(broker.log, b"d", b"e", timestamp_ms=now_ms)
    return broker


async def test_preview_of_topic_changes_nothing(aged: Broker) -> None:
    before = aged.log.state.encode()
    preview = await asked(aged, TOPIC, "retention.ms", 2 * DAY_MS)
    assert aged.log.state.encode() == before
    assert (preview["topic_name"], preview["records"]) == ("t", 3)
    (partition,) = preview["partitions"]
    assert partition["bytes"] == preview["bytes"] > 0
    del partition["bytes"]
    assert partition == {
        "partition_id": 0,
        "log_start_offset": 0,
        "next_log_start_offset": 3,
        "records": 3,
    }
    for name, value in (("retention.ms", 4 * DAY_MS), ("segment.ms", 60_000)):
        preview = await asked(aged, TOPIC, name, value)
        assert (preview["records"], preview["partitions"]) == (0, [])


async def test_preview_of_defaults_counts_topics_that_have_them(
    aged: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    preview = await asked(aged, DEFAULTS, "log.retention.ms", 2 * DAY_MS)
    assert (preview["records"], preview["has_more"]) == (3, False)
    assert [topic["topic_name"] for topic in preview["topics"]] == ["t"]
    monkeypatch.setattr(retention_preview, "TOPICS_MAX", 0)
    preview = await asked(aged, DEFAULTS, "log.retention.ms", 2 * DAY_MS)
    assert (preview["records"], preview["has_more"]) == (0, True)
    await aged.log.topics.alter("t", {"retention.ms": str(9 * DAY_MS)})
    preview = await asked(aged, DEFAULTS, "log.retention.ms", 2 * DAY_MS)
    assert (preview["records"], preview["has_more"]) == (0, False)


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(TOPIC, "retention.ms", "soon"), (TOPIC, "none", "1"), (DEFAULTS, "retention.ms", "1")],
)
async def test_what_no_change_may_be_has_no_preview(
    broker: Broker, path: str, name: str, value: str
) -> None:
    await broker.log.topics.create("t", 1, {})
    answer: httpx.Response = await broker.http.post(path, json=change(name, value))
    assert name in assert_refused(answer, 400, 40002, "application/json")


async def test_unknown_topic_has_no_preview(broker: Broker) -> None:
    path = TOPIC.replace("/t/", "/none/")
    answer = await broker.http.post(path, json=change("retention.ms", 1))
    assert answer.status_code == 404
