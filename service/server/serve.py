"""A broker as a process: its ports, its background work, its end.

The start binds the ports, then opens the service (service.server.service), registers the broker
with its peers, and last listens on the ports. The end is the reverse: drain (service.server.drain),
close the ports, finish the requests, close the service.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import NoReturn
from urllib.parse import urlsplit

import uvloop

from tidelog.service.exit_status import EXIT_FAILED, EXIT_OK, EXIT_UNREACHABLE, UNREACHABLE_ERRORS
from tidelog.service.http.http_server import HttpServer
from tidelog.service.http.listening_sockets import bound_sockets
from tidelog.service.peers.listener import PeerListener, reachable
from tidelog.service.secret_files import PRIVATE_UMASK
from tidelog.service.security.tls_certificates import certificates
from tidelog.service.server import kafka
from tidelog.service.server.banner import announce, facts
from tidelog.service.server.drain import Drain
from tidelog.service.server.log_lines import log_failure, log_to_stderr
from tidelog.service.server.maintenance import check_tables, run_maintenance
from tidelog.service.server.merges import run_merges
from tidelog.service.server.open_files import ConnectionLimits, client_limits
from tidelog.service.server.return_memory import return_memory
from tidelog.service.server.service import CLOSE_S, Ports, Service
from tidelog.service.settings.settings import Settings
from tidelog.service.telemetry.loop_probe import LoopProbe
from tidelog.storage.broker import BACKGROUND_STOP_S
from tidelog.storage.core.errors import LogError
from tidelog.storage.runtime.clock import SystemClock
from tidelog.storage.runtime.malloc import keep_freed
from tidelog.storage.runtime.tasks import begin_duty

REQUESTS_S = 10
"""Timeout of the requests under way after the port has closed."""
STOP_S_MAX = REQUESTS_S + CLOSE_S
"""Longest time from the end of a broker's drain to the end of its process. A supervisor must wait
for `drain_ms` and this time before it kills a broker."""

REPEAT_S = 1.0
"""A worker counts two signals within this time as one."""
SWITCH_INTERVAL_S = 0.0005

GC_THRESHOLDS = (10_000, 10, 1_000)
"""Thresholds of Python's garbage collector. With the default of 700 new objects, one flush of 64
requests starts several collections, which take half of a broker's CPU. A collection stops the event
loop: one of the second generation visits up to 10,000 x 10 objects that clients let the broker
keep, in about 0.07 s. A full one comes when 100 million were added and a quarter of all is new."""


def run(
    settings: Settings, on_listening: Callable[[], object] = lambda: None, *, worker: int = 0
) -> int:
    """Serve until SIGTERM or SIGINT, then return the exit status.

    `worker` is the number of this process if it shares its port with other workers, else 0.
    """
    log_to_stderr(settings)
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
    """End the process after `run`, without waiting for threads.

    On a busy machine, threads with the lowest priority may need a minute to end.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


async def serve(settings: Settings, on_listening: Callable[[], object], worker: int = 0) -> None:
    """Run one broker until it is stopped and has drained its requests.

    Raises LogError if it cannot start or continue.
    """
    # Bind the port first, because a start on a port in use must not create or join a cluster.
    with contextlib.ExitStack() as stack:
        is_shared = settings.workers > 1
        sockets = bound_sockets(settings.host, settings.port, is_shared=is_shared)
        for sock in sockets:
            stack.enter_context(sock)
        kafka_ports = kafka.bind(settings, worker, stack)
        # TLS files that cannot be used also end the start before the store is opened.
        tls = certificates(settings, _peer_host(settings), SystemClock())
        files = client_limits(settings)
        ports = Ports(worker, files.clients, kafka_ports, tls)
        async with Service.open(settings, ports=ports) as service, _duties(service):
            await _join(service, files)
            if service.kafka is not None and kafka_ports is not None:
                service.closing.push_async_callback(service.kafka.close)
                await service.kafka.start(kafka_ports.sockets, files.backlog)
            await _serve_http(service, sockets, on_listening, files.backlog)


def _peer_host(settings: Settings) -> str:
    """Return the host name or address at which other brokers reach this one."""
    host = urlsplit(settings.peer_address).hostname
    return host or reachable(settings.peer_host or settings.host)


@contextlib.asynccontextmanager
async def _duties(service: Service) -> AsyncIterator[None]:
    """Run the work that no request starts. Its end is awaited after the broker has closed."""
    settings, broker = service.settings, service.broker
    tasks = [
        begin_duty("retention", run_maintenance(settings, broker, service.maintenance)),
        begin_duty("merging", run_merges(settings, broker, service.maintenance)),
        begin_duty("tables", check_tables(broker)),
        asyncio.create_task(service.ports.tls.watch(), name="tidelog-tls"),
        asyncio.create_task(service.reports.rates.run(), name="tidelog-vitals"),
        asyncio.create_task(return_memory(broker, service.handshakes), name="tidelog-memory"),
    ]
    service.closing.push_async_callback(asyncio.wait, tasks, timeout=BACKGROUND_STOP_S)
    loop_probe = LoopProbe(service.counters.loop_held)
    loop_probe.start()
    try:
        yield
    finally:
        loop_probe.stop()
        for task in tasks:
            task.cancel()


async def _join(service: Service, files: ConnectionLimits) -> None:
    """Start the listener for peers and register the broker, before clients can send requests.

    The listener closes after the broker has closed, so the broker answers its peers until its end.
    """
    settings, tls = service.settings, service.ports.tls
    if settings.is_in_memory:
        return
    listener = PeerListener(
        service.peer_app,
        settings.peer_host or settings.host,
        settings.peer_port,
        files.peers,
        tls.peers.server if tls.peers else None,
        service.handshakes,
    )
    service.closing.push_async_callback(listener.close)
    address = await listener.start(settings.peer_address)
    await service.broker.join(address, settings.port, service.advertised, settings.zone)


async def _serve_http(
    service: Service,
    sockets: list[socket.socket],
    on_listening: Callable[[], object],
    backlog: int,
) -> None:
    settings, broker, app = service.settings, service.broker, service.app

    def listening(url: str) -> None:
        # With port 0, a caller reads the port from these lines.
        lines = facts(url, broker, service.advertised, has_peers=not settings.is_in_memory)
        announce(url, lines, settings.log_format)
        on_listening()

    certificate = service.ports.tls.clients
    server = HttpServer(
        app,
        settings.host,
        settings.port,
        on_listening=listening,
        loop="uvloop",
        admission=app.admission,
        proves_by_head=app.proves_by_head,
        backlog=backlog,
        tls=certificate.server if certificate else None,
        handshakes=service.handshakes,
        timeout_graceful_shutdown=REQUESTS_S,
    )
    now_s, repeat_s = broker.clock.boot_s, REPEAT_S if service.ports.worker else 0.0
    drain = Drain(broker, server, service.kafka, settings.drain_ms / 1000, now_s, repeat_s)
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
        # A failed task of the log is a bug: raise its exception instead of dropping it.
        with contextlib.suppress(asyncio.CancelledError):
            await watch
