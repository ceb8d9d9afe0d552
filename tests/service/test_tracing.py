"""Traces: a produce and the flush that it rode in, the PUT; a fetch and where its records lay."""

from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from tests.service.conftest import QUIET, post
from tidelog.service.server.app import build_app
from tidelog.service.server.tracing import TIERS, Traces
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.storage.broker import Broker
from tidelog.storage.core import object_keys
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.store.memory import MemoryStore
from tidelog.storage.store.metered import MeteredStore

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}


class Traced(NamedTuple):
    log: Broker
    http: httpx.AsyncClient
    traces: Traces
    exporter: InMemorySpanExporter

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, and forgotten here: the last of each."""
        self.traces._provider.force_flush()
        spans = {span.name: span for span in self.exporter.get_finished_spans()}
        self.exporter.clear()
        return spans


@pytest.fixture
async def traced() -> AsyncIterator[Traced]:
    exporter, clock = InMemorySpanExporter(), SystemClock()
    traces = Traces("b", "1", exporter)
    store = MeteredStore(MemoryStore(), clock, traces)
    log = await Broker.open(store, QUIET, clock=clock, name="b", observer=traces)
    await log.topics.create("t", 1, {})
    counters, settings = HttpCounters(), Settings(store="memory://")
    app = traces.router()(build_app(log, http=counters), log, settings, counters)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tide") as http:
        made = Traced(log, http, traces, exporter)
        made.spans()
        yield made
    await log.close()
    traces.close()


def parent_of(span: ReadableSpan) -> int:
    assert span.parent is not None, span.name
    return span.parent.span_id


async def test_produce_its_flush_and_put(traced: Traced) -> None:
    traced.http.headers.update(PARENT)
    await post(traced.http, [{"value": 1}, {"value": 2}])
    spans = traced.spans()
    assert set(spans) == {"produce", "flush", "commit", "create wal"}
    produce, flush, commit, put = (
        spans[name] for name in ("produce", "flush", "commit", "create wal")
    )
    assert f"{produce.context.trace_id:032x}" == TRACE_ID
    assert produce.attributes["http.response.status_code"] == 200
    assert [link.context.span_id for link in flush.links] == [produce.context.span_id]
    assert flush.attributes["tidelog.requests"] == 1
    assert flush.parent is None
    assert parent_of(commit) == flush.context.span_id
    assert parent_of(put) == commit.context.span_id
    assert put.attributes["tidelog.object"] == object_keys.wal(traced.log.state.seq)
    assert put.attributes["tidelog.outcome"] == "done"
    assert put.attributes["tidelog.bytes"] > 0


async def test_each_put_is_of_its_own_flush(traced: Traced) -> None:
    """The task that sends them may be older than the flush."""
    for _ in range(3):
        await post(traced.http, [{"value": 1}])
        spans = traced.spans()
        assert parent_of(spans["create wal"]) == spans["commit"].context.span_id
        assert parent_of(spans["commit"]) == spans["flush"].context.span_id


async def test_fetch_says_where_its_records_lay(traced: Traced) -> None:
    await post(traced.http, [{"value": 1}])
    path = "/topics/t/partitions/0/records"
    traced.spans()
    await traced.http.get(path)
    spans = traced.spans()
    assert spans["fetch"].attributes["tidelog.tiers"] == ("memory",)
    traced.log._log.tail.clear()
    await traced.http.get(path)
    spans = traced.spans()
    assert spans["fetch"].attributes["tidelog.tiers"] == ("wal",)
    assert parent_of(spans["get wal"]) == spans["fetch"].context.span_id
    await traced.log.records.seal("t")
    traced.log._log.tail.clear()
    traced.spans()
    await traced.http.get(path)
    spans = traced.spans()
    assert spans["fetch"].attributes["tidelog.tiers"] == ("table",)
    assert spans["get table"].context.trace_id == spans["fetch"].context.trace_id


async def test_background_work_has_no_trace(traced: Traced) -> None:
    await traced.log._log.wal.refresh()
    await traced.log._log.wal.checkpoint()
    assert traced.spans() == {}


async def test_error_of_ours_is_one_and_refusal_is_not(traced: Traced) -> None:
    await traced.http.get("/topics/none/partitions/0/records")
    refused = traced.spans()["fetch"]
    assert refused.attributes["http.response.status_code"] == 404
    assert refused.status.status_code is StatusCode.UNSET


def test_every_prefix_with_records_is_tier() -> None:
    assert set(TIERS) == {object_keys.WAL, object_keys.DATA, object_keys.TOPICS}
