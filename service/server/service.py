"""A broker with its applications, without a port.

`tidelog serve` listens for it; tests and other programs call its applications in their own process.

The start opens the parts in the order of their dependencies: store, probe, log (with its hot log),
applications. The end is the reverse: flush the log, close its peers, close the store.

**On a crash**: a kill at any moment loses no acknowledged record (I1). Open requests fail.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from tidelog.service.codec_threads import UNPACKED_ALL_BYTES_MAX, UnpackThreads
from tidelog.service.formats.shared_pages import SHARED_BYTES_MAX
from tidelog.service.http.connection_admission import Admission
from tidelog.service.http.handshakes import HANDSHAKES_BYTES_MAX, Handshakes
from tidelog.service.http.loop_turns import Turns
from tidelog.service.kafka.api_context import Context
from tidelog.service.kafka.appends import UNPACKED_BYTES_MAX
from tidelog.service.kafka.connections.listener import limits_of as kafka_limits
from tidelog.service.operations.operations import Operations
from tidelog.service.operations.rights import DESCRIBE_TOPIC
from tidelog.service.peers.client import METRICS, HttpPeers
from tidelog.service.peers.forwarding import Forwarder, GroupPeers
from tidelog.service.peers.listener import BODIES_BYTES_MAX, PeerApp
from tidelog.service.peers.members_in_backoff import HeldMembers
from tidelog.service.routes.broker_info import VERSION
from tidelog.service.security.audit import open_audit
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import topic_filter
from tidelog.service.security.peer_signatures import Signatures
from tidelog.service.security.tls_certificates import NO_CERTIFICATES, Certificates
from tidelog.service.server import kafka as kafka_server
from tidelog.service.server.app import build_app
from tidelog.service.server.broker_files import check_files, hot_dir
from tidelog.service.server.maintenance import compactor
from tidelog.service.server.peer_reports import Reports
from tidelog.service.server.router import Router, limits_of
from tidelog.service.settings.security import SecuritySettings
from tidelog.service.settings.settings import Settings
from tidelog.service.settings.store import StoreSettings
from tidelog.service.settings.telemetry import TelemetrySettings
from tidelog.service.telemetry.http_counters import HttpCounters
from tidelog.service.telemetry.kafka_counters import KafkaCounters
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.metrics import Worker, gathered
from tidelog.storage.broker import BACKGROUND_STOP_S, NO_OBSERVER, NO_PEERS, Broker
from tidelog.storage.cluster.liveness import Member
from tidelog.storage.core.errors import LogError, StoreUnfit, Unavailable
from tidelog.storage.runtime.clock import Clock, SystemClock
from tidelog.storage.store.metered import MeteredStore
from tidelog.storage.store.object_store import ObjectStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.probe import probe

if TYPE_CHECKING:
    from tidelog.service.security.oidc import Issuer
    from tidelog.service.server.tracing import Traces

log = logging.getLogger("tidelog")

CLOSE_S = 12.0
"""Timeout of the last flush."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Ports(NamedTuple):
    """Ports and limits of the process that listens for a service.

    `worker` is the number of the process if it shares its port with other workers, else 0.
    `connections_max` is the number that the limit of open files allows, None for that of the
    settings. `kafka` are the ports for Kafka clients, if there are any.
    """

    worker: int = 0
    connections_max: int | None = None
    kafka: kafka_server.KafkaPorts | None = None
    tls: Certificates = NO_CERTIFICATES


NO_PORTS = Ports()


class Service:
    """One broker and its applications. Owned by one event loop. `Service.open` makes it."""

    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        peers: HttpPeers,
        ports: Ports,
        closing: contextlib.AsyncExitStack,
        secret: bytes | None,
        traces: "Traces | None",
    ) -> None:
        """`closing` has the parts that end after the broker has closed.

        `secret` is the cluster's, None if security is off. Raises StoreUnfit, LogError.
        """
        self.settings = settings
        self.broker = broker
        self.ports = ports
        self.closing = closing
        self.handshakes = Handshakes()
        self.maintenance = MaintenanceCounters()
        connections_max = ports.connections_max or settings.connections_max
        admission: Admission[Any] = Admission(
            limits_of(settings, connections_max), other_bounds(settings, connections_max)
        )
        kafka_counters = KafkaCounters(Admission(kafka_limits(connections_max)))
        self.counters = HttpCounters(admission, kafka_counters)
        self.counters.certificates.update(ports.tls.by_port())
        security = security_of(settings, broker, secret, self.counters, self.handshakes.turns)
        if secret is not None:  # the broker was opened with its peers, and only it has the secret
            peers.signatures = Signatures(
                secret,
                broker.cluster.members().me.id,
                lambda: broker.clock.now_ms() - broker.store_time.skew_ms(),
                lambda: broker.state.level,
            )
        self._peers = peers
        threads = UnpackThreads()
        self.advertised = kafka_server.advertised(settings, ports.kafka, broker, ports.worker)
        """The listener for Kafka clients, if there is one, as the liveness object names it."""
        self.kafka: kafka_server.KafkaServer | None = None
        operations = Operations.of(broker, settings.topic_defaults)
        audit = open_audit(settings, broker, self.counters)
        for listener in self.advertised:
            context = Context(broker, operations, settings, self.counters, threads, audit)
            self.kafka = kafka_server.KafkaServer(
                context, security, listener, ports.tls.clients, self.handshakes
            )
        self.reports = Reports.of(
            broker,
            self.counters,
            self.maintenance,
            self._worker(),
            () if self.kafka is None else self.kafka.listener.connections,
            compactor(settings, broker),
            lambda path: self._responses(path, broker.cluster.members().peers),
        )
        closing.push_async_callback(self.reports.compactions.close, BACKGROUND_STOP_S)
        kind = Router if traces is None else traces.router()
        forwarder = Forwarder(GroupPeers(broker.cluster.members, peers))
        held_members = HeldMembers(broker.groups.rest, forwarder)
        self.app = kind(
            build_app(
                broker,
                settings,
                http=self.counters,
                security=security,
                reports=self.reports,
                operations=operations,
                held_members=held_members,
            ),
            broker,
            settings,
            self.counters,
            security,
            threads,
            audit,
        )
        self.peer_app = PeerApp(
            broker, self.app.forwarded, self.reports.by_path(), peers.signatures
        )

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls,
        settings: Settings,
        *,
        store: ObjectStore | None = None,
        clock: Clock | None = None,
        ports: Ports = NO_PORTS,
    ) -> "AsyncIterator[Service]":
        """Open a broker with these settings, and close it at the end.

        A `store` of the caller is neither probed nor closed; without one, the store of the settings
        is. Raises LogError.
        """
        clock = clock or SystemClock()
        broker_id = settings.broker_id or clock.new_id().hex()[:12]
        async with contextlib.AsyncExitStack() as stack:
            if store is None:
                store = await _opened_store(settings, clock, stack)
            traces = _traces(settings, broker_id)
            if traces is not None:
                stack.push_async_callback(asyncio.to_thread, traces.close)
            peers = HttpPeers(ports.tls.peers.client if ports.tls.peers else None)
            stack.push_async_callback(peers.close)
            observer = NO_OBSERVER if traces is None else traces
            broker = await Broker.open(
                MeteredStore(store, clock, observer),
                settings.log_settings(),
                clock=clock,
                name=broker_id,
                cluster_id=settings.cluster_id or None,
                hot_dir=hot_dir(settings, store),
                peers=NO_PEERS if settings.is_in_memory else peers,
                observer=observer,
                may_describe=topic_filter(settings, DESCRIBE_TOPIC),
            )
            closing = await stack.enter_async_context(contextlib.AsyncExitStack())
            try:
                secret = None if settings.security == "off" else await broker.cluster.secret()
                yield cls(settings, broker, peers, ports, closing, secret, traces)
            finally:
                await _close(broker)

    def _worker(self) -> Worker | None:
        """Return a Worker that asks the other workers, which are the brokers on this host and port.

        Return None for a broker that is no worker.
        """
        if not self.ports.worker:
            return None

        async def ask() -> list[bytes]:
            members = self.broker.cluster.members()
            host = urlsplit(members.me.address).hostname
            beside = [
                member
                for member in members.peers
                if member.port == self.settings.port and urlsplit(member.address).hostname == host
            ]
            return await self._responses(METRICS, beside)

        return Worker(self.ports.worker, self.settings.workers, ask)

    async def _responses(self, path: str, members: Iterable[Member]) -> list[bytes]:
        """Return the responses of those members that answer before the timeout."""
        return await gathered(self._peers.post(member, path, b"") for member in members)


async def _opened_store(
    settings: StoreSettings, clock: Clock, stack: contextlib.AsyncExitStack
) -> ObjectStore:
    """Open and probe the store of the settings; `stack` closes it."""
    retry_s = settings.start_retry_s
    store = await open_store(settings.store, s3=settings.s3, retry_s=retry_s)
    stack.push_async_callback(store.close)
    await probe(store, clock, retry_s=retry_s)
    return store


def _traces(settings: TelemetrySettings, broker_id: str) -> "Traces | None":
    """Return the traces, or None if they are off. Raises LogError if a package is missing."""
    if settings.traces == "none":
        return None
    try:
        from tidelog.service.server.tracing import otlp
    except ImportError as error:
        raise LogError(f"traces={settings.traces} needs tidelog[otel]: {error}") from error
    return otlp(broker_id, VERSION)


def security_of(
    settings: SecuritySettings,
    broker: Broker,
    secret: bytes | None,
    counters: HttpCounters,
    turns: Turns,
) -> Security | None:
    """Return the security of a broker, or None if there is no `secret`.

    Raises StoreUnfit, LogError.
    """
    if secret is None:
        access = broker.state.access
        if (access.keys or len(access.acls)) and not settings.security_off_with_keys:
            raise StoreUnfit(
                f"the cluster in {broker.store_url} has keys or ACLs, but security is off: set "
                "security=keys (with security_off_with_keys, every client has all permissions)"
            )
        if settings.host not in LOOPBACK:
            log.warning("security is off: every client that reaches %s may do all", settings.host)
        return None
    check_files(broker)
    issuer = issuer_of(settings, broker, counters)
    if not (issuer or settings.admin_key or broker.state.access.keys):
        log.warning("security=keys, but no key exists: set admin_key and create keys with it")
    if settings.host not in LOOPBACK and not settings.tls_cert_file:
        log.warning(
            "keys are sent unencrypted: set tls_cert_file, or put a TLS proxy before %s",
            settings.host,
        )
    return Security(broker, settings, secret, counters, issuer, turns)


def other_bounds(settings: Settings, clients: int) -> dict[str, int]:
    """Return the maximum bytes of the memory that the Admission of HTTP does not count.

    The keys are parts of the broker. `clients` is the maximum of connections.
    """
    bounds = {
        "write buffer": settings.buffer_bytes_max,
        "tail cache": settings.tail_cache_bytes,
        "read cache": settings.read_cache_bytes,
        "peers": BODIES_BYTES_MAX,
        "shared pages": SHARED_BYTES_MAX,
        "unpacked": max(UNPACKED_ALL_BYTES_MAX, UNPACKED_BYTES_MAX, settings.request_bytes_max),
    }
    if settings.tls_cert_file:
        bounds["handshakes"] = HANDSHAKES_BYTES_MAX
    return bounds | (kafka_server.memory_bounds(settings, clients) if settings.kafka_port else {})


def issuer_of(
    settings: SecuritySettings, broker: Broker, counters: HttpCounters
) -> "Issuer | None":
    """Return the OIDC issuer of the settings, or None.

    Begin the fetch of its keys. Raises LogError if a package is missing.
    """
    if not settings.oidc_issuer:
        return None
    try:
        from tidelog.service.security.oidc import Issuer
    except ImportError as error:
        raise LogError(f"oidc_issuer needs tidelog[oidc]: {error}") from error
    issuer = Issuer(settings, broker.clock, counters.auth_failures)
    issuer.begin_fetch()
    return issuer


async def _close(broker: Broker) -> None:
    """Flush and close.

    Raises Unavailable if the store does not answer within CLOSE_S, because a supervisor would kill
    the process soon after.
    """
    try:
        async with asyncio.timeout(CLOSE_S):
            await broker.close()
    except TimeoutError:
        raise Unavailable(
            f"ended without the last flush: {broker.store_url} did not answer for {CLOSE_S:.0f} s; "
            "records acknowledged with acks=1 are in the hot log"
        ) from None
