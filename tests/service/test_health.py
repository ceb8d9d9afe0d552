"""Health, readiness, metrics and the API's description."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.service.conftest import QUIET, Broker, append, http_client, routed
from tidelog.service.routes.broker_info import VERSION
from tidelog.service.server.app import TAGS, build_app
from tidelog.service.telemetry.http_counters import METRIC_TOPICS_MAX, HttpCounters
from tidelog.service.telemetry.log_metrics import SERIES_MAX
from tidelog.service.telemetry.metrics import Telemetry, Worker, gathered
from tidelog.storage.broker import READY_GRACE_S
from tidelog.storage.broker import Broker as LogBroker
from tidelog.storage.codec.record_columns import Rows
from tidelog.storage.core.errors import ObjectNotFound, Unavailable
from tidelog.storage.core.model import Part
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


async def test_root_and_health_routes_answer(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).json() == {"version": VERSION}
    said = (await client.get("/_health")).json()
    uptime_s = said.pop("process_uptime_sec")
    assert isinstance(uptime_s, int)
    assert uptime_s >= 0
    assert said == {"tidelog_version": VERSION}
    assert (await client.get("/healthy")).status_code == 200


@pytest.mark.parametrize("path", ["/ready", "/status/ready"])
async def test_open_log_is_ready_until_it_drains(
    client: httpx.AsyncClient, log: LogBroker, path: str
) -> None:
    assert (await client.get(path)).json() == {"status": "ready"}
    log.drain()
    answer = await client.get(path)
    message = "this broker is shutting down"
    assert (answer.status_code, answer.json()) == (503, {"error_code": 50302, "message": message})


async def test_closed_log_is_not_ready(client: httpx.AsyncClient, log: LogBroker) -> None:
    await log.close()
    assert (await client.get("/ready")).status_code == 503


class DarkStore(MemoryStore):
    """Answers nothing while it is dark."""

    is_dark = False

    def _check(self) -> None:
        if self.is_dark:
            raise Unavailable("the store is dark")

    async def get(self, key: str) -> bytes:
        self._check()
        return await super().get(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        self._check()
        return await super().get_range(key, start, length)

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        self._check()
        await super().put(key, parts)


class MovedClock(SystemClock):
    """Both times, which a test moves."""

    skipped_s = 0.0

    def boot_s(self) -> float:
        return super().boot_s() + self.skipped_s

    def now_ms(self) -> int:
        return super().now_ms() + int(self.skipped_s * 1000)


async def test_readiness_survives_one_failed_read_and_not_many() -> None:
    store, clock = DarkStore(), MovedClock()
    log = await LogBroker.open(store, QUIET, clock=clock, name="broker-1")
    store.is_dark = True
    await log.check_ready()
    clock.skipped_s = READY_GRACE_S + 1.0
    with pytest.raises(Unavailable, match="the store is dark"):
        await log.check_ready()
    await log.close()


# -- metrics


async def test_metrics_follow_log(client: httpx.AsyncClient, log: LogBroker) -> None:
    await log.topics.create("t", 2, {})
    rows = Rows([1, 2, 3], [None] * 3, [b"v"] * 3)
    await log.records.append(log.state.topic("t"), [(1, rows)], size=300, is_json=False)
    samples = await scrape(client)
    assert samples["tidelog_flushes_total", ()] == 2
    assert samples["tidelog_wal_puts_total", ()] == 2
    assert samples["tidelog_requests_per_flush", ()] == 1
    assert samples["tidelog_appended_records_total", ()] == 3
    assert samples["tidelog_high_watermark", (("partition", "0"), ("topic", "t"))] == 0
    assert samples["tidelog_high_watermark", (("partition", "1"), ("topic", "t"))] == 3
    assert samples["tidelog_unsealed_bytes", (("topic", "t"),)] > 0
    assert samples["tidelog_cache_bytes", (("cache", "tail"),)] == log._log.tail.bytes > 0
    assert samples["tidelog_partitions", ()] == 2
    assert samples["tidelog_series_omitted", ()] == 0
    assert samples["process_resident_memory_bytes", ()] > 0


async def test_metrics_have_bounded_number_of_series(
    client: httpx.AsyncClient, log: LogBroker
) -> None:
    await log.topics.create("t", SERIES_MAX - 1, {})
    await log.topics.create("u", 3, {})
    samples = await scrape(client)
    assert sum(name == "tidelog_high_watermark" for name, _ in samples) == SERIES_MAX
    assert samples["tidelog_series_omitted", ()] == 2


async def test_requests_are_counted(client: httpx.AsyncClient, log: LogBroker) -> None:
    for path in ("/topics", "/topics/none", "/nope", "/healthy"):
        await client.get(path)
    samples = await scrape(client)
    counts = {
        labels: value
        for (name, labels), value in samples.items()
        if name == "tidelog_http_requests_total"
    }
    assert counts == {
        (("route", "topics"), ("status", "2xx")): 1,
        (("route", "topics"), ("status", "4xx")): 1,
        (("route", "other"), ("status", "4xx")): 1,
        (("route", "health"), ("status", "2xx")): 1,
    }


async def test_hot_counters_reach_metrics(log: LogBroker) -> None:
    http = HttpCounters()
    http.observe("produce", 200, 0.0005)
    http.observe("produce", 200, 0.001)
    http.observe("produce", 503, 99.0)
    http.add_records_in(10, 1000)
    http.add_records_out(5, 500)
    async with http_client(routed(build_app(log, http=http))) as client:
        samples = await scrape(client)
    name = "tidelog_http_request_seconds"
    assert samples[f"{name}_bucket", (("le", "0.001"), ("route", "produce"))] == 2
    assert samples[f"{name}_bucket", (("le", "10.0"), ("route", "produce"))] == 2
    assert samples[f"{name}_count", (("route", "produce"),)] == 3
    assert samples[f"{name}_sum", (("route", "produce"),)] == pytest.approx(99.0015)
    assert samples["tidelog_http_requests_total", (("route", "produce"), ("status", "5xx"))] == 1
    assert samples["tidelog_http_records_total", (("direction", "in"),)] == 10
    assert samples["tidelog_http_bytes_total", (("direction", "out"),)] == 500


async def test_every_metric_is_described_and_every_description_is_one() -> None:
    text = (Path(__file__).parents[2] / "service" / "docs" / "METRICS.md").read_text()
    described = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))
    async with metered() as log:
        telemetry = Telemetry(log, HttpCounters(), VERSION, worker=Worker(1, 2, no_reports))
        families = list(text_string_to_metric_families((await telemetry.text_of_all()).decode()))
    kinds = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in families
        if family.name.startswith("tidelog_")
    }
    assert described == kinds | {"tidelog_info": "info"}


async def no_reports() -> list[bytes]:
    return []


@asynccontextmanager
async def metered() -> AsyncIterator[LogBroker]:
    """A log on a store that counts."""
    clock = SystemClock()
    log = await LogBroker.open(
        MeteredStore(MemoryStore(), clock), QUIET, clock=clock, name="broker-1"
    )
    try:
        yield log
    finally:
        await log.close()


async def test_what_flush_was_and_what_store_was_asked() -> None:
    async with metered() as log:
        await log.topics.create("t", 1, {})
        creations = log._log.store.counters.by_verb()["create"]
        await append(log, b"v", b"w")
        async with http_client(routed(build_app(log))) as client:
            samples = await scrape(client)
    assert samples["tidelog_batch_records_bucket", (("le", "10.0"),)] == 2
    assert samples["tidelog_batch_records_sum", ()] == 2
    assert samples["tidelog_batch_requests_sum", ()] == 2
    assert samples["tidelog_queue_wait_seconds_count", ()] == 2
    assert samples["tidelog_commit_latency_seconds_count", ()] == 2
    verb = ("verb", "create")
    entry = (("client", "tidelog"), ("duty", "commit"), ("kind", "wal"), verb)
    requests = {
        labels: value
        for (name, labels), value in samples.items()
        if name == "tidelog_store_requests_total" and verb in labels
    }
    assert sum(requests.values()) == creations + 1
    assert requests[entry] >= 2, "the topic's entry, and that of the records"
    assert samples["tidelog_store_request_seconds_count", (verb,)] == creations + 1
    assert samples["tidelog_store_bytes_total", (("direction", "in"),)] > 0
    assert 0 <= samples["tidelog_wal_view_age_seconds", ()] < 10
    assert 0 <= samples["tidelog_unsealed_age_seconds", (("topic", "t"),)] < 10


async def test_probes_of_young_view_ask_store_nothing() -> None:
    async with metered() as log:
        await log.refresh()
        before = log._log.store.counters.by_verb()
        for _ in range(100):
            await log.check_ready()
        assert log._log.store.counters.by_verb() == before


async def test_store_is_counted_by_verb_and_failures_are_not_misses() -> None:
    store = MeteredStore(DarkStore(), SystemClock())
    await store.put("brokers/a", [b"12", b"3"])
    assert await store.get("brokers/a") == b"123"
    with pytest.raises(ObjectNotFound):
        await store.get("brokers/b")
    store.inner.is_dark = True
    with pytest.raises(Unavailable):
        await store.get_range("brokers/a", 0, 1)
    assert [info.key async for info in store.list("brokers/")] == ["brokers/a"]
    await store.delete(["brokers/a"])
    counters = store.counters
    assert counters.by_verb() == {"create": 0, "put": 1, "get": 3, "list": 1, "delete": 1}
    assert {request.kind for request in counters.requests} == {"brokers"}
    assert counters.failures == {"create": 0, "put": 0, "get": 1, "list": 0, "delete": 0}
    assert (counters.bytes_written, counters.bytes_read) == (3, 3)
    assert sum(counters.seconds["get"].counts) == 3


async def test_labels_have_bounded_values(client: httpx.AsyncClient, log: LogBroker) -> None:
    """Whatever clients send: paths, methods and names of things that are not there."""
    await log.topics.create("t", 1, {})
    odd = ("/topics/%s", "/v3/clusters/%s/topics", "/nope/%s", "/topics/t/partitions/%s/offsets")
    for number in range(30):
        for path in odd:
            await client.get(path % f"x{number}")
        await client.request(f"M{number}", "/topics")
    samples = await scrape(client)
    values = {
        label: {dict(labels)[label] for _, labels in samples if label in dict(labels)}
        for label in ("route", "status", "kind")
    }
    tags = {*TAGS, "other"}
    assert values["route"] <= tags
    assert values["status"] <= {"2xx", "4xx"}
    assert values["kind"] <= {
        *("UnknownTopic", "TopicNotHosted", "NoSuchResource", "HTTPException", "UnknownPartition"),
        "InvalidParameter",
    }


def test_topics_beyond_bound_share_one_series() -> None:
    http = HttpCounters()
    for number in range(METRIC_TOPICS_MAX + 10):
        http.add_records_in(1, 10, f"t{number}")
        http.add_records_out(2, 20, f"t{number}")
    assert len(http.topics) == METRIC_TOPICS_MAX + 1
    other = http.topics["(other)"]
    assert (other.records_in, other.records_out) == (10, 20)
    assert http.total("records_in") == METRIC_TOPICS_MAX + 10


async def test_topics_that_are_gone_are_forgotten(log: LogBroker) -> None:
    http = HttpCounters()
    for topic in ("t", "gone"):
        http.add_records_in(1, 10, topic)
    await log.topics.create("t", 1, {})
    text = (await Telemetry(log, http, VERSION).text()).decode()
    assert 'tidelog_topic_records_total{direction="in",topic="t"} 1.0' in text
    assert "gone" not in text
    assert list(http.topics) == ["t"]


async def test_one_answer_has_metrics_of_each_worker(log: LogBroker) -> None:
    hostile = b'# HELP tidelog_x x\n# TYPE tidelog_x gauge\ntidelog_x{group="# HELP y"} 1.0\n'
    second = await Telemetry(log, HttpCounters(), VERSION, worker=Worker(2, 3, no_reports)).text()

    async def others() -> list[bytes]:
        return [second, hostile]

    first = Telemetry(log, HttpCounters(), VERSION, worker=Worker(1, 3, others))
    text = (await first.text_of_all()).decode()
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(set(names)) == len(names), "a family is declared once"
    samples = {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["tidelog_workers", None] == samples["tidelog_workers_answered", None] == 3
    assert samples["tidelog_wal_seq", "1"] == samples["tidelog_wal_seq", "2"] == log.state.seq
    assert samples["tidelog_x", None] == 1


async def test_worker_that_hangs_does_not_cost_scrape(monkeypatch: Any) -> None:
    monkeypatch.setattr("tidelog.service.telemetry.metrics.WORKER_WAIT_S", 0.01)

    async def answers() -> bytes:
        return b"text"

    async def is_gone() -> bytes:
        raise Unavailable("gone")

    async def hangs() -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    assert await gathered([answers(), is_gone(), hangs()]) == [b"text"]


async def test_waiting_for_records_is_no_latency(broker: Broker, topic: str) -> None:
    started = time.perf_counter()
    await broker.http.get(f"/topics/{topic}/partitions/0/records?timeout=150")
    took_s = time.perf_counter() - started
    # 1 ms for timers that end early by the resolution of a clock.
    assert broker.app.counters.latencies["fetch"].total <= took_s - 0.149


# -- the API's description


async def test_description_is_complete(client: httpx.AsyncClient) -> None:
    said = (await client.get("/openapi.json")).json()
    assert (said["info"]["title"], said["info"]["version"]) == ("tidelog", VERSION)
    tags = {tag["name"] for tag in said["tags"]}
    operations = [operation for path in said["paths"].values() for operation in path.values()]
    for operation in operations:
        assert operation["tags"], operation["operationId"]
        assert set(operation["tags"]) <= tags
        assert operation.get("description"), operation["operationId"]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert not any(path.startswith("/kafka") for path in said["paths"])
    for path in ("/openapi", "/openapi/v3"):  # as Strimzi has it
        assert (await client.get(path)).json()["openapi"].startswith("3.")
    answer = await client.get("/docs")
    assert (answer.status_code, answer.headers["location"]) == (307, "ui/#/api")
