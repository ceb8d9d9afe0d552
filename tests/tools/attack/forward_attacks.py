"""Reads of a principal's instances that another broker coordinates, with slow clients.

This broker forwards them; their clients take the answers slowly, or only wait.
"""

import functools
import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.system.client import wait_until
from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import TIMEOUT_S, V2, counted, sent
from tests.tools.attack.measure import MIB, Attack, scaled
from tests.tools.attack.probes import TYPE

READER = "forwarded"
RECORDS = 15
"""Records of 1 MB in a request."""
TRICKLE_BYTES = 2048
TRICKLE_S = 0.1


@contextmanager
def coordinator(broker: SecuredBroker, topic: str, groups: int, bodies: int = 0) -> Iterator[None]:
    """Run another broker of the cluster, which coordinates groups of the principal READER.

    It gets bodies with records of the topic. Each group has an instance `i`, which reads the topic.
    """
    with TemporaryDirectory(prefix="tidelog-attack-") as folder:
        other = SecuredBroker(Path(folder), broker.tree, broker_id="coordinator")
        other.store = broker.store
        other.start()
        try:
            body = json.dumps({"records": [{"value": "x" * 1_000_000}] * RECORDS})
            for _ in range(bodies):
                other.asked("POST", f"/topics/{topic}", content=body, headers=TYPE)
            rights = broker.principal(READER).headers
            config = {"name": "i", "format": "json", "auto.offset.reset": "earliest"}
            partitions = {"partitions": [{"topic": topic, "partition": 0}]}
            for number in range(groups):
                path = f"/consumers/{topic}-{number}"
                requests = [
                    ("POST", path, {"json": config, "headers": V2 | rights}),
                    (
                        "POST",
                        f"{path}/instances/i/assignments",
                        {"json": partitions, "headers": V2 | rights},
                    ),
                ]
                assert sent(other, requests) == "1 x 200, 1 x 204"
            brokers = f"{broker.cluster_path}/brokers"
            wait_until(lambda: len(broker.asked("GET", brokers).json()["data"]) == 2, "two brokers")
            yield
        finally:
            other.kill()


def _topic(broker: SecuredBroker) -> str:
    """Make a topic that READER may read."""
    topic = f"{READER}-{time.monotonic_ns()}"
    broker.create_topic(topic)
    broker.principal(READER)
    broker.allow(READER, "READ", "TOPIC", topic)
    broker.allow(READER, "READ", "GROUP", topic, "PREFIXED")
    return topic


def _reading(broker: SecuredBroker, group: str, query: str, stack: ExitStack) -> socket.socket:
    """Send a read of a group's instance on a connection with a small buffer."""
    connection = stack.enter_context(socket.socket())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((broker.address, broker.port))
    connection.settimeout(TIMEOUT_S)
    path = f"/consumers/{group}/instances/i/records?{query}"
    secret = broker.principal(READER).secret
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
    connection.sendall(f"{head}Accept: {TYPE['content-type']}\r\n\r\n".encode())
    return connection


def taken_slowly(scale: float, broker: SecuredBroker) -> str:
    reads, topic = scaled(12, scale, 2), _topic(broker)
    with coordinator(broker, topic, reads, scaled(4, scale, 1)), ExitStack() as stack:
        query = f"max_bytes={64 * MIB}&timeout=10000"
        slow, statuses = [], Counter[str]()
        for number in range(reads):
            connection = _reading(broker, f"{topic}-{number}", query, stack)
            status = connection.recv(TRICKLE_BYTES).split()[1].decode()
            statuses[status] += 1
            slow += [connection] if status == "200" else []
        for _ in range(scaled(100, scale, 2)):
            for connection in slow:
                connection.recv(TRICKLE_BYTES)
            time.sleep(TRICKLE_S)
    return counted(statuses)


def waiting(scale: float, broker: SecuredBroker) -> str:
    groups, topic = scaled(50, scale, 2), _topic(broker)
    with coordinator(broker, topic, groups), ExitStack() as stack:
        reads = scaled(1500, scale, 10)
        for number in range(reads):
            _reading(broker, f"{topic}-{number % groups}", "timeout=5000", stack)
        rights = {"headers": broker.principal(READER).headers}
        status = sent(broker, [("GET", f"/topics/{topic}", rights)] * 5)
    return f"{reads} reads; {status}"


def forward_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    return {
        "forwarded reads: taken slowly": functools.partial(taken_slowly, scale),
        "forwarded reads: waiting": functools.partial(waiting, scale),
    }
