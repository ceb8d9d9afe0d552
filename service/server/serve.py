"""Composition root of a broker: from settings to a running process.

The start binds the port, then opens the parts in the order of their dependencies: store, probe, log
(with its hot log), peers. Last, the broker listens on the port. The end is the reverse: drain
(service.server.drain), close the port, finish the requests, flush the log, close the store.

**On a crash**: a kill at any moment loses no acknowledged record (I1). Open requests fail.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from urllib.parse import urlsplit

import uvloop

from tidelog.service.exit_status import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, UNREACHABLE_ERRORS
from tidelog.service.formats.shared_pages import SHARED_BYTES_MAX
from tidelog.service.http.admission import Admission
from tidelog.service.http.handshakes import HANDSHAKES_BYTES_MAX, Handshakes
from tidelog.service.http.sockets import HttpServer, bound_sockets
from tidelog.service.http.turns import Turns
from tidelog.service.kafka.appends import UNPACKED_BYTES_MAX
from tidelog.service.peers.client import COMPACTIONS, KAFKA_CLIENTS, METRICS, VITALS, HttpPeers
from tidelog.service.peers.forwarding import Forwarder, GroupPeers
from tidelog.service.peers.listener import BODIES_BYTES_MAX, PeerApp, PeerListener, reachable
from tidelog.service.routes.health import VERSION
from tidelog.service.secret_files import PRIVATE_UMASK
from tidelog.service.security.authenticator import Security
from tidelog.service.security.caller import topic_filter
from tidelog.service.security.certificates import Certificates, certificates
from tidelog.service.security.signatures import Signatures
from tidelog.service.server import kafka
from tidelog.service.server.app import build_app
from tidelog.service.server.banner import announce, facts
from tidelog.service.server.broker_files import check_files, hot_dir
from tidelog.service.server.drain import Drain
from tidelog.service.server.log_lines import log_failure, log_to_stderr
from tidelog.service.server.maintenance import check_tables, compactor, run_maintenance
from tidelog.service.server.open_files import client_limits
from tidelog.service.server.return_memory import return_memory
from tidelog.service.server.router import Limiters, Router, limits_of
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.compactions import Compactions
from tidelog.service.telemetry.kafka_clients import ConnectedClients
from tidelog.service.telemetry.loop_probe import LoopProbe
from tidelog.service.telemetry.maintenance_metrics import MaintenanceCounters
from tidelog.service.telemetry.metrics import HttpCounters, Worker, gathered
from tidelog.service.telemetry.rates import RateSampler
from tidelog.service.unpacking import UNPACKED_ALL_BYTES_MAX, UnpackThreads
from tidelog.storage.broker import BACKGROUND_STOP_S, NO_OBSERVER, NO_PEERS, Broker
from tidelog.storage.cluster.liveness import KafkaListener, Member
from tidelog.storage.core.errors import LogError, StoreUnfit, Unavailable
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.malloc import keep_freed
from tidelog.storage.store.metered import MeteredStore
from tidelog.storage.store.open import open_store
from tidelog.storage.store.probe import probe

if TYPE_CHECKING:
    from tidelog.service.security.oidc import Issuer
    from tidelog.service.server.tracing import Traces

log = logging.getLogger("tidelog")

REQUESTS_S = 10
"""Timeout of the requests under way after the port has closed."""
CLOSE_S = 12.0
"""Timeout of the last flush."""
STOP_S_MAX = REQUESTS_S + CLOSE_S
"""Longest time from the end of a broker's drain to the end of its process. A supervisor must wait
for `drain_ms` and this time before it kills a broker."""

REPEAT_S = 1.0
"""A worker counts two signals within this time as one."""
SWITCH_INTERVAL_S = 0.0005
LOOPBACK = ("127.0.0.1", "::1", "localhost")

GC_THRESHOLDS = (10_000, 10, 1_000)
"""Thresholds of Python's garbage collector. With the default of 700 new objects, one flush of 64
requests starts several collections, which take half of a broker's CPU. A collection stops the event
loop: one of the second generation visits up to 10,000 x 10 objects that clients let the broker
keep, in about 0.07 s. A full one comes when 100 million were added and a quarter of all is new."""


def run(
    settings: Settings, on_listening: Callable[[], object] = lambda: None, *, worker: int = 0
) -> int:
    """Serve until SIGTERM or SIGINT, then return the exit status. `worker` is the number of this
    process if it shares its port with other workers, else 0."""
    log_to_stderr(settings.log_level.upper(), settings.log_format)
    os.umask(PRIVATE_UMASK)  # also for files that libraries make: tables, temporary files
    keep_freed()
    # A commit's thread needs the interpreter's lock again after each system call. With Python's
    # interval of 5 ms, a busy loop makes each PUT to a folder take 2 to 3 times as long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # modules and routes live until the end, so exclude them from collections
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(serve(settings, on_listening, worker))
    except LogError as error:
        log_failure(str(error), settings.log_format)
        return EXIT_UNREACHABLE if isinstance(error, UNREACHABLE_ERRORS) else EXIT_FAILED
    return EXIT_OK


def leave(status: int) -> NoReturn:
    """End the process after `run`, without waiting for threads. On a busy machine, threads with the
    lowest priority may need a minute to end."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def serve(settings: Settings, on_listening: Callable[[], object], worker: int = 0) -> None:
    """Run one broker until it is stopped and has drained its requests. Raises LogError if it cannot
    start or continue."""
    # Bind the port first, because a start on a port in use must not create or join a cluster.
    with contextlib.ExitStack() as stack:
        is_shared = settings.workers > 1
        sockets = bound_sockets(settings.host, settings.port, is_shared=is_shared)
        for sock in sockets:
            stack.enter_context(sock)
        kafka_ports = kafka.bind(settings, worker, stack)
        # TLS files that cannot be used also end the start before the store is opened.
        tls = certificates(settings, _peer_host(settings), SystemClock())
        await _serve_store(settings, sockets, kafka_ports, on_listening, worker, tls)


async def _serve_store(
    settings: Settings,
    sockets: list[socket.socket],
    kafka_ports: kafka.KafkaPorts | None,
    on_listening: Callable[[], object],
    worker: int,
    tls: Certificates,
) -> None:
    clock = SystemClock()
    retry_s = settings.start_retry_s
    store = await open_store(settings.store, s3=settings.s3, retry_s=retry_s)
    try:
        await probe(store, clock, retry_s=retry_s)
        broker_id = settings.broker_id or clock.new_id().hex()[:12]
        traces = _traces(settings, broker_id)
        observer = NO_OBSERVER if traces is None else traces
        peers = HttpPeers(tls.peers.client if tls.peers else None)
        try:
            broker = await Broker.open(
                MeteredStore(store, clock, observer),
                settings.log_settings(),
                clock=clock,
                name=broker_id,
                cluster_id=settings.cluster_id or None,
                hot_dir=hot_dir(settings, store),
                peers=peers if _has_peers(settings) else NO_PEERS,
                observer=observer,
                may_describe=topic_filter(settings),
            )
            serving = _Serving(broker, peers, worker, traces, tls, kafka_ports, Handshakes())
            await _serve_cluster(settings, serving, sockets, on_listening)
        finally:
            await peers.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)
    finally:
        await store.close()


class _Serving(NamedTuple):
    """The parts of a running broker. `worker` is the broker's number among several workers, else
    0."""

    broker: Broker
    peers: HttpPeers
    worker: int
    traces: "Traces | None"
    tls: Certificates
    kafka_ports: kafka.KafkaPorts | None
    handshakes: Handshakes


def _peer_host(settings: Settings) -> str:
    """Return the host name or address at which other brokers reach this one."""
    host = urlsplit(settings.peer_address).hostname
    return host or reachable(settings.peer_host or settings.host)


def _has_peers(settings: Settings) -> bool:
    return not settings.store.startswith("memory:")  # a memory store has no other processes


def _traces(settings: Settings, broker_id: str) -> "Traces | None":
    """Return the traces, or None if they are off. Raises LogError if a package is missing."""
    if settings.traces == "none":
        return None
    try:
        from tidelog.service.server.tracing import otlp
    except ImportError as error:
        raise LogError(f"traces={settings.traces} needs tidelog[otel]: {error}") from error
    return otlp(broker_id, VERSION)


async def _serve_cluster(
    settings: Settings,
    serving: _Serving,
    sockets: list[socket.socket],
    on_listening: Callable[[], object],
) -> None:
    """Start the listener for peers before the server for clients, and close it after the broker has
    closed. So a broker registers before it accepts requests, and answers its peers until its
    end."""
    broker, counters, tls = serving.broker, MaintenanceCounters(), serving.tls
    files = client_limits(settings)
    admission: Admission[Any] = Admission(
        limits_of(settings, files.clients), other_bounds(settings, files.clients)
    )
    maintaining = asyncio.create_task(
        run_maintenance(settings, broker, counters), name="tidelog-care"
    )
    look = asyncio.create_task(check_tables(broker), name="tidelog-tables")
    watching = asyncio.create_task(tls.watch(), name="tidelog-tls")
    async with contextlib.AsyncExitStack() as stack:
        try:
            app, peer_app, rates, kafka_server, compactions = await _build_apps(
                settings, serving, counters, admission
            )
            stack.push_async_callback(compactions.close, BACKGROUND_STOP_S)
            if _has_peers(settings):
                host = settings.peer_host or settings.host
                listener = PeerListener(
                    peer_app,
                    host,
                    settings.peer_port,
                    files.peers,
                    tls.peers.server if tls.peers else None,
                    serving.handshakes,
                )
                stack.push_async_callback(listener.close)
                address = await listener.start(settings.peer_address)
                await broker.join(address, settings.port, _advertised(settings, serving))
            if kafka_server is not None and serving.kafka_ports is not None:
                stack.push_async_callback(kafka_server.close)
                await kafka_server.start(serving.kafka_ports.sockets, files.backlog)
            await _serve_http(
                settings, serving, app, rates, sockets, on_listening, files.backlog, kafka_server
            )
        finally:
            maintaining.cancel()
            look.cancel()
            watching.cancel()
            await _close(broker)
            await asyncio.wait([maintaining, look, watching], timeout=BACKGROUND_STOP_S)


def _advertised(settings: Settings, serving: _Serving) -> tuple[KafkaListener, ...]:
    return kafka.advertised(settings, serving.kafka_ports, serving.broker, serving.worker)


async def _close(broker: Broker) -> None:
    """Flush and close. Raises Unavailable if the store does not answer within CLOSE_S, because a
    supervisor would kill the process soon after."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await broker.close()
    except TimeoutError:
        raise Unavailable(
            f"ended without the last flush: {broker.store_url} did not answer for {CLOSE_S:.0f} s; "
            "records acknowledged with acks=1 are in the hot log"
        ) from None


async def _build_apps(
    settings: Settings,
    serving: _Serving,
    maintenance: MaintenanceCounters,
    admission: "Admission[Any]",
) -> tuple[Router, PeerApp, RateSampler, kafka.KafkaServer | None, Compactions]:
    """Return the ASGI applications for clients and for peers, the sampler of the rates, the
    listener for Kafka clients, and the compactions."""
    broker, traces = serving.broker, serving.traces
    counters = HttpCounters(admission, kafka.counters_of(admission.limits.connections_max))
    counters.certificates.update(serving.tls.by_port())
    security = await _security(settings, broker, counters, serving.handshakes.turns)
    if security is not None:
        serving.peers.signatures = Signatures(
            await broker.secret(),
            broker.members().me.id,
            lambda: broker.clock.now_ms() - broker.store_time.skew_ms(),
            lambda: broker.state.level,
        )

    def ask(path: str) -> Awaitable[list[bytes]]:
        return _responses(serving, path, broker.members().peers)

    app = build_app(
        broker,
        http=counters,
        default_settings=settings.topic_defaults,
        maintenance=maintenance,
        worker=_worker(settings, serving),
        peers=lambda: ask(VITALS),
        security=security,
    )
    kafka_server, threads = None, UnpackThreads()
    for named in _advertised(settings, serving):
        certificate = serving.tls.clients
        kafka_server = kafka.KafkaServer(
            settings,
            broker,
            counters,
            security,
            named,
            threads,
            certificate,
            serving.handshakes,
        )
    connected = () if kafka_server is None else kafka_server.listener.connections
    app.state.kafka_clients = ConnectedClients(broker, connected, lambda: ask(KAFKA_CLIENTS))
    compactions = Compactions(broker, compactor(settings), lambda: ask(COMPACTIONS))
    app.state.compactions = compactions
    forwarder = Forwarder(GroupPeers(broker.members, serving.peers))
    kind = Router if traces is None else traces.router()
    limiters = Limiters(admission, threads)
    router = kind(app, broker, settings, counters, broker.groups, forwarder, security, limiters)
    reports = {
        METRICS: app.state.telemetry.text,
        VITALS: app.state.vitals.encoded,
        KAFKA_CLIENTS: app.state.kafka_clients.encoded,
        COMPACTIONS: compactions.encoded,
    }
    peer_app = PeerApp(broker, router.forwarded, reports, serving.peers.signatures)
    return router, peer_app, app.state.vitals, kafka_server, compactions


async def _serve_http(
    settings: Settings,
    serving: _Serving,
    app: Router,
    rates: RateSampler,
    sockets: list[socket.socket],
    on_listening: Callable[[], object],
    backlog: int,
    kafka_server: kafka.KafkaServer | None,
) -> None:
    broker, clients = serving.broker, serving.tls.clients
    sampling = asyncio.create_task(rates.run(), name="tidelog-vitals")
    memory = asyncio.create_task(return_memory(broker, serving.handshakes), name="tidelog-memory")
    loop_probe = LoopProbe(app.counters.loop_held)
    loop_probe.start()

    def listening(url: str) -> None:
        # With port 0, a caller reads the port from these lines.
        named = _advertised(settings, serving)
        announce(
            url, facts(url, broker, named, has_peers=_has_peers(settings)), settings.log_format
        )
        on_listening()

    server = HttpServer(
        app,
        settings.host,
        settings.port,
        on_listening=listening,
        loop="uvloop",
        admission=app.admission,
        proves_by_head=app.proves_by_head,
        backlog=backlog,
        tls=clients.server if clients else None,
        handshakes=serving.handshakes,
        timeout_graceful_shutdown=REQUESTS_S,
    )

    now_s = broker.clock.boot_s
    repeat_s = REPEAT_S if serving.worker else 0.0
    drain = Drain(broker, server, kafka_server, settings.drain_ms / 1000, now_s, repeat_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain.on_signal)
    watch = asyncio.create_task(broker.run_until_failed())
    watch.add_done_callback(lambda _: server.stop())
    try:
        await server.serve(sockets)
    finally:
        await drain.close()
        watch.cancel()
        sampling.cancel()
        memory.cancel()
        loop_probe.stop()
        # A failed task of the log is a bug: raise its exception instead of dropping it.
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _security(
    settings: Settings, broker: Broker, counters: HttpCounters, turns: Turns
) -> Security | None:
    if settings.security == "off":
        access = broker.state.access
        if (access.keys or len(access.acls)) and not settings.security_off_with_keys:
            raise StoreUnfit(
                f"the cluster in {broker.store_url} has keys or ACLs, but security is off: set "
                "security=keys (with security_off_with_keys, every client has all permissions)"
            )
        if settings.host not in LOOPBACK:
            log.warning("security is off: every client that reaches %s may do all", settings.host)
        return None
    secret = await broker.secret()
    check_files(broker)
    issuer = _issuer(settings, broker, counters)
    if not (issuer or settings.admin_key or broker.state.access.keys):
        log.warning("security=keys, but no key exists: set admin_key and create keys with it")
    if settings.host not in LOOPBACK and not settings.tls_cert_file:
        log.warning(
            "keys are sent unencrypted: set tls_cert_file, or put a TLS proxy before %s",
            settings.host,
        )
    return Security(broker, settings, secret, counters, issuer, turns)


def _issuer(settings: Settings, broker: Broker, counters: HttpCounters) -> "Issuer | None":
    """Return the OIDC issuer of the settings, or None. Begin the fetch of its keys. Raises LogError
    if a package is missing."""
    if not settings.oidc_issuer:
        return None
    try:
        from tidelog.service.security.oidc import Issuer
    except ImportError as error:
        raise LogError(f"oidc_issuer needs tidelog[oidc]: {error}") from error
    issuer = Issuer(settings, broker.clock, counters.auth_failures)
    issuer.begin_fetch()
    return issuer


def other_bounds(settings: Settings, clients: int) -> dict[str, int]:
    """Return the maximum bytes of the parts of a broker's memory that the Admission of HTTP does
    not count. `clients` is the maximum of connections."""
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
    return bounds | (kafka.memory_bounds(settings, clients) if settings.kafka_port else {})


def _worker(settings: Settings, serving: _Serving) -> Worker | None:
    """Return a Worker that asks the other workers, which are the brokers on this host and port.
    Return None for a broker that is no worker."""
    if not serving.worker:
        return None

    async def ask() -> list[bytes]:
        members = serving.broker.members()
        host = urlsplit(members.me.address).hostname
        beside = [
            member
            for member in members.peers
            if member.port == settings.port and urlsplit(member.address).hostname == host
        ]
        return await _responses(serving, METRICS, beside)

    return Worker(serving.worker, settings.workers, ask)


async def _responses(serving: _Serving, path: str, members: Iterable[Member]) -> list[bytes]:
    """Return the responses of those members that answer before the timeout."""
    return await gathered(serving.peers.post(member, path, b"") for member in members)
