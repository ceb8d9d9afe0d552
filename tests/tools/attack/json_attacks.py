"""Requests whose JSON costs more than its bytes: many records, long runs, odd numbers."""

import functools
import gzip
from collections.abc import Callable, Sequence
from typing import Any

from tests.tools.attack.brokers import AttackedBroker
from tests.tools.attack.http_client import sent
from tests.tools.attack.kafka_arrays import WIDE
from tests.tools.attack.measure import MIB, VICTIM, Attack, scaled
from tests.tools.attack.probes import TYPE

Phase = Sequence[tuple[str, str, Any]]
"""Requests that are sent at once: method, path, keywords of httpx."""

TEXT_TYPE = {"content-type": "application/vnd.kafka.text.v2+json"}
CREATE_WIDE: Phase = [
    ("POST", "/admin/topics", {"json": {"topic_name": WIDE, "partitions_count": 100}})
]
"""A topic with many partitions, to which keys are hashed."""
V3 = f"{{cluster}}/topics/{VICTIM}/records"
V3_WIDE = f"{{cluster}}/topics/{WIDE}/records"
TRANSACTIONS = "{cluster}/transactions"
READERS = {
    "v2": {"accept": "application/vnd.kafka.json.v2+json"},
    "lines": {"accept": "application/x-ndjson"},
}
VALUES = {
    "exponents in a string": '[\\"%s\\"]' % ("1e00" * 250_000),
    "large numbers": f"[{','.join(['1e100'] * 160_000)}]",
    "backslashes": '[\\"%s\\",1e100]' % ("\\\\\\\\" * 250_000),
}
"""Values of about 1 MiB, as they are in a JSON string."""


def many(scale: float, prefix: bytes, piece: bytes, suffix: bytes, between: bytes = b",") -> bytes:
    count = scaled(62 * MIB // (len(piece) + len(between)), scale, 1)
    # Not by `join`: its list of millions of pieces would hold the interpreter's lock of the probes.
    return prefix + (piece + between) * (count - 1) + piece + suffix


def produced(body: bytes, **headers: str) -> list[Phase]:
    return [[("POST", f"/topics/{VICTIM}", {"content": body, "headers": TYPE | headers})]]


def to_v3(body: bytes, last: str = "", **headers: str) -> list[Phase]:
    return [[("POST", V3 + last, {"content": body, "headers": headers})]]


def to_wide(body: bytes, path: str = f"/topics/{WIDE}", **headers: str) -> list[Phase]:
    return [CREATE_WIDE, [("POST", path, {"content": body, "headers": TYPE | headers})]]


def pages(value: str, reader: str, max_bytes: int, scale: float) -> list[Phase]:
    """Produce texts that are JSON, which a reader's broker checks, then read them."""
    body = f'{{"records":[{{"value":"{value}"}}]}}'
    texts = [("POST", f"/topics/{VICTIM}", {"content": body, "headers": TEXT_TYPE})]
    path = f"/topics/{VICTIM}/partitions/0/records?offset=0&format=json&max_bytes={max_bytes}"
    reads = [("GET", path, {"headers": READERS[reader]})] * 4
    return [texts * scaled(40, scale, 2), reads]


def in_phases(make: Callable[[], Sequence[Phase]], broker: AttackedBroker) -> str:
    """Send the requests of each phase, four at a time."""
    counts = []
    for phase in make():
        requests = [
            (method, path.format(cluster=broker.cluster_path), options)
            for method, path, options in phase
        ]
        counts.append(sent(broker, requests, at_once=4))
    return "; ".join(counts)


def json_attacks(scale: float) -> dict[str, Attack]:
    """Return the attacks by name."""
    value = b'{"records":[{"value":'
    packed = {"content-encoding": "gzip"}
    objects = b"{}" * scaled(100_000, scale, 100)
    headers = b'{"headers":[%b]}' % b",".join([b'{"name":"ab"}'] * 9999)
    entries = [b'{"id":%d,%b' % (number, headers[1:]) for number in range(10)]
    many_of_ten = b'{"entries":[%b]}' % b",".join(entries)
    small = b'{"headers":[%b]}' % b",".join([b'{"name":"a"}'] * 48)
    named = {"idempotency-key": "k"}
    word = b'"%b"' % (b"k" * scaled(900_000, scale, 10))
    keyed = b'{"key":%b}' % word
    keyed_v3 = b'{"key":{"type":"JSON","data":%b}}' % word
    keyed_topics = b'{"topics":[{"topic_name":"%b","records":[' % WIDE.encode()
    transaction = many(scale / 6, b'{"topics":[{"topic_name":"t","records":[', small, b"]}]}")
    phases: dict[str, Callable[[], list[Phase]]] = {
        "JSON: records of nothing": lambda: produced(many(scale, b'{"records":[', b"{}", b"]}")),
        "JSON: short records": lambda: produced(
            many(scale, b'{"records":[', b'{"value":1}', b"]}")
        ),
        "JSON: headers": lambda: produced(
            many(scale, b'{"records":[{"headers":[', b'{"key":""}', b"]}]}")
        ),
        "JSON: a value of objects": lambda: produced(many(scale, value + b"[", b"{}", b"]}]}")),
        "JSON: backslashes": lambda: produced(many(scale, value + b'"', rb"\\", b'"}]}', b"")),
        "JSON: digits": lambda: produced(many(scale, value + b"[1e100,0.", b"7", b"]}]}", b"")),
        "JSON: zeros of an exponent": lambda: produced(
            many(scale, value + b"[1e100,1e", b"0", b"1]}]}", b"")
        ),
        "JSON: large numbers": lambda: produced(many(scale, value + b"[", b"1e100", b"]}]}")),
        "JSON: long keys": lambda: to_wide(many(scale, b'{"records":[', keyed, b"]}"), **named),
        "JSON: short keys": lambda: to_wide(
            many(scale / 52, b'{"records":[', b'{"key":"ab"}', b"]}")
        ),
        "JSON: long keys in a transaction": lambda: to_wide(
            many(scale, keyed_topics, keyed_v3, b"]}]}"), TRANSACTIONS
        ),
        "JSON: v3 long keys": lambda: to_wide(keyed_v3 * 60, V3_WIDE),
        "JSON: v3 batch of entries": lambda: to_v3(
            many(scale, b'{"entries":[', b'{"id":1}', b"]}"), ":batch"
        ),
        "JSON: v3 batch of headers": lambda: to_v3(
            many(scale, b'{"entries":[{"id":1,"headers":[', b'{"name":""}', b"]}]}"), ":batch"
        ),
        "JSON: v3 records with many headers": lambda: to_v3(headers * scaled(200, scale, 4)),
        "JSON: v3 batches of records with many headers": lambda: [
            to_v3(many_of_ten, ":batch")[0] * scaled(20, scale, 2)
        ],
        "JSON: v3 transactions with many headers": lambda: [
            [("POST", TRANSACTIONS, {"content": transaction})] * scaled(8, scale, 2)
        ],
        "JSON: v3 stream that unpacks to empty objects": lambda: to_v3(
            gzip.compress(b"{}" * scaled(8_000_000, scale, 200_000)), **packed
        ),
        "JSON: v3 objects": lambda: to_v3(objects),
        "JSON: v3 objects in gzip": lambda: to_v3(gzip.compress(objects), **packed),
    }
    for name, text in VALUES.items():
        for reader in READERS:
            for size in (MIB, 16 * MIB):
                phases[f"JSON: page of {size // MIB} MiB, {name}, {reader}"] = (
                    lambda text=text, reader=reader, size=size: pages(text, reader, size, scale)
                )
    return {name: functools.partial(in_phases, make) for name, make in phases.items()}
