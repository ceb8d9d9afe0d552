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
from tidelog.service.kafka.messages.schema import Message

TIMEOUT_S = 60.0
SMALL_BYTES = 4096
"""Buffer of a socket whose owner does not read."""


def connected(broker: Broker, *, timeout_s: float = TIMEOUT_S, reads: bool = True) -> socket.socket:
    """Return a connection to the broker's port for Kafka clients."""
    connection = socket.socket()
    if not reads:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
    connection.settimeout(timeout_s)
    connection.connect((broker.address, int(str(broker.settings["kafka_port"]))))
    return connection


def received(connection: socket.socket) -> bytes:
    """Return the next answer, without its size. Raises ConnectionError if there is none."""
    (size,) = struct.unpack(">i", _exactly(connection, 4))
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = connection.recv(min(size - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("the broker closed the connection")
        found += piece
    return bytes(found)


def asked(broker: Broker, request: Message, kind: type[Message], version: int) -> Any:
    """Send one request on a connection of its own; return its answer."""
    with connected(broker) as connection:
        connection.sendall(framed(request, version))
        return answer(received(connection), kind, version)[1]


def sent(broker: Broker, requests: Iterable[bytes], at_once: int = 1) -> str:
    """Send requests, each on a connection of its own, `at_once` at a time. Return the number of
    answers by their outcome."""

    def one(request: bytes) -> str:
        try:
            with connected(broker) as connection:
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
    with ExitStack() as held:
        found = []
        for data in sends:
            connection = connected(broker, timeout_s=5.0, reads=False)
            held.enter_context(connection)
            with suppress(OSError):  # the broker has closed it, or its buffers are full
                connection.sendall(data)
            found.append(connection)
        yield found
