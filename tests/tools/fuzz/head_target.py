"""Bytes of a connection against a whole broker: heads, URLs, framing, pipelines, offers to upgrade.

Whatever comes, the broker writes nothing but answers of HTTP/1.1, none of them 500; every task of
the connection ends when the client goes, and no exception reaches the loop.
"""

import asyncio
import re
from typing import Any

from tests.service.conftest import Broker
from tests.service.virtual_connections import Connection, client_port
from tests.tools.fuzz import http_target
from tests.tools.fuzz.target import Target
from tidelog.service.formats.json_text import to_json

ANSWER_S = 60.0
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) [A-Z]")
V2 = b"Content-Type: application/vnd.kafka.json.v2+json\r\n"
RECORDS = b'{"records":[{"value":1}]}'


def _post(path: bytes, *fields: bytes, body: bytes = RECORDS) -> bytes:
    lines = [b"POST %b HTTP/1.1" % path, b"Host: x", *fields, b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*lines, b"", body])


def _connections() -> list[bytes]:
    get = b"GET /topics?a=%20b&c HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"
    chunked = b"POST /topics/t HTTP/1.1\r\nHost: x\r\n%bTransfer-Encoding: chunked\r\n\r\n" % V2
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA"
    return [
        get,
        get * 3,
        b"HEAD /ready HTTP/1.1\r\nHost: x\r\n\r\nOPTIONS /topics/t HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /topics/t/partitions/0/records HTTP/1.0\r\nAccept: text/event-stream\r\n\r\n",
        b"GET /topics/t/partitions/0/records?follow=true HTTP/1.1\r\nHost: x\r\n\r\n" + get,
        b"GET http://x/topics/%74 HTTP/1.1\r\nHost: x\r\nX-Request-Id: a-1\r\n\r\n",
        _post(b"/topics/t", V2[:-2]) + get,
        _post(b"/topics/t", V2[:-2], offer) + get,
        _post(b"/topics/t", V2[:-2], b"Expect: 100-continue"),
        _post(b"/topics/t", V2[:-2], b"Content-Encoding: gzip"),
        _post(b"/topics/t/partitions/0", b'Idempotency-Key: "k"', b"Cookie: a=b; c"),
        chunked + b"5\r\n" + RECORDS[:5] + b"\r\n14;x=y\r\n" + RECORDS[5:] + b"\r\n0\r\n\r\n" + get,
        b"GET /topics HTTP/1.1\r\nHost: x\r\nAuthorization: Basic YTpi\r\nOrigin: http://y\r\n\r\n",
        b"GET /" + to_json("a" * 60) + b" HTTP/1.1\r\nHost: x\r\nForwarded: for=a;host=b\r\n\r\n",
    ]


async def _speak(broker: Broker, data: bytes) -> bytes:
    """Send the bytes and go; return what the broker wrote."""
    problems: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: problems.append(context))
    config = client_port(broker)
    connection = Connection(config)
    tasks = connection.protocol.server_state.tasks
    await connection.send(data, piece=7 if len(data) % 4 == 0 else len(data) + 1)
    for _ in range(8):
        await asyncio.sleep(0)
    connection.end()
    if tasks:
        _, running_tasks = await asyncio.wait([*tasks], timeout=ANSWER_S)
        assert not running_tasks, f"{len(running_tasks)} tasks did not end"
    await asyncio.sleep(0)
    assert not problems, problems
    return bytes(connection.transport.written)


def check_connection(data: bytes) -> None:
    service = http_target.served()
    octets = service.run(_speak(service.broker, data))
    statuses = [int(status) for status in STATUS.findall(octets)]
    http_target.STATUSES.update(statuses)
    assert not octets or STATUS.match(octets), octets[:200]
    assert 500 not in statuses, octets


TARGETS = [Target("head", _connections, check_connection, 300)]
