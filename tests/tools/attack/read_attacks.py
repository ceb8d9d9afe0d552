"""Reads of a principal's own topic whose answers are six times their records.

The records are control characters, which a text of JSON writes as `\\u0001`.
"""

import base64
import functools
import time
from collections.abc import Callable
from typing import Any

from tests.tools.attack.brokers import SecuredBroker
from tests.tools.attack.http_client import V2, sent
from tests.tools.attack.measure import MIB, Attack, scaled

READER = "reader"
TEXT = {"accept": "application/vnd.kafka.text.v2+json"}
PACKED = {"accept-encoding": "gzip, identity;q=0"}
VALUE = base64.b64encode(b"\x01" * (900 << 10)).decode()
OCTETS = {"content-type": "application/vnd.kafka.binary.v2+json"}
Requests = list[tuple[str, str, Any]]


def escaped(
    reads: Callable[[str, float], Requests], at_once: int, scale: float, broker: SecuredBroker
) -> str:
    """Produce the records as the principal, then send its reads of the topic."""
    topic = f"{READER}-{time.monotonic_ns()}"
    broker.create_topic(topic)
    rights = broker.principal(READER).headers
    for operation in ("READ", "WRITE"):
        broker.allow(READER, operation, "TOPIC", topic)
    broker.allow(READER, "READ", "GROUP", topic)
    records = [f'{{"value":"{VALUE}"}}'] * scaled(7, scale, 2)
    body = f'{{"records":[{",".join(records)}]}}'
    post = ("POST", f"/topics/{topic}", {"content": body, "headers": OCTETS | rights})
    answers = [sent(broker, [post] * scaled(10, scale, 1))]
    requests = [
        (method, path, {**options, "headers": options.get("headers", {}) | rights})
        for method, path, options in reads(topic, scale)
    ]
    return "; ".join([*answers, sent(broker, requests, at_once)])


def fetches(
    method: str, headers: dict[str, str], max_mib: int, count: int, topic: str, scale: float
) -> Requests:
    path = f"/topics/{topic}/partitions/0/records?offset=0&max_bytes={max_mib * MIB}"
    return [(method, path, {"headers": TEXT | headers})] * scaled(count, scale, 2)


def by_instance(topic: str, _scale: float) -> Requests:
    path = f"/consumers/{topic}/instances/i"
    config = {"name": "i", "format": "text", "auto.offset.reset": "earliest"}
    partitions = {"partitions": [{"topic": topic, "partition": 0}]}
    read = ("GET", f"{path}/records?timeout=100&max_bytes={64 * MIB}", {"headers": TEXT})
    return [
        ("POST", f"/consumers/{topic}", {"json": config, "headers": V2}),
        ("POST", f"{path}/assignments", {"json": partitions, "headers": V2}),
        *[read] * 3,
        ("DELETE", path, {"headers": V2}),
    ]


def read_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    ways: dict[str, tuple[Callable[[str, float], Requests], int]] = {
        "fetch": (functools.partial(fetches, "GET", {}, 64, 4), 4),
        "HEAD": (functools.partial(fetches, "HEAD", {}, 64, 4), 4),
        "gzip": (functools.partial(fetches, "GET", PACKED, 2, 8), 8),
        "gzip, 4 MiB": (functools.partial(fetches, "GET", PACKED, 4, 8), 8),
        "instance": (by_instance, 1),
    }
    return {
        f"reads: control characters, {name}": functools.partial(escaped, reads, at_once, scale)
        for name, (reads, at_once) in ways.items()
    }
