"""Connections without a login to ports with TLS: what OpenSSL does before there is a request."""

import functools
import struct
import time
from contextlib import ExitStack, suppress

from tests.support.tls_client import TlsClient
from tests.tools.attack.brokers import TlsBroker
from tests.tools.attack.http_client import opened
from tests.tools.attack.measure import Attack, scaled

HALF_HELLO = struct.pack(">BHH", 22, 0x0301, 16_384) + b"\x01\x00\xff\xff" + bytes(16_380)
"""The first record of a large ClientHello."""
HELD_S = 3.0


def hellos(port_of: str, scale: float, broker: TlsBroker) -> str:
    """Send the ClientHellos of many connections at once."""
    count = scaled(1000, scale, 10)
    client = TlsClient()
    hello = client.handshake()
    client.close()
    with ExitStack() as stack:
        connections = list(opened(broker, count, stack, broker.ports[port_of]))
        for connection in connections:
            connection.sendall(hello)
        answers = sum(bool(connection.recv(1)) for connection in connections)
    return f"{answers} of {count} answered"


def half_hellos(port_of: str, scale: float, broker: TlsBroker) -> str:
    count = scaled(2400, scale, 10)
    with ExitStack() as stack:
        for connection in [*opened(broker, count, stack, broker.ports[port_of])]:
            with suppress(OSError):  # the broker may close it
                connection.sendall(HALF_HELLO)
        time.sleep(HELD_S)
    return f"{count} connections"


def key_updates(scale: float, broker: TlsBroker) -> str:
    """Send thousands of KeyUpdates in a packet."""
    with ExitStack() as stack:
        clients = []
        for connection in opened(broker, 4, stack):
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
