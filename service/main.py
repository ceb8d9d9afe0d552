"""The composition root: settings in, one broker process out.

The order of the start is the order of what may fail: store, probe, log (with its hot log), port.
The order of the end is the reverse: the port is closed and requests drain, the log flushes, the
store is let go. A kill at any moment is equally safe (I1), only less polite.
"""

import asyncio
import contextlib
import gc
import hashlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn
from urllib.parse import urlsplit

import uvicorn
import uvloop

from service.app import VERSION, build_app
from service.care import care_for_ever
from service.consumer_docs import documented_consumers
from service.group_forwarding import Forwarder
from service.group_peers import GroupPeers
from service.hotdocs import documented_routes
from service.hotpath import HotPath
from service.logs import last_words, log_to_stderr
from service.peer_client import METRICS, VITALS, HttpPeers
from service.peers import PeerListener
from service.protocol import Protocol
from service.security import Security
from service.settings import Settings, state_home
from service.telemetry import CareCounters, HttpCounters, Worker, gathered
from storage.clock import SystemClock
from storage.consumers import Consumers
from storage.coordinator import Rendezvous
from storage.errors import LogError, Unavailable
from storage.folder import FolderStore
from storage.log import Log
from storage.malloc import keep_freed
from storage.members import Member
from storage.membership import Membership
from storage.metered import MeteredStore
from storage.objectstore import MemoryStore, ObjectStore
from storage.sealer import DUTIES_END_S
from storage.secret import cluster_secret
from storage.stores import open_store, probe

if TYPE_CHECKING:
    from service.tracing import Traces

log = logging.getLogger("tidelog")

CLOSE_S = 12.0
"""For the last flush, after the 10 s that uvicorn gives to open requests: 22 s together, of the
30 s after which Kubernetes kills."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_UNREACHABLE = 3

SWITCH_INTERVAL_S = 0.0005
LOOPBACK = ("127.0.0.1", "::1", "localhost")

GC_THRESHOLDS = (50_000, 20, 100)
"""Objects made and not yet freed before a look at the young, and looks before the older: at
Python's 700 a flush of 64 requests sets off several, and half of a broker's CPU goes there."""


def run(
    settings: Settings, on_listening: Callable[[], object] = lambda: None, *, worker: int = 0
) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status. `worker` is the number of one that
    shares its port."""
    log_to_stderr(settings.log_level.upper(), settings.log_format)
    keep_freed()
    # A commit's thread needs the interpreter's lock back after each system call: at Python's 5 ms
    # a busy loop would make every PUT to a folder take 2 to 3 times as long.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()  # modules and routes live as long as the process: nobody need look at them again
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        uvloop.run(serve(settings, on_listening, worker))
    except LogError as error:
        last_words(str(error), settings.log_format)
        return EXIT_UNREACHABLE if isinstance(error, Unavailable) else EXIT_FAILED
    return EXIT_OK


def leave(status: int) -> NoReturn:
    """End the process of `run`, whose work is done: without waiting for threads at the lowest
    priority, which on a busy machine do not get their turn to end for a minute."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def serve(settings: Settings, on_listening: Callable[[], object], worker: int = 0) -> None:
    """One broker, from start to drained end. Raises LogError when it cannot start or go on."""
    clock = SystemClock()
    store = await open_store(settings.store, s3=settings.s3)
    try:
        await probe(store, clock)
        broker_id = settings.broker_id or clock.new_id().hex()[:12]
        traces = _traces(settings, broker_id)
        seen: ObjectStore = store if traces is None else traces.store(store)
        peers = HttpPeers()
        try:
            broker = Log(
                MeteredStore(seen, clock),
                clock,
                broker_id,
                settings.log_settings(),
                hot_dir(settings, store),
                peers=peers,
            )
            if traces is not None:
                traces.watch(broker)
            await broker.open(settings.cluster_id or None)
            consumers = Consumers(broker, _coordinators(broker.membership))
            consumers.start()
            serving = _Broker(broker, consumers, peers, worker, traces)
            await _serve_cluster(settings, serving, on_listening)
        finally:
            await peers.close()
            if traces is not None:
                await asyncio.to_thread(traces.close)
    finally:
        await store.close()


class _Broker(NamedTuple):
    """What answers requests; `worker` is its number among several behind the port, or 0."""

    log: Log
    consumers: Consumers
    peers: HttpPeers
    worker: int
    traces: "Traces | None"


def _traces(settings: Settings, broker_id: str) -> "Traces | None":
    """Raises LogError where they are wanted and cannot be had."""
    if settings.traces == "none":
        return None
    try:
        from service.tracing import otlp
    except ImportError as error:
        raise LogError(f"traces={settings.traces} needs tidelog[otel]: {error}") from error
    return otlp(broker_id, VERSION)


async def _serve_cluster(
    settings: Settings, serving: _Broker, on_listening: Callable[[], object]
) -> None:
    """Peers first and last: a broker that takes requests is one that others know, and while it ends
    they hear from it that it does."""
    broker = serving.log
    listener = PeerListener(broker, settings.peer_host or settings.host, settings.peer_port)
    counters = CareCounters()
    care = asyncio.create_task(care_for_ever(settings, counters), name="tidelog-care")
    try:
        try:
            if not settings.store.startswith("memory:"):  # whose brokers are all in this process
                address = await listener.start(settings.peer_address)
                await broker.join(address, settings.port)
                log.info("peers reach this broker at %s", address)
            await _serve_http(settings, serving, listener, counters, on_listening)
        finally:
            care.cancel()
            await _close(broker, serving.consumers)
            await asyncio.wait([care], timeout=DUTIES_END_S)
    finally:
        await listener.close()


def _coordinators(membership: Membership) -> Rendezvous:
    return Rendezvous(membership.me.id, lambda: (peer.id for peer in membership.others))


async def _close(broker: Log, consumers: Consumers) -> None:
    """Raises Unavailable where the store does not answer: to wait for it is no better than to be
    killed, which supervisors do before long."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await consumers.close()
            await broker.close()
    except TimeoutError:
        raise Unavailable(
            f"ended without a last flush: {broker.store.url} did not answer for {CLOSE_S:.0f} s; "
            "what acks=1 promised is in the hot log"
        ) from None


async def _serve_http(
    settings: Settings,
    serving: _Broker,
    listener: PeerListener,
    care: CareCounters,
    on_listening: Callable[[], object],
) -> None:
    broker, consumers = serving.log, serving.consumers
    counters = HttpCounters()
    security = await _security(settings, broker, counters)
    app = build_app(
        broker,
        http=counters,
        default_partitions=settings.default_partitions,
        extra=[documented_routes(), documented_consumers()],
        care=care,
        worker=_worker(settings, serving),
        peers=lambda: _asked(serving, VITALS, broker.membership.others),
        security=security,
    )
    listener.app.told_of[METRICS] = app.state.telemetry.text
    listener.app.told_of[VITALS] = app.state.vitals.told
    vitals = asyncio.create_task(app.state.vitals.run(), name="tidelog-vitals")
    forwarder = Forwarder(GroupPeers(broker.membership, serving.peers))
    hot_routes = HotPath if serving.traces is None else serving.traces.hot_routes()
    hot_path = hot_routes(app, broker, settings, counters, consumers, forwarder, security)
    listener.app.groups = hot_path.consumers.forwarded
    config = uvicorn.Config(
        hot_path,
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http=Protocol,
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # links look at them (service.paths); nothing else may believe them
        timeout_keep_alive=75,
        limit_concurrency=settings.connections_max,
        timeout_graceful_shutdown=10,
    )
    server = _Server(config, on_listening)

    def stop() -> None:
        app.state.readiness.drain()
        broker.drain()
        server.stop()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    log.info(
        "broker %s of cluster %s on %s",
        broker.wal.writer,
        broker.wal.cluster.cluster_id,
        broker.store.url,
    )
    watch = asyncio.create_task(_run_until_failed(broker, consumers))
    watch.add_done_callback(lambda _: server.stop())
    try:
        await server.serve(_shared_port(settings))
    finally:
        watch.cancel()
        vitals.cancel()
        # A task of the log that died is a bug: what it says must not be lost in the shutdown.
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _security(settings: Settings, broker: Log, counters: HttpCounters) -> Security | None:
    if settings.security == "off":
        return None
    secret = await cluster_secret(broker.store, broker.clock)
    if not (settings.admin_key or broker.state.access.keys):
        log.warning("security is on, and nobody has a key: give admin_key, and make some with it")
    if settings.host not in LOOPBACK:
        log.warning("keys travel as they are sent: put TLS before %s", settings.host)
    return Security(broker, settings, secret, counters)


def _worker(settings: Settings, serving: _Broker) -> Worker | None:
    """One of several behind the port; the others are the brokers of this host and port."""
    if not serving.worker:
        return None
    membership = serving.log.membership

    async def ask() -> list[bytes]:
        host = urlsplit(membership.me.address).hostname
        beside = [
            member
            for member in membership.others
            if member.port == settings.port and urlsplit(member.address).hostname == host
        ]
        return await _asked(serving, METRICS, beside)

    return Worker(serving.worker, settings.workers, ask)


async def _asked(serving: _Broker, path: str, members: Iterable[Member]) -> list[bytes]:
    """What these brokers say that answer soon."""
    return await gathered(serving.peers.post(member, path, b"") for member in members)


async def _run_until_failed(broker: Log, consumers: Consumers) -> None:
    """Returns never; raises when a task that serves all requests has died, which is a bug."""
    assert consumers.task is not None, "watched before it was started"
    log_task = asyncio.create_task(broker.run_until_failed())
    try:
        done, _ = await asyncio.wait(
            {log_task, consumers.task}, return_when=asyncio.FIRST_COMPLETED
        )
        for task in done:
            task.result()
    finally:
        log_task.cancel()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which ends a drained process by the signal
    itself."""

    def __init__(
        self, config: uvicorn.Config, on_listening: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:  # uvicorn's way to say that the port is taken; it has logged why
            address = f"{self.config.host}:{self.config.port}"
            raise LogError(f"cannot listen on {address}: is another process there?") from None
        # With port 0 this line is how one learns the port; nobody has to guess a free one.
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        log.info("listening on http://%s:%d", host, port)
        log.info("the console is at http://%s:%d/ui/", host, port)
        self._on_listening()


def _shared_port(settings: Settings) -> list[socket.socket] | None:
    """A socket beside those of the other workers: the kernel deals out the connections."""
    if settings.workers == 1:
        return None
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sharing = socket.socket(family)
    try:
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sharing.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sharing.bind((settings.host, settings.port))
    except OSError as error:
        sharing.close()
        where = f"{settings.host}:{settings.port}"
        raise LogError(f"cannot listen on {where}: {error.strerror}") from error
    return [sharing]


def hot_dir(settings: Settings, store: ObjectStore) -> Path | None:
    """Where acks=1 records wait: beside a folder store, else a folder of this user for this store.

    None for a store in memory: nothing there outlives the process that a hot log would help.
    """
    if settings.hot_dir:
        return _usable_folder(Path(settings.hot_dir))
    if isinstance(store, FolderStore):
        return Path(store.table_uri(".hot"))
    if isinstance(store, MemoryStore):
        return None
    name = hashlib.blake2b(store.url.encode(), digest_size=8).hexdigest()
    return state_home() / "tidelog" / name


def _usable_folder(path: Path) -> Path:
    """Whoever names one wants to be told at once that it cannot be used."""
    try:
        folder = path.expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # the second: a home that nobody has
        raise LogError(f"hot dir {path} cannot be used: {error}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise LogError(f"hot dir {folder} cannot be used: the broker's user may not write there")
    return folder
