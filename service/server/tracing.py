"""OpenTelemetry traces: a produce request, its flush, the PUT; a fetch and the tiers that it reads.

    produce            a request, in the trace that its `traceparent` names
    flush              linked to the requests in it (LINKS_MAX at most)
      commit           by this broker, or forwarded to the sequencer
        create wal     the conditional PUT, if this broker commits
    fetch              `tidelog.tiers` lists the sources of its records: memory, wal, table
      get table        reads of the object store

This module is loaded only if `traces` is on (the extra `otel`), so a broker without traces runs
none of it. The SDK reads the destination and the sampling from the usual OTEL_ variables.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from http import HTTPStatus
from typing import NamedTuple

from opentelemetry import propagate, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer

from tidelog.service.http.request import HttpRequest
from tidelog.service.server.router import Router, Target
from tidelog.storage.codec.entry import Draft
from tidelog.storage.core import object_keys
from tidelog.storage.runtime.request_context import TRACE
from tidelog.storage.runtime.tracer_interface import TracedRequest

CLOSE_S = 2.0
"""The longest wait for the export of the last spans when a broker stops."""
LINKS_MAX = 100
"""Maximum requests that one flush links to."""
TIERS = {object_keys.WAL: "wal", object_keys.DATA: "wal", object_keys.TOPICS: "table"}

_tiers: ContextVar[set[str] | None] = ContextVar("tidelog-tiers", default=None)


class Traces:
    """The tracer of one broker, from its start to `close`."""

    def __init__(self, broker_id: str, version: str, exporter: SpanExporter) -> None:
        about = {
            "service.name": "tidelog",
            "service.version": version,
            "service.instance.id": broker_id,
        }
        # `create` also reads OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME.
        self._provider = TracerProvider(resource=Resource.create(about))
        self._exporter = exporter
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self.tracer = self._provider.get_tracer("tidelog", version)
        self._committing: Span | None = None
        """The span of the running commit; there is one commit at a time. Each PUT of the WAL that
        begins during the commit gets this span as its parent. The current context is not used,
        because the task that sends the PUT may be older than the flush."""

    def router(self) -> "type[TracedRouter]":
        """Return the class of a router with a span for each hot request."""
        return type("TracedRouter", (TracedRouter,), {"tracer": self.tracer})

    @contextlib.contextmanager
    def flush(self, requests: Sequence[TracedRequest]) -> Iterator[None]:
        """Trace a flush. It has a trace of its own, because it serves many requests."""
        contexts = [
            request.trace.get_span_context()
            for request in requests
            if isinstance(request.trace, Span)
        ]
        facts = {"tidelog.requests": len(requests)}
        links = [Link(context) for context in contexts[:LINKS_MAX]]
        with self.tracer.start_as_current_span("flush", links=links, attributes=facts):
            yield

    @contextlib.contextmanager
    def commit(self, draft: Draft) -> Iterator[None]:
        facts = {
            "tidelog.commits": len(draft.commits),
            "tidelog.chunks": len(draft.chunks),
            "tidelog.bytes": sum(chunk.size for chunk in draft.chunks),
        }
        with self.tracer.start_as_current_span("commit", attributes=facts) as span:
            self._committing = span
            try:
                yield
            finally:
                self._committing = None

    @contextlib.contextmanager
    def request(self, verb: str, key: str, size: int | None) -> Iterator["_RequestSpan | None"]:
        """Trace a request to the store if it runs in a span.

        Polls and heartbeats run in no span, so they are not traced.
        """
        current: Span | None = trace.get_current_span()
        if verb == "create" and key.startswith(object_keys.WAL):
            current = self._committing
        if current is None or not current.is_recording():
            yield None
            return
        tier = TIERS.get(f"{key.partition('/')[0]}/", "other")
        tiers = _tiers.get()
        if verb == "get" and tiers is not None:
            tiers.add(tier)
        facts: dict[str, str | int] = {"tidelog.object": key}
        if size is not None:
            facts["tidelog.bytes"] = size
        parent = trace.set_span_in_context(current)
        with self.tracer.start_as_current_span(
            f"{verb} {tier}", parent, SpanKind.CLIENT, attributes=facts
        ) as span:
            yield _RequestSpan(span)

    def close(self) -> None:
        # If the collector is unreachable, the SDK retries longer than a broker may take to stop.
        # Only a shutdown of the exporter ends the retries.
        timer = threading.Timer(CLOSE_S, self._exporter.shutdown)
        timer.start()
        self._provider.shutdown()
        timer.cancel()


class _RequestSpan(NamedTuple):
    span: Span

    def outcome(self, outcome: str) -> None:
        self.span.set_attribute("tidelog.outcome", outcome)


def otlp(broker_id: str, version: str) -> Traces:
    """Return traces that are sent to a collector by OTLP over HTTP.

    The collector is at localhost:4318, unless OTEL_ variables name another address.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return Traces(broker_id, version, OTLPSpanExporter())


class TracedRouter(Router):
    """A router with a span for each hot request."""

    tracer: Tracer

    async def _serve(self, target: Target, segments: list[str], call: HttpRequest) -> None:
        if target.is_declared:
            await super()._serve(target, segments, call)
            return
        scope = call.scope
        carrier = {
            name: call.headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in call.headers
        }
        facts = {"http.request.method": scope["method"], "url.path": scope["path"]}
        tiers: set[str] = set()
        with self.tracer.start_as_current_span(
            target.route.label, propagate.extract(carrier), SpanKind.SERVER, attributes=facts
        ) as span:
            trace_token, tiers_token = TRACE.set(span), _tiers.set(tiers)
            try:
                await super()._serve(target, segments, call)
            finally:
                TRACE.reset(trace_token)
                _tiers.reset(tiers_token)
            span.set_attribute("http.response.status_code", call.status)
            if call.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                span.set_status(Status(StatusCode.ERROR))
            if scope["method"] == "GET":
                span.set_attribute("tidelog.tiers", sorted(tiers) or ["memory"])
