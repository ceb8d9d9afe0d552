"""Requests of Kafka's protocol, as an attacker sends them: prepared bytes over plain sockets."""

import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from tests.service.kafka.wire import answer, framed
from tests.support.broker import Broker
from tests.tools.attack.brokers import Principal
from tidelog.service.kafka.messages.handshake import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tidelog.service.kafka.messages.schema import Message

TIMEOUT_S = 60.0
SMALL_BYTES = 4096
"""Buffer of a socket whose owner does not read."""


def connected(
    broker: Broker,
    principal: Principal | None = None,
    *,
    timeout_s: float = TIMEOUT_S,
    reads: bool = True,
) -> socket.socket:
    """Return a connection to the broker's port for Kafka clients, logged in as the principal."""
    connection = socket.socket()
    if not reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    connection.settimeout(timeout_s)
    connection.connect((broker.address, int(str(broker.settings["kafka_port"]))))
    if principal is not None:
        log_in(connection, principal)
    return connection


def log_in(connection: socket.socket, principal: Principal) -> None:
    """Authenticate by SASL PLAIN. Raises ConnectionError if the broker refuses."""
    shake = SaslHandshakeRequest(mechanism="PLAIN")
    proof = f"\0{principal.user}\0{principal.secret}".encode()
    authenticate = SaslAuthenticateRequest(auth_bytes=proof)
    codes = [
        request_on(connection, shake, SaslHandshakeResponse, 1).error_code,
        request_on(connection, authenticate, SaslAuthenticateResponse, 2).error_code,
    ]
    if any(codes):
        raise ConnectionError(f"{principal.user} is not accepted: {codes}")


def request_on(
    connection: socket.socket, request: Message, kind: type[Message], version: int
) -> Any:
    """Send a request and return its answer."""
    connection.sendall(framed(request, version))
    return answer(received(connection), kind, version)[1]


def received(connection: socket.socket) -> bytes:
    """Return the next answer, without its size. Raises ConnectionError if there is none."""
    (size,) = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    received_bytes = bytearray()
    while len(received_bytes) < size:
        piece = connection.recv(min(size - len(received_bytes), 1 << 20))
        if not piece:
            raise ConnectionError("the broker closed the connection")
        received_bytes += piece
    return bytes(received_bytes)


def asked(broker: Broker, request: Message, kind: type[Message], version: int) -> Any:
    """Send one request on a connection of its own; return its answer."""
    with connected(broker) as connection:
        return request_on(connection, request, kind, version)


def sent(
    broker: Broker,
    requests: Iterable[bytes],
    at_once: int = 1,
    principal: Principal | None = None,
) -> str:
    """Send requests, each on a connection of its own, `at_once` at a time.

    Return the number of answers by their outcome.
    """

    def one(request: bytes) -> str:
        try:
            with connected(broker, principal) as connection:
                connection.sendall(request)
                return "answered" if received(connection) else "empty"
        except TimeoutError:
            return "no answer"
        except OSError:
            return "closed"

    with ThreadPoolExecutor(at_once) as pool:
        counts = Counter(pool.map(one, requests))
    return ", ".join(f"{count} x {outcome}" for outcome, count in sorted(counts.items()))


@contextmanager
def open_connections(broker: Broker, sends: Sequence[bytes]) -> Iterator[list[socket.socket]]:
    """Open a connection for each element of `sends`, send it, and read nothing."""
    with ExitStack() as stack:
        connections = []
        for data in sends:
            connection = connected(broker, timeout_s=5.0, reads=False)
            stack.enter_context(connection)
            with suppress(OSError):  # the broker has closed it, or its buffers are full
                connection.sendall(data)
            connections.append(connection)
        yield connections
