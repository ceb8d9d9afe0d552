"""Health, readiness, metrics and the API's description."""

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from service.app import VERSION, Readiness, build_app
from service.telemetry import SERIES_MAX, HttpCounters
from storage.chunk import Rows
from storage.clock import SystemClock
from storage.errors import Unavailable
from storage.log import Log
from storage.objectstore import MemoryStore
from tests.service.conftest import QUIET

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


async def test_who_answers(client: httpx.AsyncClient) -> None:
    assert (await client.get("/")).json() == {"version": VERSION}
    said = (await client.get("/_health")).json()
    assert said == {"process_uptime_sec": 0, "tidelog_version": VERSION}
    assert (await client.get("/healthy")).status_code == 200


@pytest.mark.parametrize("path", ["/ready", "/status/ready"])
async def test_an_open_log_is_ready_until_it_drains(
    client: httpx.AsyncClient, app: FastAPI, path: str
) -> None:
    assert (await client.get(path)).json() == {"status": "ready"}
    app.state.readiness.drain()
    answer = await client.get(path)
    message = "this broker is shutting down"
    assert (answer.status_code, answer.json()) == (503, {"error_code": 50302, "message": message})


async def test_a_closed_log_is_not_ready(client: httpx.AsyncClient, log: Log) -> None:
    await log.close()
    assert (await client.get("/ready")).status_code == 503


class DarkStore(MemoryStore):
    """Answers no read while it is dark."""

    is_dark = False

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        if self.is_dark:
            raise Unavailable("the store is dark")
        return await super().get_range(key, start, length)


class MovedClock(SystemClock):
    """Boot time that a test moves."""

    skipped_s = 0.0

    def boot_s(self) -> float:
        return super().boot_s() + self.skipped_s


async def test_one_failed_read_is_forgiven_and_many_are_not() -> None:
    store, clock = DarkStore(), MovedClock()
    log = Log(store, clock, "broker-1", QUIET, None)
    await log.open()
    readiness = Readiness(log)
    store.is_dark = True
    with pytest.raises(Unavailable, match="the store is dark"):
        await readiness.check()  # it was never seen to work
    store.is_dark = False
    await readiness.check()
    store.is_dark = True
    await readiness.check()
    clock.skipped_s = 11.0
    with pytest.raises(Unavailable, match="the store is dark"):
        await readiness.check()
    await log.close()


# -- metrics


async def test_metrics_follow_the_log(client: httpx.AsyncClient, log: Log) -> None:
    await log.create_topic("t", 2, {})
    rows = Rows([1, 2, 3], [None] * 3, [b"v"] * 3)
    await log.append(log.state.topic("t"), [(1, rows)], size=300, is_json=False)
    samples = await scrape(client)
    assert samples["tidelog_flushes_total", ()] == 2
    assert samples["tidelog_wal_puts_total", ()] == 2
    assert samples["tidelog_requests_per_flush", ()] == 1
    assert samples["tidelog_appended_records_total", ()] == 3
    assert samples["tidelog_high_watermark", (("partition", "0"), ("topic", "t"))] == 0
    assert samples["tidelog_high_watermark", (("partition", "1"), ("topic", "t"))] == 3
    assert samples["tidelog_unsealed_bytes", (("topic", "t"),)] > 0
    assert samples["tidelog_cache_bytes", (("cache", "tail"),)] == log.tail.bytes > 0
    assert samples["tidelog_partitions", ()] == 2
    assert samples["tidelog_series_omitted", ()] == 0
    assert samples["process_resident_memory_bytes", ()] > 0


async def test_metrics_have_a_bounded_number_of_series(client: httpx.AsyncClient, log: Log) -> None:
    await log.create_topic("t", SERIES_MAX - 1, {})
    await log.create_topic("u", 3, {})
    samples = await scrape(client)
    assert sum(name == "tidelog_high_watermark" for name, _ in samples) == SERIES_MAX
    assert samples["tidelog_series_omitted", ()] == 2


async def test_requests_are_counted(client: httpx.AsyncClient, log: Log) -> None:
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


async def test_hot_counters_reach_the_metrics(log: Log) -> None:
    http = HttpCounters()
    http.observe("produce", 200, 0.0005)
    http.observe("produce", 200, 0.001)
    http.observe("produce", 503, 99.0)
    http.add_records_in(10, 1000)
    http.add_records_out(5, 500)
    transport = httpx.ASGITransport(app=build_app(log, http=http))
    async with httpx.AsyncClient(transport=transport, base_url="http://tide") as client:
        samples = await scrape(client)
    name = "tidelog_http_request_seconds"
    assert samples[f"{name}_bucket", (("le", "0.001"), ("route", "produce"))] == 2
    assert samples[f"{name}_bucket", (("le", "10.0"), ("route", "produce"))] == 2
    assert samples[f"{name}_count", (("route", "produce"),)] == 3
    assert samples[f"{name}_sum", (("route", "produce"),)] == pytest.approx(99.0015)
    assert samples["tidelog_http_requests_total", (("route", "produce"), ("status", "5xx"))] == 1
    assert samples["tidelog_http_records_total", (("direction", "in"),)] == 10
    assert samples["tidelog_http_bytes_total", (("direction", "out"),)] == 500


# -- the API's description


async def test_the_description_is_complete(client: httpx.AsyncClient) -> None:
    said = (await client.get("/openapi.json")).json()
    assert (said["info"]["title"], said["info"]["version"]) == ("tidelog", VERSION)
    tags = {tag["name"] for tag in said["tags"]}
    operations = [each for path in said["paths"].values() for each in path.values()]
    for operation in operations:
        assert operation["tags"], operation["operationId"]
        assert set(operation["tags"]) <= tags
        assert operation.get("description"), operation["operationId"]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    assert not any(path.startswith("/kafka") for path in said["paths"])
    assert (await client.get("/docs")).status_code == 200
