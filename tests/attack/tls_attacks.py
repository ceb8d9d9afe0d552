"""Connections without a login to ports with TLS: what OpenSSL does before there is a request."""

import functools
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from tests.attack.brokers import AttackedBroker, TlsBroker
from tests.attack.http_client import ADDRESSES, TIMEOUT_S
from tests.attack.measure import Attack, scaled
from tests.support.tls_client import TlsClient

HALF_HELLO = struct.pack(">BHH", 22, 0x0301, 16_384) + b"\x01\x00\xff\xff" + bytes(16_380)
"""The first record of a large ClientHello."""
HELD_S = 3.0


@contextmanager
def connections(broker: AttackedBroker, port: int, count: int) -> Iterator[list[socket.socket]]:
    """Open connections from several addresses."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                socket.create_connection(
                    (broker.address, port),
                    TIMEOUT_S,
                    source_address=(f"127.0.0.{number % ADDRESSES + 1}", 0),
                )
            )
            for number in range(count)
        ]


def hellos(port_of: str, scale: float, broker: TlsBroker) -> str:
    """Send the ClientHellos of many connections at once."""
    count = scaled(1000, scale, 10)
    client = TlsClient()
    hello = client.handshake()
    client.close()
    with connections(broker, broker.ports[port_of], count) as opened:
        for connection in opened:
            connection.sendall(hello)
        answers = sum(bool(connection.recv(1)) for connection in opened)
    return f"{answers} of {count} answered"


def half_hellos(port_of: str, scale: float, broker: TlsBroker) -> str:
    count = scaled(2400, scale, 10)
    with connections(broker, broker.ports[port_of], count) as opened:
        for connection in opened:
            with suppress(OSError):  # the broker may close it
                connection.sendall(HALF_HELLO)
        time.sleep(HELD_S)
    return f"{count} connections"


def key_updates(scale: float, broker: TlsBroker) -> str:
    """Send thousands of KeyUpdates in a packet."""
    with connections(broker, broker.port, 4) as opened:
        clients = []
        for connection in opened:
            client = TlsClient()
            connection.sendall(client.handshake())
            while not client.is_open:
                connection.sendall(client.handshake(connection.recv(1 << 16)))
            clients.append((connection, client.key_updates(scaled(9500, scale, 100))))
        for connection, updates in clients:
            with suppress(OSError):  # the broker closes it
                connection.sendall(updates)
        closed = 0
        for connection, _ in clients:
            with suppress(OSError):
                while connection.recv(1 << 16):
                    pass
            closed += 1
    return f"{closed} x closed"


def tls_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {
        **{
            f"TLS: {name} ({port})": functools.partial(attack, port, scale)
            for name, attack in {"ClientHellos": hellos, "half ClientHellos": half_hellos}.items()
            for port in ("http", "kafka")
        },
        "TLS: KeyUpdates": functools.partial(key_updates, scale),
    }
