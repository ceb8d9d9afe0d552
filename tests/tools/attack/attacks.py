"""The attacks: each attacks a broker and returns the broker's answers, counted by status.

`scale` is 1 for the full size, and less for a test. Counts and sizes are bounded; each attack ends
by itself. Bodies and heads are those of tests in tests/service and tests/system.
"""

import functools
import gzip
import io
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pyarrow as pa

from tests.service.formats.test_views_behind_nulls import SLOTS, WAYS, views
from tests.service.test_http import zstd
from tests.service.test_unpacked_bytes import TYPE as ARROW_TYPE
from tests.service.test_unpacked_bytes import packed
from tests.support.broker import Broker
from tests.system.test_admission import ATTACKS as CONNECTIONS
from tests.system.test_admission import attacked
from tests.tools.attack.body_attacks import body_attacks
from tests.tools.attack.brokers import AttackedBroker
from tests.tools.attack.chunk_attacks import chunk_attacks
from tests.tools.attack.connection_attacks import connection_attacks
from tests.tools.attack.follow_attacks import follow_attacks
from tests.tools.attack.forward_attacks import forward_attacks
from tests.tools.attack.http_client import opened, sent
from tests.tools.attack.json_attacks import json_attacks
from tests.tools.attack.kafka_attacks import kafka_attacks
from tests.tools.attack.measure import HOLD_S, MIB, VICTIM, Attack, scaled
from tests.tools.attack.name_attacks import name_attacks
from tests.tools.attack.offset_attacks import offset_attacks
from tests.tools.attack.probes import TYPE
from tests.tools.attack.produce_attacks import produce_attacks
from tests.tools.attack.read_attacks import read_attacks
from tests.tools.attack.share_attacks import share_attacks
from tests.tools.fuzz.arrow_bodies import BODIES as ARROW_BODIES

Attacks = Mapping[str, Attack]


def produced(bodies: Iterable[bytes], headers: Mapping[str, str]) -> list[tuple[str, str, Any]]:
    return [
        ("POST", f"/topics/{VICTIM}", {"content": body, "headers": dict(headers)})
        for body in bodies
    ]


def negative_views(broker: Broker) -> str:
    kinds = (pa.binary_view(), pa.string_view())
    bodies = [
        way(views(kind, slot)) for kind in kinds for way in WAYS.values() for slot in SLOTS.values()
    ]
    return sent(broker, produced(bodies, ARROW_TYPE))


def long_names(broker: Broker) -> str:
    """Create topics with names as long as allowed and longer; produce to each and seal it."""
    names = ["n" * size for size in (222, 223, 249)]
    body = {"configs": {"segment.ms": "100"}}
    topics = [{"json": {"topic_name": name, **body}} for name in names]
    creations = sent(broker, [("POST", "/admin/topics", topic) for topic in topics])
    record = {"content": b'{"records":[{"value":1}]}', "headers": TYPE}
    written = sent(broker, [("POST", f"/topics/{name}", record) for name in names])
    sealed = sent(broker, [("POST", f"/admin/topics/{name}/seal", {}) for name in names])
    return f"{creations}; {written}; {sealed}"


def unpacked(way: str, scale: float, broker: Broker) -> str:
    """Send one body that unpacks to more than a request may have, and smaller ones.

    A broker accepts one of these, and decodes the others before it refuses their partition.
    """
    rows = [480, *[120] * 8]  # of half a MiB each
    bodies = [packed(MIB // 2, scaled(count, scale, 1), partition=9)[way] for count in rows]
    bodies.append(packed(MIB // 2, scaled(120, scale, 1))[way])
    return sent(broker, produced(bodies, ARROW_TYPE), at_once=10)


def coded(coding: str, pack: Callable[[bytes], bytes], scale: float, broker: Broker) -> str:
    """Send compressed bodies of one record that is too large, each on a connection of its own."""
    draw = random.Random(1)
    pieces = [draw.randbytes(30).hex() + "x" * 2000 for _ in range(scaled(28 << 10, scale, 1))]
    value = "".join(pieces).encode()  # 55 MiB, of about 50 times the packed bytes
    body = pack(b'{"records":[{"value":"%b"}]}' % value)
    headers = {**TYPE, "content-encoding": coding}
    return sent(broker, produced([body] * scaled(40, scale, 4), headers), at_once=40)


def waiting_coded(scale: float, broker: Broker) -> str:
    """Send thousands of compressed bodies, each in one packet, faster than they are unpacked."""
    content = random.Random(1).randbytes(100 << 10) + bytes(15 * MIB)
    body = gzip.compress(content, 1)
    head = f"POST /topics/{VICTIM} HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with ExitStack() as stack:
        for connection in opened(broker, scaled(6_000, scale, 30), stack):
            connection.sendall(data)
        time.sleep(HOLD_S * scale)
    return ""


def empty_records(scale: float, broker: Broker) -> str:
    """Produce records without content, then fetch them with `max_bytes` of 1."""
    rows = int(1_000_000 * scale)
    table = pa.record_batch({"value": pa.nulls(rows)})
    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_batch(table)
    lines = b'{"records":[' + b",".join([b"{}"] * rows) + b"]}"
    creations = sent(broker, [*produced([out.getvalue()], ARROW_TYPE), *produced([lines], TYPE)])
    path = f"/topics/{VICTIM}/partitions/0/records?offset=0&max_bytes=1"
    return f"{creations}; {sent(broker, [('GET', path, {})] * 4, at_once=4)}"


def arrow_bodies(name: str, scale: float, broker: Broker) -> str:
    """Send the body a few times, on as many connections."""
    bodies = [ARROW_BODIES[name]()] * scaled(16, scale, 2)
    return sent(broker, produced(bodies, ARROW_TYPE), at_once=4)


def many_partitions(scale: float, broker: AttackedBroker) -> str:
    count = scaled(10_000, scale, 1)
    body = {"topic_name": "p", "partitions_count": count}
    creations = sent(broker, [("POST", "/admin/topics", {"json": body})])
    listing = f"{broker.cluster_path}/topics/p/partitions"
    return f"{creations}; {sent(broker, [('GET', listing, {})] * 4, at_once=4)}"


def held(data: bytes, scale: float, broker: Broker) -> str:
    with attacked(broker, data):
        time.sleep(HOLD_S * scale)
    return ""


def unfinished_objects(scale: float, broker: AttackedBroker) -> str:
    """Open streams of v3 records, each with an object of 15 MiB that does not end."""
    path = f"{broker.cluster_path}/topics/{VICTIM}/records"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    begin = b'{"value":{"type":"STRING","data":"'
    piece = b"%x\r\n%b\r\n" % (MIB, b"x" * MIB)
    with ExitStack() as stack:
        for connection in opened(broker, scaled(60, scale, 2), stack):
            connection.sendall(head.encode() + b"%x\r\n%b\r\n" % (len(begin), begin))
            with suppress(OSError):  # the broker has perhaps refused the object
                for _ in range(15):
                    connection.sendall(piece)
        time.sleep(HOLD_S * scale)
    return ""


def woken(accept: str, query: str, scale: float, broker: Broker) -> str:
    """Open readers that wait for the same records, then produce these records."""
    head = f"GET /topics/{VICTIM}/partitions/0/records?offset=latest&{query} HTTP/1.1\r\n"
    data = f"{head}Host: x\r\nAccept: {accept}\r\n\r\n".encode()
    bodies = [b'{"records":[{"value":"%b"}]}' % (b"x" * 1000)] * scaled(100, scale, 5)
    with attacked(broker, data):
        return sent(broker, produced(bodies, TYPE))


def attacks(scale: float) -> Attacks:
    """Return the attacks on a broker without security, by name."""
    wait = "timeout=30000"
    json_type = "application/vnd.kafka.json.v2+json"
    table: dict[str, Attack] = {
        "views of negative size": negative_views,
        "topics with long names": long_names,
        "bodies that unpack (zstd)": functools.partial(unpacked, "zstd", scale),
        "bodies that unpack (dictionary)": functools.partial(unpacked, "dictionary", scale),
        "bodies with Content-Encoding (gzip)": functools.partial(
            coded, "gzip", gzip.compress, scale
        ),
        "bodies with Content-Encoding (zstd)": functools.partial(coded, "zstd", zstd, scale),
        "waiting bodies with Content-Encoding": functools.partial(waiting_coded, scale),
        "unfinished objects of v3 streams": functools.partial(unfinished_objects, scale),
        "records without bytes": functools.partial(empty_records, scale),
        "many partitions": functools.partial(many_partitions, scale),
        "followers of one partition": functools.partial(woken, "text/event-stream", "", scale),
        "long polls on one partition": functools.partial(woken, json_type, wait, scale),
    }
    for name in ARROW_BODIES:
        table[f"Arrow: {name}"] = functools.partial(arrow_bodies, name, scale)
    for name, data in CONNECTIONS.items():
        table[f"connections: {name}"] = functools.partial(held, data, scale)
    return table | json_attacks(scale) | kafka_attacks(scale)


def secured_attacks(scale: float) -> Attacks:
    """Return the attacks of principals on a broker with `security=keys`, by name."""
    shared = produce_attacks(scale) | share_attacks(scale) | read_attacks(scale)
    secured = body_attacks(scale) | name_attacks(scale) | follow_attacks(scale)
    placed = forward_attacks(scale) | connection_attacks(scale) | offset_attacks(scale)
    return shared | secured | placed | chunk_attacks(scale)
