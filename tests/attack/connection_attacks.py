"""Connections of clients without a right, as many as a broker accepts: another client is served."""

import functools
from contextlib import ExitStack, suppress

import httpx

from tests.attack.brokers import SecuredBroker
from tests.attack.http_client import opened
from tests.attack.kafka_client import connected, log_in
from tests.attack.measure import NEIGHBOUR, Attack, scaled

CONNECTIONS = 10_500
"""More than a broker accepts."""
REFUSED = b"GET /topics HTTP/1.1\r\nHost: x\r\n\r\n"


def refused_requests(scale: float, broker: SecuredBroker) -> str:
    """Send one request without a login on each connection."""
    answered = 0
    with ExitStack() as stack:
        for connection in opened(broker, scaled(CONNECTIONS, scale, 10), stack):
            with suppress(OSError):
                connection.sendall(REFUSED)
                answered += bool(connection.recv(1))
        path = f"{broker.base_url}/topics/{NEIGHBOUR}"
        statuses = [
            httpx.get(path, headers=broker.neighbour.headers, timeout=60).status_code
            for _ in range(5)
        ]
    if {*statuses} & {429, 503}:
        return f"FAILED: {statuses}"
    return f"{answered} x answered, then {statuses[0]}"


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


def connection_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {
        "connections: refused requests": functools.partial(refused_requests, scale),
        "connections: Kafka logins of a principal": functools.partial(idle_logins, scale),
    }
