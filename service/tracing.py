"""OpenTelemetry traces: a produce, the flush that it rode in, the PUT; a fetch and its tiers.

    produce            a request, under the trace that its `traceparent` names
    flush              linked to every request that rides in it
      commit           by this broker, or handed over to the sequencer
        create wal     the conditional PUT, where it is this broker's
    fetch              `tidelog.tiers` says where its records lay: memory, wal, table
      get table        what had to be read

Only loaded where `traces` is on (the extra `otel`): a broker without traces has none of these
classes in its way. Where spans go, and which, say the usual OTEL_ variables, which the SDK reads.
"""

import contextlib
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from service.hotpath import Handler, HotPath
from service.http import Call
from storage import keys
from storage.entry import Draft
from storage.hot import TRACE, Request
from storage.log import Log
from storage.objectstore import Created, ObjectInfo, ObjectStore, Part
from storage.state import Outcome
from storage.wal import Committer

CLOSE_S = 2.0
"""For the last spans: the end of a broker waits for them no longer."""
LINKS_MAX = 100
"""Requests that one flush names."""
TIERS = {keys.WAL: "wal", keys.DATA: "wal", keys.TOPICS: "table"}

_tiers: ContextVar[set[str] | None] = ContextVar("tidelog-tiers", default=None)


class Traces:
    """Of one broker: its tracer, between the start and `close`."""

    def __init__(self, broker_id: str, version: str, exporter: SpanExporter) -> None:
        about = {
            "service.name": "tidelog",
            "service.version": version,
            "service.instance.id": broker_id,
        }
        # Made by `create`: what OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say is merged in.
        self._provider = TracerProvider(resource=Resource.create(about))
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("tidelog", version)
        self.committing: Span | None = None
        """One at a time. Whatever PUT of the WAL begins meanwhile carries it; the task that sends
        it may be older than the flush, and of another one's context."""

    def store(self, inner: ObjectStore) -> "TracedStore":
        """The store to give to the log."""
        return TracedStore(inner, self)

    def hot_routes(self) -> "type[TracedHotPath]":
        """The hot routes, traced here."""
        return type("TracedHotPath", (TracedHotPath,), {"tracer": self.tracer})

    def watch(self, broker: Log) -> None:
        """Flushes and commits of this log from now on."""
        broker.writer.flushing = self.flushing
        broker.writer.committer = _TracedCommitter(broker.writer.committer, self)

    @contextlib.contextmanager
    def flushing(self, requests: Sequence[Request]) -> Iterator[None]:
        """A flush: a trace of its own, because it is many requests'."""
        contexts = [
            request.trace.get_span_context()
            for request in requests
            if isinstance(request.trace, Span)
        ]
        facts = {"tidelog.requests": len(requests)}
        links = [Link(context) for context in contexts[:LINKS_MAX]]
        with self.tracer.start_as_current_span("flush", links=links, attributes=facts):
            yield

    def close(self) -> None:
        # A collector that is gone is tried again for longer than a broker may take to end; only the
        # exporter's own end stops that.
        patience = threading.Timer(CLOSE_S, self._exporter.shutdown)
        patience.start()
        self._provider.shutdown()
        patience.cancel()


def otlp(broker_id: str, version: str) -> Traces:
    """Traces that go to a collector by OTLP over HTTP: localhost:4318 unless OTEL_ says else."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(broker_id, version, OTLPSpanExporter())


class TracedHotPath(HotPath):
    """The hot routes, a span each."""

    tracer: Tracer

    async def _serve(self, route: str, handler: Handler, call: Call) -> None:
        scope = call.scope
        carrier = {
            name: call.headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in call.headers
        }
        facts = {"http.request.method": scope["method"], "url.path": scope["path"]}
        tiers: set[str] = set()
        with self.tracer.start_as_current_span(
            route, propagate.extract(carrier), SpanKind.SERVER, attributes=facts
        ) as span:
            trace_token, tiers_token = TRACE.set(span), _tiers.set(tiers)
            try:
                await super()._serve(route, handler, call)
            finally:
                TRACE.reset(trace_token)
                _tiers.reset(tiers_token)
            span.set_attribute("http.response.status_code", call.status)
            if call.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                span.set_status(Status(StatusCode.ERROR))
            if scope["method"] == "GET":
                span.set_attribute("tidelog.tiers", sorted(tiers) or ["memory"])


class TracedStore:
    """The store inside, a span for what it is asked within a span: what nobody asked for (polls,
    heartbeats) would be traces of nothing."""

    def __init__(self, inner: ObjectStore, traces: Traces) -> None:
        self.inner = inner
        self._traces = traces

    def __getattr__(self, name: str) -> Any:
        """What only some stores have: a table's URI and options, tables in memory."""
        return getattr(self.inner, name)

    @property
    def url(self) -> str:
        return self.inner.url

    async def get(self, key: str) -> bytes:
        with self._span("get", key):
            return await self.inner.get(key)

    async def get_range(self, key: str, start: int, length: int) -> bytes:
        with self._span("get", key, length):
            return await self.inner.get_range(key, start, length)

    async def create(self, key: str, parts: Sequence[Part]) -> Created:
        with self._span("create", key, sum(memoryview(part).nbytes for part in parts)) as span:
            created = await self.inner.create(key, parts)
            if span is not None:
                span.set_attribute("tidelog.outcome", created.value)
            return created

    async def put(self, key: str, parts: Sequence[Part]) -> None:
        with self._span("put", key):
            await self.inner.put(key, parts)

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix, start_after=start_after):
            yield info

    async def delete(self, keys: Iterable[str]) -> None:
        await self.inner.delete(keys)

    async def close(self) -> None:
        await self.inner.close()

    @contextlib.contextmanager
    def _span(self, verb: str, key: str, size: int | None = None) -> Iterator[Span | None]:
        current: Span | None = trace.get_current_span()
        if verb == "create" and key.startswith(keys.WAL):
            current = self._traces.committing
        if current is None or not current.is_recording():  # nobody asked, or long ago
            yield None
            return
        tier = TIERS.get(f"{key.partition('/')[0]}/", "other")
        seen = _tiers.get()
        if verb == "get" and seen is not None:
            seen.add(tier)
        facts: dict[str, str | int] = {"tidelog.object": key}
        if size is not None:
            facts["tidelog.bytes"] = size
        parent = trace.set_span_in_context(current)
        with self._traces.tracer.start_as_current_span(
            f"{verb} {tier}", parent, SpanKind.CLIENT, attributes=facts
        ) as span:
            yield span


class _TracedCommitter:
    """The committer inside, a span each."""

    def __init__(self, inner: Committer, traces: Traces) -> None:
        self._inner = inner
        self._traces = traces

    async def commit(self, draft: Draft) -> list[Outcome]:
        facts = {
            "tidelog.commits": len(draft.commits),
            "tidelog.chunks": len(draft.chunks),
            "tidelog.bytes": sum(map(len, draft.bodies)),
        }
        with self._traces.tracer.start_as_current_span("commit", attributes=facts) as span:
            self._traces.committing = span
            try:
                return await self._inner.commit(draft)
            finally:
                self._traces.committing = None
