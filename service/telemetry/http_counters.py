"""Counters of HTTP, on the path of each request: dicts of ints."""

from bisect import bisect_left
from collections import Counter
from collections.abc import (
    Container,
)
from typing import Any, Protocol

from tidelog.service.http.connection_admission import Admission, Limits
from tidelog.service.telemetry.kafka_counters import KafkaCounters
from tidelog.service.telemetry.loop_probe import HELD_S
from tidelog.storage.core.histogram import SECONDS, Histogram

METRIC_TOPICS_MAX = 500
"""Maximum topics with counters of their own: the first topics with traffic. All other topics share
counters."""
HTTP, KAFKA = "http", "kafka"
"""The protocols of clients."""
OTHER_TOPICS = "(other)"
"""The name of the shared counters. No topic has this name, because it is not valid."""


class Traffic:
    """Counters of one topic or protocol since the process started."""

    __slots__ = ("bytes_in", "bytes_out", "records_in", "records_out")

    def __init__(self) -> None:
        self.records_in = self.bytes_in = self.records_out = self.bytes_out = 0

    def add_in(self, records: int, size: int) -> None:
        self.records_in += records
        self.bytes_in += size

    def add_out(self, records: int, size: int) -> None:
        self.records_out += records
        self.bytes_out += size


class HttpCounters:
    """Counters of HTTP requests since the process started.

    Owned by one event loop. `observe` takes ~0.4 us.
    """

    def __init__(
        self, admission: "Admission[Any] | None" = None, kafka: KafkaCounters | None = None
    ) -> None:
        self.admission: Admission[Any] = admission or Admission(Limits())
        """The Admission of the listener for clients."""
        self.kafka = kafka or KafkaCounters()
        self.requests: Counter[tuple[str, int]] = Counter()
        """By route and status class (2 to 5)."""
        self.latencies: dict[str, Histogram] = {}
        """By route. The time that a request waits for new records does not count."""
        self.errors: Counter[str] = Counter()
        """By the name of the error's class."""
        self.auth_failures: Counter[str] = Counter()
        """By reason: the `kind` of Unauthenticated."""
        self.denied: Counter[str] = Counter()
        """By type of resource."""
        self.throttled: Counter[str] = Counter()
        """By quota."""
        self.undecodable: Counter[str] = Counter()
        """Records that did not decode, by `on_error`: skip (they were skipped) or raw (the answer
        has their bytes)."""
        self.audited: Counter[str] = Counter()
        """Events for the audit log, by kind."""
        self.audit_lost: Counter[str] = Counter()
        """Events that the audit log does not have, by reason: flood or write."""
        self.loop_held = Histogram(HELD_S)
        """CPU time for which callbacks held the event loop, measured by LoopProbe."""
        self.certificates: dict[str, Certificate] = {}
        """By port: clients or peers."""
        self.topics: dict[str, Traffic] = {}
        """Over all protocols."""
        self.protocols = {HTTP: Traffic(), KAFKA: Traffic()}

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request. `route` is the label of a route, never a path."""
        self.requests[route, status // 100] += 1
        latency = self.latencies.get(route)
        if latency is None:
            latency = self.latencies[route] = Histogram(SECONDS)
        latency.counts[bisect_left(SECONDS, seconds)] += 1  # `latency.add`, without a call
        latency.total += seconds

    def refused(self, error: BaseException) -> None:
        """Count a request answered with this error, by the error's class (a bounded set)."""
        self.errors[type(error).__name__] += 1

    def add_records_in(
        self, records: int, size: int, topic: str | None = None, protocol: str = HTTP
    ) -> None:
        """Count records produced by a request of `size` bytes.

        `topic` is None if the request wrote to several topics.
        """
        self.protocols[protocol].add_in(records, size)
        if topic is not None:
            (self.topics.get(topic) or self._traffic(topic)).add_in(records, size)

    def add_records_out(
        self, records: int, size: int, topic: str | None = None, protocol: str = HTTP
    ) -> None:
        """Count records fetched in an answer of `size` bytes.

        `topic` is None if the answer had several topics.
        """
        self.protocols[protocol].add_out(records, size)
        if topic is not None:
            (self.topics.get(topic) or self._traffic(topic)).add_out(records, size)

    def total(self, name: str) -> int:
        """Return a counter of Traffic, over all protocols."""
        return sum(getattr(traffic, name) for traffic in self.protocols.values())

    def keep_topics(self, live: Container[str]) -> None:
        """Drop counters of deleted topics, to make room for new topics."""
        for topic in [name for name in self.topics if name not in live and name != OTHER_TOPICS]:
            del self.topics[topic]

    def _traffic(self, topic: str) -> Traffic:
        if len(self.topics) >= METRIC_TOPICS_MAX:
            topic = OTHER_TOPICS
        return self.topics.setdefault(topic, Traffic())


class Certificate(Protocol):
    """The values of a certificate in use that metrics show."""

    @property
    def ends_s(self) -> float:
        """Unix time at which the certificate expires."""

    @property
    def failures(self) -> int:
        """How many times changed files could not be used."""
