"""Connections of clients without a login or a right: all that a broker accepts, and their bytes."""

import functools
import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress

import httpx

from tests.service.kafka.wire import framed
from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import opened
from tests.tools.attack.kafka_client import connected, log_in
from tests.tools.attack.measure import Attack, scaled
from tests.tools.attack.probes import NEIGHBOUR
from tidelog.service.kafka.messages.handshake import (
    SaslAuthenticateRequest,
    SaslHandshakeRequest,
)

CONNECTIONS = 10_500
"""More than a broker accepts."""
BYTES_S = 12.0
"""How long an attack sends bytes, at scale 1."""
LOGIN = b"POST /tidelog/v1/login HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WRONG_LOGIN = LOGIN + b'Content-Length: 11\r\n\r\n{"key":"a"}'
LARGE_LOGIN = LOGIN + b"Content-Length: 225000\r\n\r\n" + b"x" * 225_000
SHAKE = framed(SaslHandshakeRequest(mechanism="PLAIN"), 1)
WRONG_PROOF = framed(SaslAuthenticateRequest(auth_bytes=b"\0mallory\0wrong"), 2)
REFUSED = b"GET /topics HTTP/1.1\r\nHost: x\r\n\r\n"


def refused_requests(scale: float, broker: SecuredBroker) -> str:
    """Send one request without a login on each connection."""
    answer_count = 0
    with ExitStack() as stack:
        for connection in opened(broker, scaled(CONNECTIONS, scale, 10), stack):
            with suppress(OSError):
                connection.sendall(REFUSED)
                answer_count += bool(connection.recv(1))
        path = f"{broker.base_url}/topics/{NEIGHBOUR}"
        statuses = [
            httpx.get(path, headers=broker.neighbour.headers, timeout=60).status_code
            for _ in range(5)
        ]
    if {*statuses} & {429, 503}:
        return f"FAILED: {statuses}"
    return f"{answer_count} x answered, then {statuses[0]}"


def idle_logins(scale: float, broker: SecuredBroker) -> str:
    """Log in to the Kafka port on each connection, with a principal that has no right."""
    stranger, accepted = broker.principal("stranger"), 0
    with ExitStack() as stack:
        port = int(str(broker.settings["kafka_port"]))
        for connection in opened(broker, scaled(CONNECTIONS, scale, 10), stack, port):
            with suppress(OSError):
                log_in(connection, stranger)
                accepted += 1
        try:
            for _ in range(5):
                connected(broker, broker.neighbour).close()
        except OSError as error:
            return f"FAILED: {error!r}"
    return f"{accepted} x logged in"


def pressed(connections: Iterable[socket.socket], data: bytes, seconds: float) -> int:
    """Send the data on all connections, as much as the broker takes. Return how many are open."""
    remaining_data = {}
    for connection in connections:
        connection.setblocking(False)
        remaining_data[connection] = memoryview(data)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for connection, remaining in list(remaining_data.items()):
            try:
                remaining_data[connection] = (
                    remaining[connection.send(remaining[: 1 << 18]) :] if remaining else remaining
                )
            except BlockingIOError:
                continue
            except OSError:  # the broker has closed it
                del remaining_data[connection]
        time.sleep(0.02)
    return len(remaining_data)


def bytes_before_login(scale: float, broker: SecuredBroker) -> str:
    """Send a wrong proof to the Kafka port, which is answered after a second, and requests."""
    count = scaled(2000, scale, 10)
    with ExitStack() as stack:
        connections = [*opened(broker, count, stack, int(str(broker.settings["kafka_port"])))]
        data = SHAKE + WRONG_PROOF + SHAKE * (600_000 // len(SHAKE))
        still_open = pressed(connections, data, BYTES_S * scale)
    return f"{still_open} of {count} still open"


def bodies_before_login(scale: float, broker: SecuredBroker) -> str:
    """Send wrong logins, and behind them one with a large body in the same packet."""
    count = scaled(2000, scale, 10)
    with ExitStack() as stack:
        connections = [*opened(broker, count, stack)]
        for connection in connections:
            connection.sendall(WRONG_LOGIN * 2)
        still_open = pressed(connections, WRONG_LOGIN * 20 + LARGE_LOGIN, BYTES_S * scale)
    return f"{still_open} of {count} still open"


def connection_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {
        "connections: refused requests": functools.partial(refused_requests, scale),
        "connections: bodies before the login": functools.partial(bodies_before_login, scale),
        "connections: Kafka requests before the login": functools.partial(
            bytes_before_login, scale
        ),
        "connections: Kafka logins of a principal": functools.partial(idle_logins, scale),
    }
