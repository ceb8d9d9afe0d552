"""The console's files and what it shows beyond the dialects' routes."""

import re

import httpx
import pytest

from tests.service.conftest import Broker, append, post
from tidelog.service.console import topic_layout
from tidelog.service.console.files import CONTENT_SECURITY_POLICY, FILES, load
from tidelog.service.console.topic_layout import FRESH_PARTITIONS_MAX, SEGMENTS_MAX
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.core.errors import Corrupt
from tidelog.storage.tables.manifest import SegmentIndex, Table

# -- its files


async def test_every_file_comes_with_policy(client: httpx.AsyncClient) -> None:
    for name in load():
        answer = await client.get(f"/ui/{name}")
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-encoding"] == "gzip"
        assert answer.content == (FILES / name).read_bytes()
        again = await client.get(f"/ui/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = await client.get(f"/ui/{name}", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.content == answer.content


def test_nothing_is_loaded_from_elsewhere_or_inline() -> None:
    html = (FILES / "index.html").read_text()
    assert not re.search(r"<style|<script>|\son\w+=|style=", html)
    names = set(load())
    for path in [*FILES.glob("*.html"), *FILES.glob("*.js"), *FILES.glob("*.css")]:
        text = path.read_text()
        assert not re.search(r"(src|href)=\"(https?:)?//|url\([\"'h/]|@import|import\(", text), (
            path.name
        )
        for imported in re.findall(r'from "\./([^"]+)"', text):
            assert imported in names, f"{path.name} imports {imported}"


async def test_console_is_folder(client: httpx.AsyncClient) -> None:
    answer = await client.get("/ui")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/")
    assert (await client.get("/ui/")).text.startswith("<!doctype html>")
    browser = await client.get("/", headers={"accept": "text/html,application/xhtml+xml,*/*"})
    assert (browser.status_code, browser.headers["location"]) == (307, "ui/")
    missing = await client.get("/ui/../service/settings/settings.py")
    assert missing.status_code == 404
    for path in ("/ui/nothing.js", "/ui/%2e%2e/console.py", "/ui/vendor"):
        assert (await client.get(path)).status_code == 404


# -- what it shows


async def test_overview_of_one_broker(broker: Broker, topic: str) -> None:
    await post(broker.http, [{"value": 1}, {"value": 2}])
    answer = await broker.http.get("/tidelog/v1/overview", params={"history": "true"})
    said = answer.json()
    assert said["cluster_id"] == broker.log.identity.cluster_id
    assert (said["topics"], said["partitions"], said["groups"]) == (1, 3, 0)
    assert said["wal_seq"] == broker.log.state.seq
    (only,) = said["brokers"]
    assert (only["is_me"], only["is_sequencer"], only["name"]) == (True, True, "broker-1")
    assert only["rates"]["records_in"] == said["rates"]["records_in"] > 0
    assert said["rates"]["ack_p50_ms"] > 0
    assert said["unsealed_bytes"] > 0
    assert said["history"]["at_ms"] == []
    assert set(said["history"]["series"]) == set(said["rates"])
    assert "history" in said
    assert (await broker.http.get("/tidelog/v1/overview")).json()["history"] is None


async def test_topics_and_their_picture(broker: Broker, topic: str) -> None:
    log, http = broker.log, broker.http
    await append(log, b"a", b"b", partition=1)
    await log.records.seal("t")
    await append(log, b"c", partition=1)
    (summary,) = (await http.get("/tidelog/v1/topics")).json()["data"]
    assert summary["topic_name"] == "t"
    assert (summary["records"], summary["unsealed_records"]) == (3, 1)
    assert (summary["cleanup_policy"], summary["configs"]) == ("delete", {})
    said = (await http.get("/tidelog/v1/topics/t")).json()
    assert (said["partitions_count"], said["first_partition"]) == (3, 0)
    path = f"/v3/clusters/{log.state.cluster_id}/topics/t"
    assert (await http.get(path)).json()["table_uri"] == said["table_uri"]
    assert said["table_uri"] is None  # a store in memory
    empty, full, _ = said["partitions"]
    assert (empty["high_watermark"], empty["segments"], empty["unsealed_since_ms"]) == (0, [], None)
    assert (full["log_start_offset"], full["sealed_end_offset"]) == (0, 2)
    assert (full["hot_start_offset"], full["high_watermark"]) == (0, 3)
    (segment,) = full["segments"]
    assert (segment["base_offset"], segment["end_offset"], segment["records"]) == (0, 2, 2)
    assert segment["bytes"] == full["table_bytes"] > 0
    assert full["compaction"] == {
        "clean_end_offset": 0,
        "dirty_ratio": 1.0,
        "is_due": False,
        "merges": 0,
    }
    some = (await http.get("/tidelog/v1/topics/t?first=1&count=1")).json()
    assert [partition["partition_id"] for partition in some["partitions"]] == [1]
    assert (await http.get("/tidelog/v1/topics/t?first=9")).json()["partitions"] == []
    assert (await http.get("/tidelog/v1/topics/nope")).status_code == 404
    assert (await http.get("/tidelog/v1/topics/t?count=101")).status_code == 422


async def test_partition_whose_segments_cannot_be_read_does_not_hide_others(
    broker: Broker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        await append(broker.log, b"a", partition=number)
    await broker.log.records.seal("t")
    await append(broker.log, b"b", partition=1)
    table = await broker.log._log.tables.of(broker.log.state.topic("t"))
    real = type(table).segments

    async def segments(self: Table, partition: int) -> SegmentIndex:
        if partition == 1:
            raise Corrupt("topics/t/_delta_log", "is not a manifest")
        return await real(self, partition)

    monkeypatch.setattr(type(table), "segments", segments)
    said = (await broker.http.get("/tidelog/v1/topics/t")).json()["partitions"]
    assert [len(partition["segments"]) for partition in said] == [1, 0, 1]
    assert [partition["error"] is None for partition in said] == [True, False, True]
    assert "topics/t/_delta_log" in said[1]["error"]
    assert (said[1]["sealed_end_offset"], said[1]["high_watermark"]) == (1, 2)


async def test_sums_of_topic_are_those_of_all_partitions(broker: Broker) -> None:
    await broker.log.topics.create("t", 5, {})
    for number in range(5):
        await append(broker.log, b"a", partition=number)
    await broker.log.records.seal("t")
    await append(broker.log, b"b", partition=4)
    said = (await broker.http.get("/tidelog/v1/topics/t", params={"count": 2})).json()
    assert len(said["partitions"]) == 2
    totals = said["totals"]
    assert (totals["records"], totals["files"], totals["due"]) == (6, 5, 0)
    everything = (await broker.http.get("/tidelog/v1/topics/t")).json()["partitions"]
    assert totals["table_bytes"] == sum(partition["table_bytes"] for partition in everything) > 0
    assert totals["tail_bytes"] == everything[4]["tail_bytes"] > 0
    assert totals["unsealed_since_ms"] == everything[4]["unsealed_since_ms"]


async def test_sums_of_very_many_partitions_are_kept_for_while(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await broker.log.topics.create("t", FRESH_PARTITIONS_MAX + 1, {})

    async def records() -> int:
        said = await broker.http.get("/tidelog/v1/topics/t", params={"count": 1})
        return int(said.json()["totals"]["records"])

    assert await records() == 0
    await append(broker.log, b"a", partition=FRESH_PARTITIONS_MAX)
    assert await records() == 0
    monkeypatch.setattr(topic_layout, "TOTALS_AGE_MS", 0)
    assert await records() == 1


async def test_compaction_that_is_due_shows(broker: Broker) -> None:
    await broker.log.topics.create("t", 1, {"cleanup.policy": "compact"})
    for _ in range(5):
        await append(broker.log, b"a")
        await broker.log.records.seal("t")
    said = (await broker.http.get("/tidelog/v1/topics/t")).json()
    (only,) = said["partitions"]
    assert only["files"] == 5
    assert only["compaction"]["is_due"]
    assert only["compaction"]["merges"] == 1


async def test_dirty_ratio_that_equals_config_is_not_due(broker: Broker) -> None:
    """The same as `tidelog compact` does."""
    configs = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "1"}
    await broker.log.topics.create("t", 1, configs)
    await append(broker.log, b"a")
    await broker.log.records.seal("t")
    (only,) = (await broker.http.get("/tidelog/v1/topics/t")).json()["partitions"]
    assert (only["compaction"]["dirty_ratio"], only["compaction"]["is_due"]) == (1.0, False)


async def test_very_many_segments_are_shown_as_fewer(broker: Broker) -> None:
    await broker.log.topics.create("t", 1, {})
    count = SEGMENTS_MAX + 7
    for _ in range(count):
        await append(broker.log, b"a")
        await broker.log.records.seal("t")
    (only,) = (await broker.http.get("/tidelog/v1/topics/t")).json()["partitions"]
    shown = only["segments"]
    assert len(shown) == SEGMENTS_MAX
    assert sum(segment["files"] for segment in shown) == only["files"] == count
    assert [segment["end_offset"] for segment in shown[:-1]] == [
        segment["base_offset"] for segment in shown[1:]
    ]


async def test_configs_are_explained(client: httpx.AsyncClient) -> None:
    said = {
        config["name"]: config for config in (await client.get("/tidelog/v1/topic-configs")).json()
    }
    assert said["retention.ms"]["default"] == "604800000"
    assert said["retention.ms"]["doc"]


async def test_groups_and_their_lag(broker: Broker, topic: str, v3: str) -> None:
    await append(broker.log, b"a", b"b", b"c")
    offsets = [{"topic_name": "t", "partition_id": 0, "offset": 1}]
    body = {"topics": [], "consumer_groups": [{"consumer_group_id": "g", "offsets": offsets}]}
    assert (await broker.http.post(f"{v3}/transactions", json=body)).status_code == 200
    (group,) = (await broker.http.get("/tidelog/v1/groups")).json()["data"]
    assert (group["consumer_group_id"], group["state"], group["members"]) == ("g", "EMPTY", 0)
    assert (group["total_lag"], group["max_lag"], group["topics"]) == (2, 2, ["t"])
    past = (await broker.http.get("/tidelog/v1/groups/g/lag-history")).json()
    assert (past["at_ms"], past["topics"]) == ([], {})


async def test_end_of_wal(client: httpx.AsyncClient, log: LogBroker) -> None:
    await log.topics.create("t", 1, {})
    for value in (b"a", b"b"):
        await append(log, value)
    await log._log.wal.checkpoint()
    said = (await client.get("/tidelog/v1/metadata")).json()
    assert [entry["seq"] for entry in said["entries"]] == [3, 2, 1]
    newest, _, first = said["entries"]
    assert (newest["records"], newest["chunks"], newest["actions"]) == (1, 1, {"append": 1})
    assert first["actions"] == {"create-topic": 1}
    assert newest["writer"].startswith("broker-1-")  # and the id of the process
    assert newest["bytes"] > 0
    assert [checkpoint["seq"] for checkpoint in said["checkpoints"]] == [3]
    assert said["counts"]["topics"] == 1
    assert said["counts"]["tail_runs"] == 2
    assert said["wal_seq"] == 3


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
@pytest.mark.parametrize("path", ["overview", "topics", "topics/t", "groups", "metadata"])
async def test_it_only_looks(client: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await client.request(method, f"/tidelog/v1/{path}")).status_code == 405
