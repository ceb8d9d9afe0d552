"""`tidelog clients` over two brokers, with a Kafka client at each, and one broker suspended."""

import contextlib
import socket
from pathlib import Path

import httpx

from tests.service.kafka.wire import framed
from tests.support.broker import json_of
from tests.support.ports import free_port
from tests.system.several import QUICK, brokers, stopped
from tidelog.service.kafka.messages.handshake import ApiVersionsRequest

ASKED = ApiVersionsRequest(client_software_name="library", client_software_version="1.2")


def test_clients_of_all_brokers_and_a_broker_that_does_not_answer(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]
    own = [{"kafka_port": port} for port in ports]
    slow = {**QUICK, "broker_timeout_ms": 60_000}
    with brokers(tmp_path, 2, own=own, **slow) as (a, b), contextlib.ExitStack() as stack:
        for name, port in (("x", ports[0]), ("y", ports[1]), ("y", ports[1])):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            connection.settimeout(60)
            connection.sendall(framed(ASKED, 3, client_id=name))
            assert connection.recv(4), "the answer"

        listing = json_of(a.cli("clients", "--json"))
        assert (listing["missing_brokers"], listing["is_truncated"]) == ([], False)
        assert listing["connections"] == 3
        for row in listing["clients"]:
            assert row.pop("bytes_in") > 0
            assert row.pop("bytes_out") > 0
            assert row.pop("since").startswith("20")
        same = {
            "software": "library",
            "version": "1.2",
            "principal": "",
            "address": "127.0.0.1",
            "is_tls": False,
        }
        assert listing["clients"] == [
            {"broker": "b", "client": "y", **same, "connections": 2, "requests": 2},
            {"broker": "a", "client": "x", **same, "connections": 1, "requests": 1},
        ]
        head, *rows = b.cli("clients").stdout.decode().splitlines()
        assert head.split()[:4] == ["broker", "client", "software", "principal"]
        assert [row.split()[:4] for row in rows] == [
            ["b", "y", "library", "1.2"],
            ["a", "x", "library", "1.2"],
        ]
        with stopped(b), httpx.Client(base_url=a.base_url, timeout=60) as http:
            for _ in range(3):  # before and after `a` knows that `b` is silent
                answer = http.get("/tidelog/v1/kafka-clients").json()
                assert answer["missing_brokers"] == ["b"]
                assert {row["broker"] for row in answer["clients"]} == {"a"}
            process = a.cli("clients")
            assert b"broker b did not answer: its clients are not shown" in process.stderr
